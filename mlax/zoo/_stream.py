"""Streaming: the tokens of generated text as they come."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from mlax.core import Layer, Tree
from mlax.zoo._arguments import Padding, check_inputs, check_prompts, check_sampler, check_stop, explain_errors
from mlax.zoo._decoder import choose_fusion, prepare_decoder
from mlax.zoo._generate import Carry, Settings, Source, capacity, next_token, share_counters, start
from mlax.zoo._sampling import Greedy, Sample


def stream(
    model: Layer,
    trainables: Tree,
    prompts: Any,
    lengths: Any = None,
    *,
    max_new_tokens: int,
    sampler: Greedy | Sample = Greedy(),  # noqa: B008 - a frozen description
    rng: jax.Array | None = None,
    stop: int | Sequence[int] = (),
    padding: Padding = "right",
    pad: int = 0,
    inputs: tuple[Any, ...] = (),
    non_trainables: Tree = None,
    chunk: int = 8,
) -> Iterator[np.ndarray]:
    """Stream generated text: yield the next token (b,) of each row, int32, as they come; those of `zoo.generate`.

        tokens, text = [], ""
        for token in zoo.stream(model, trainables, prompts, max_new_tokens=64, stop=tokenizer.stop):
            tokens.append(token[0])
            new = tokenizer.decode([tokens])[0].rstrip("\\ufffd")  # the first bytes of a character wait for the rest
            print(new[len(text) :], end="", flush=True)
            text = new

    Tokens are computed in chunks of `chunk`, each a call of one compiled program whose state is donated: the next chunk
    is computed while the tokens of the last one are consumed. A row that has ended yields `pad`, and the iteration ends
    with the last row. The other arguments are those of `zoo.generate`.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> [token.shape for token in zoo.stream(model, trainables, jnp.ones((2, 3), "int32"), max_new_tokens=2)]
    [(2,), (2,)]
    """
    prompts, lengths = check_prompts("stream", model, prompts, lengths, max_new_tokens, padding)
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"stream: chunk is {chunk!r}, but must be an integer of at least 1.")
    stop, inputs = check_stop("stream", stop), check_inputs("stream", inputs)
    rng = check_sampler("stream", sampler, rng)
    rows, slots = prompts.shape[0], capacity(prompts, max_new_tokens + chunk)
    fuse = choose_fusion(trainables)
    settings = Settings(model, max_new_tokens, sampler.structure(), padding, pad, False, fuse)
    decoder, weights = prepare_decoder(model, slots, trainables, rows=rows, fuse=fuse)  # once, not in each chunk
    source = Source(weights, sampler.numbers(), stop, rng)
    return _stream(settings, decoder, source, chunk, (non_trainables, prompts, lengths, inputs))


def _stream(settings: Settings, decoder: Layer, source: Source, chunk: int, prompts: Any) -> Iterator[np.ndarray]:
    with explain_errors("stream", settings.model, *prompts[1:]):
        carry = _start(settings, decoder, source, *prompts)
    shown: Any = carry.token[None]
    left, has_stopped = settings.max_new_tokens, np.zeros(shown.shape[1], bool)
    while True:
        tokens = np.asarray(shown)  # waits for the device
        if len(tokens) < left and not np.asarray(carry.has_stopped).all():
            carry, shown = _next_chunk(settings, decoder, chunk, source, carry)
        for token in tokens:
            yield token
            left, has_stopped = left - 1, has_stopped | (token < 0) | np.isin(token, source.stop)
            if left == 0 or has_stopped.all():
                return


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(settings: Settings, decoder: Layer, source: Source, *prompts: Any) -> Carry:
    return share_counters(decoder, start(settings, decoder, source, *prompts)[0])


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _next_chunk(settings: Settings, decoder: Layer, chunk: int, source: Source, carry: Carry) -> tuple[Carry, Any]:
    def step(carry: Carry, _: Any) -> tuple[Carry, Any]:
        carry, token, _ = next_token(settings, decoder, source, carry)
        return carry, token

    return lax.scan(step, carry, length=chunk)
