"""Text generation: a prompt and a loop over tokens with a KV cache, in one compiled program."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax.core import Layer, Tree, document_tuple, frozen
from mlax.zoo._arguments import Padding, check_inputs, check_prompts, check_sampler, check_stop, explain_errors
from mlax.zoo._decoder import Counters, Fuse, choose_fusion, init_state, prepare_decoder
from mlax.zoo._sampling import Greedy, Sample

CHUNK = 16  # tokens between two checks whether all rows have stopped, each of which costs a GPU a pause


@document_tuple
class Generated(NamedTuple):
    """What `zoo.generate` and `zoo.beam_search` return."""

    tokens: jax.Array  # (b, n) int32: those after the prompt, the stop token included, then `pad`; -1: logits were NaN
    lengths: jax.Array  # (b,) int32: how many of them are not padding; -1 ends a row
    log_probs: jax.Array | None = None  # (b, n) float32, of each token; of beams (b,), the score


def generate(
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
    log_probs: bool = False,
) -> Generated:
    """Generate text: continue prompts, tokens (b, t) of `lengths` (b,), with a KV cache, in one compiled program.

        result = zoo.generate(model, trainables, prompts, lengths, max_new_tokens=64, stop=50256)
        result = zoo.generate(..., sampler=zoo.Sample(temperature=0.8, top_p=0.95), rng=jax.random.key(0))

    `model` is a language model from (tokens, lengths) to logits (b, t, v): any with causal nn.MultiHeadAttention, or
    other state between calls; see `zoo.decoder`. Rows end at their first `stop` token, and the loop when all have
    ended. Prompts of different lengths are padded on the side `padding`. `inputs` follow the lengths in the first call,
    for the encoder of an encoder-decoder.

    It compiles once for each model, shape of prompts, `max_new_tokens`, number of stop tokens and kind of sampler, not
    for other stop tokens, keys or numbers of a sampler. Weights of a Repeat are copied once at each call, unless
    `mlax.unstack` did that before. With `log_probs` the log-probability of each token is returned, that of the model
    before any filter.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> prompts, lengths = jnp.array([[1, 2, 3], [4, 0, 0]]), jnp.array([3, 1])
    >>> zoo.generate(model, trainables, prompts, lengths, max_new_tokens=4).tokens.shape
    (2, 4)
    """
    prompts, lengths = check_prompts("generate", model, prompts, lengths, max_new_tokens, padding)
    stop, inputs = check_stop("generate", stop), check_inputs("generate", inputs)
    rng = check_sampler("generate", sampler, rng)
    fuse = choose_fusion(trainables)
    settings = Settings(model, max_new_tokens, sampler.structure(), padding, pad, log_probs, fuse)
    with explain_errors("generate", model, prompts, lengths, inputs):
        return generate_tokens(
            settings, trainables, non_trainables, prompts, lengths, inputs, sampler.numbers(), stop, rng
        )


@frozen
class Settings:
    """What the compiled program depends on, besides shapes."""

    model: Layer
    max_new_tokens: int
    sampler: Greedy | Sample
    padding: Padding
    pad: int
    log_probs: bool
    fuse: Fuse = "nothing"


class Carry(NamedTuple):
    """What a loop over tokens carries."""

    index: Any  # () int32, the tokens of each row so far
    token: Any  # (b,) int32, the last of them
    has_stopped: Any  # (b,) bool
    state: Tree  # of the decoder
    seen: Any  # (b, v) bool: the tokens that a row has, if the sampler needs that


class Source(NamedTuple):
    """What a loop over tokens only reads."""

    trainables: Tree
    numbers: dict[str, Any]  # of the sampler
    stop: Any  # (k,) int32
    rng: Any  # a key


@functools.partial(jax.jit, static_argnums=0)
def generate_tokens(
    settings: Settings,
    trainables: Tree,
    non_trainables: Tree,
    prompts: Any,
    lengths: Any,
    inputs: tuple[Any, ...],
    numbers: dict[str, Any],
    stop: Any,
    rng: Any,
) -> Generated:
    """`generate` after its checks: one compiled program."""
    b, n = prompts.shape[0], settings.max_new_tokens
    steps = n - 1 if not stop.size else -(-(n - 1) // CHUNK) * CHUNK
    slots = capacity(prompts, steps + 1)
    decoder, weights = prepare_decoder(settings.model, slots, trainables, rows=b, fuse=settings.fuse)
    source = Source(weights, numbers, stop, rng)
    carry, odds = start(settings, decoder, source, non_trainables, prompts, lengths, inputs)
    carry = share_counters(decoder, carry, align_rows=lengths is None)
    tokens = jnp.full((b, steps + 1), settings.pad, np.int32).at[:, 0].set(carry.token)
    scores = None if odds is None else jnp.zeros((b, steps + 1), np.float32).at[:, 0].set(odds)

    def step(_: Any, loop: Any) -> Any:
        carry, tokens, scores = loop
        place = carry.index
        carry, shown, odds = next_token(settings, decoder, source, carry)
        tokens = write_column(tokens, shown, place)
        scores = None if scores is None else write_column(scores, odds, place)
        return carry, tokens, scores

    loop = (carry, tokens, scores)
    if not stop.size:  # the loop's own counter is the index: one fewer to add to at each token
        carry, tokens, scores = lax.fori_loop(
            np.int32(1), np.int32(n), lambda i, loop: step(i, (loop[0]._replace(index=i), *loop[1:])), loop
        )
    else:
        carry, tokens, scores = lax.while_loop(
            lambda loop: (loop[0].index < n) & ~loop[0].has_stopped.all(),
            lambda loop: lax.fori_loop(0, CHUNK, step, loop),
            loop,
        )
    lengths = count_tokens(tokens[:, :n], stop)
    is_token = jnp.arange(n)[None] < lengths[:, None]
    tokens = jnp.where(is_token, tokens[:, :n], np.int32(settings.pad))
    return Generated(tokens, lengths, None if scores is None else jnp.where(is_token, scores[:, :n], 0.0))


def write_column(array: Any, column: Any, place: Any) -> Any:
    """An array (b, n) with one column replaced.

    For one row, a slice that is contiguous, XLA would copy it on another stream of a GPU, outside of the graph of
    kernels that the rest of the loop is.
    """
    if array.shape[0] == 1:
        return jnp.where(jnp.arange(array.shape[1])[None] == place, column[:, None], array)
    return lax.dynamic_update_slice(array, column[:, None], (np.int32(0), place))


def start(
    settings: Settings, decoder: Any, source: Source, non_trainables: Tree, prompts: Any, lengths: Any, inputs: Any
) -> tuple[Carry, Any]:
    """The carry after the prompts and the first token, and its log-probability."""
    prompts = shift_left(prompts, lengths) if settings.padding == "left" and lengths is not None else prompts
    logits, state = prefill(decoder, source.trainables, non_trainables, prompts, lengths, inputs)
    seen = _seen_tokens(prompts, lengths, logits.shape[-1]) if settings.sampler.needs_seen else None
    token = settings.sampler.choose(_key(source.rng, 0), logits, seen, source.numbers)
    carry = Carry(np.int32(1), token, ends_row(token, source.stop), state, _mark(seen, token))
    return carry, log_prob(logits, token) if settings.log_probs else None


def share_counters(decoder: Any, carry: Carry, *, align_rows: bool = False) -> Carry:
    """The carry as `next_token` takes it, with one counter of tokens for all layers of a Chain.

    With `align_rows` also one for all rows, which are at the same position then, so that a token is one slice of a
    cache.
    """
    counters = Counters(decoder)
    state = counters.drop(carry.state)
    return carry._replace(state=counters.align_rows(state) if align_rows else state)


def next_token(settings: Settings, decoder: Any, source: Source, carry: Carry) -> tuple[Carry, Any, Any]:
    """The carry after one more token; the token (b,), padding in rows that have stopped; and its log-probability."""
    counters = Counters(decoder)
    state = counters.restore(carry.state)
    logits, state = decoder.fwd(carry.token[:, None], source.trainables, state, inference_mode=True)
    logits, state = logits[:, -1], counters.drop(state)
    token = settings.sampler.choose(_key(source.rng, carry.index), logits, carry.seen, source.numbers)
    shown, has_stopped = token, carry.has_stopped
    if source.stop.size:  # without, a row ends only at -1, after which all its logits are NaN
        shown = jnp.where(has_stopped, np.int32(settings.pad), token)
        has_stopped = has_stopped | ends_row(token, source.stop)
    odds = jnp.where(carry.has_stopped, 0.0, log_prob(logits, token)) if settings.log_probs else None
    return Carry(carry.index + 1, token, has_stopped, state, _mark(carry.seen, token)), shown, odds


def prefill(
    decoder: Any, trainables: Tree, non_trainables: Tree, prompts: Any, lengths: Any, inputs: tuple[Any, ...]
) -> tuple[Any, Tree]:
    """The logits (b, v) after the last token of each prompt, and the state of the decoder."""
    x = (prompts, lengths, *inputs) if lengths is not None or inputs else prompts
    logits, state = decoder.fwd(x, trainables, init_state(decoder, x, non_trainables), inference_mode=True)
    if logits.shape[1] == 1 or lengths is None:  # a model with `last_only` has one only
        return logits[:, -1], state
    return jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0], state


def capacity(prompts: Any, new_tokens: int) -> int:
    """The slots of a cache for all tokens but the last; a multiple of 64, which GPUs compute with faster."""
    return -(-(prompts.shape[1] + new_tokens - 1) // 64) * 64


def shift_left(prompts: Any, lengths: Any) -> Any:
    """Prompts padded on the left as prompts padded on the right."""
    t = prompts.shape[1]
    places = (jnp.arange(t, dtype=np.int32)[None] + t - lengths[:, None]) % t
    return jnp.take_along_axis(prompts, places, axis=1)


def count_tokens(tokens: Any, stop: Any) -> Any:
    """How many tokens (b, n) there are in each row, up to and with the one that ends it."""
    is_end = ends_row(tokens, stop)
    first = jnp.argmax(is_end, axis=1) + 1
    return jnp.where(is_end.any(axis=1), first, tokens.shape[1]).astype(np.int32)


def ends_row(tokens: Any, stop: Any) -> Any:
    """Whether each token is a stop token, or -1, which stands for NaN."""
    return (tokens < 0) | jnp.isin(tokens, stop) if stop.size else tokens < 0


def log_prob(logits: Any, token: Any) -> Any:
    """The log-probability (b,) of one token (b,) of logits (b, v), in float32."""
    odds = jax.nn.log_softmax(logits.astype(np.float32), axis=-1)
    return jnp.take_along_axis(odds, token[:, None], axis=-1)[:, 0]


def _key(rng: Any, index: Any) -> Any:
    return None if rng is None else jax.random.fold_in(rng, index)


def _seen_tokens(prompts: Any, lengths: Any, vocabulary: int) -> Any:
    b, t = prompts.shape
    is_token = np.ones((b, t), bool) if lengths is None else jnp.arange(t)[None] < lengths[:, None]
    places = jnp.where(is_token, prompts, vocabulary)  # past the end: dropped
    return jnp.zeros((b, vocabulary), bool).at[jnp.arange(b)[:, None], places].set(True, mode="drop")


def _mark(seen: Any, token: Any) -> Any:
    return None if seen is None else seen.at[jnp.arange(token.shape[0]), token].set(True)
