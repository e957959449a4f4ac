"""Speculative decoding: a small model drafts tokens, and the large one verifies several of them in one call."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax import nn
from mlax.core import (
    Layer,
    Tree,
    document_tuple,
    fields_of,
    flatten_paths,
    frozen,
    map_layers,
    with_fields,
)
from mlax.zoo._arguments import Padding, check_prompts, check_sampler, check_stop, explain_errors
from mlax.zoo._decoder import Fuse, choose_fusion, prepare_decoder
from mlax.zoo._generate import capacity, ends_row, prefill, shift_left
from mlax.zoo._sampling import Greedy, Sample, mark_invalid


@document_tuple
class Speculated(NamedTuple):
    """What `zoo.speculative_generate` returns."""

    tokens: jax.Array  # (b, n) int32: those after the prompt, the stop token included, then `pad`; -1: logits were NaN
    lengths: jax.Array  # (b,) int32: how many of them are not padding; -1 ends a row
    acceptance: jax.Array  # (b,) float32: the share of drafted tokens that were accepted


def speculative_generate(
    model: Layer,
    trainables: Tree,
    draft: Layer,
    draft_trainables: Tree,
    prompts: Any,
    lengths: Any = None,
    *,
    max_new_tokens: int,
    draft_tokens: int = 4,
    sampler: Greedy | Sample = Greedy(),  # noqa: B008 - a frozen description
    rng: jax.Array | None = None,
    stop: int | Sequence[int] = (),
    padding: Padding = "right",
    pad: int = 0,
) -> Speculated:
    """Speculative decoding: the text that `model` would generate, in fewer calls of it, with the help of `draft`.

    The draft model, a smaller one with the same tokens, continues each row by `draft_tokens` tokens, one at a time. One
    call of the large model computes the logits of all of them. The first ones are accepted, as many as the rule of
    https://arxiv.org/abs/2211.17192, Algorithm 1, allows, and one more token comes from the large model, so that the
    result has exactly the distribution of the large model alone: its own tokens with zoo.Greedy. The caches of both are
    rewound to what was accepted, in each row separately. All of it is one compiled program.

    Arguments are those of `zoo.generate`. The models must keep their past in KV caches, which can be rewound, and the
    sampler cannot have a repetition penalty, since the draft is made before the text is known.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> draft = zoo.GPT2(vocabulary=50, positions=16, width=4, depth=1, heads=1)
    >>> trainables, small = (each.init(jax.random.key(0), each.example_input())[0] for each in (model, draft))
    >>> result = zoo.speculative_generate(model, trainables, draft, small, jnp.ones((2, 3), "int32"), max_new_tokens=6)
    >>> result.tokens.shape
    (2, 6)
    """
    for each in (model, draft):
        prompts, checked = check_prompts("speculative_generate", each, prompts, lengths, max_new_tokens, padding)
    if not isinstance(draft_tokens, int) or draft_tokens < 1:
        raise ValueError(
            f"speculative_generate: draft_tokens is {draft_tokens!r}, but must be an integer of at least 1."
        )
    stop, rng = check_stop("speculative_generate", stop), check_sampler("speculative_generate", sampler, rng)
    if sampler.needs_seen:
        raise ValueError("speculative_generate: the sampler has a repetition_penalty; pass None, or use zoo.generate.")
    fuse = choose_fusion((trainables, draft_trainables))
    settings = SpeculativeSettings(model, draft, max_new_tokens, draft_tokens, sampler.structure(), padding, pad, fuse)
    rng = jax.random.key(0) if rng is None else rng  # of no influence on Greedy
    weights = trainables, draft_trainables
    with contextlib.ExitStack() as stack:
        for each in (draft, model):
            stack.enter_context(explain_errors("speculative_generate", each, prompts, checked, ()))
        return _generate(settings, weights, prompts, checked, sampler.numbers(), stop, rng)


@frozen
class SpeculativeSettings:
    """What the compiled program depends on, besides shapes."""

    model: Layer
    draft: Layer
    max_new_tokens: int
    draft_tokens: int
    sampler: Greedy | Sample
    padding: Padding
    pad: int
    fuse: Fuse


class Round(NamedTuple):
    """What the loop over rounds of drafting and verifying carries."""

    number: Any  # () int32, of rounds so far
    tokens: Any  # (b, n) int32, the text so far
    count: Any  # (b,) int32, how many of them
    has_stopped: Any  # (b,) bool
    last: Any  # (b,) int32, the last token, which the caches do not have yet
    state: Tree  # of the large model
    draft_state: Tree
    drafted: Any  # (b,) int32, tokens that were drafted
    accepted: Any  # (b,) int32, and those of them that were accepted


@functools.partial(jax.jit, static_argnums=0)
def _generate(
    settings: SpeculativeSettings,
    trainables: tuple[Tree, Tree],
    prompts: Any,
    lengths: Any,
    numbers: Any,
    stop: Any,
    rng: Any,
) -> Speculated:
    b, n = prompts.shape[0], settings.max_new_tokens
    if settings.padding == "left" and lengths is not None:
        prompts = shift_left(prompts, lengths)
    slots = capacity(prompts, n)
    large, weights = _prepare(settings, settings.model, slots, trainables[0], b)
    small, small_weights = _prepare(settings, settings.draft, slots, trainables[1], b)
    logits, state = prefill(large, weights, None, prompts, lengths, ())
    draft_logits, draft_state = prefill(small, small_weights, None, prompts, lengths, ())
    for each in (state, draft_state):
        _check_rewindable(each)
    if logits.shape != draft_logits.shape:
        raise ValueError(
            f"speculative_generate: the model has {logits.shape[-1]} tokens, but the draft model "
            f"{draft_logits.shape[-1]}; they must have the same."
        )
    first = _draw(jax.random.fold_in(rng, 0), _probabilities(settings.sampler, logits, numbers))
    zeros = jnp.zeros(b, np.int32)
    tokens = jnp.full((b, n), settings.pad, np.int32).at[:, 0].set(first)
    start = Round(np.int32(1), tokens, zeros + 1, ends_row(first, stop), first, state, draft_state, zeros, zeros)
    verify = map_layers(large, "", _with_all_logits)

    def draft(rng: Any, token: Any, state: Tree, size: Any) -> tuple[Any, Any, Tree]:
        """The drafted tokens (b, k), their distributions (b, k, v), and the state with `size` (b,) more tokens."""

        def step(carry: Any, place: Any) -> tuple[Any, Any]:
            token, state = carry
            inputs = token[:, None], (place < size).astype(np.int32)
            logits, state = small.fwd(inputs, small_weights, state, inference_mode=True)
            odds = _probabilities(settings.sampler, logits[:, -1], numbers)
            token = jnp.maximum(_draw(jax.random.fold_in(rng, place), odds), 0)  # any, if they are NaN
            return (token, state), (token, odds)

        # once more than there are drafts: if all are accepted, the cache must have the last one, too
        places = jnp.arange(settings.draft_tokens + 1, dtype=np.int32)
        (_, state), (drafts, odds) = lax.scan(step, (token, state), places)
        return drafts[:-1].T, odds[:-1].swapaxes(0, 1), state

    def run_round(carry: Round) -> Round:
        rngs = jax.random.split(jax.random.fold_in(rng, carry.number), 2)
        remaining = jnp.where(carry.has_stopped, 0, n - carry.count)
        size = jnp.minimum(remaining, settings.draft_tokens + 1)  # tokens of each row in the calls of this round
        drafts, draft_odds, draft_state = draft(rngs[0], carry.last, carry.draft_state, size)
        inputs = jnp.concatenate([carry.last[:, None], drafts], axis=1)  # (b, k + 1)
        logits, state = verify.fwd((inputs, size), weights, carry.state, inference_mode=True)
        odds = _probabilities(settings.sampler, logits, numbers)  # (b, k + 1, v)
        accepted, token = accept(rngs[1], drafts, draft_odds, odds, jnp.maximum(size - 1, 0))
        places = jnp.arange(settings.draft_tokens + 1, dtype=np.int32)[None]
        new = jnp.where(places < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), token[:, None])
        is_stop = ends_row(new, stop) & (places <= accepted[:, None])
        added = jnp.where(is_stop.any(1), jnp.argmax(is_stop, axis=1).astype(np.int32), accepted) + 1
        added = jnp.where(remaining > 0, added, 0)
        where = jnp.where(places < added[:, None], carry.count[:, None] + places, n)
        last = jnp.take_along_axis(new, jnp.maximum(added - 1, 0)[:, None], axis=1)[:, 0]
        rewind = functools.partial(_rewind, size=jnp.maximum(size - added, 0))
        return Round(
            carry.number + 1,
            carry.tokens.at[jnp.arange(b)[:, None], where].set(new, mode="drop"),
            carry.count + added,
            carry.has_stopped | (is_stop.any(1) & (remaining > 0)),
            jnp.where(remaining > 0, last, carry.last),
            rewind(state),
            rewind(draft_state),
            carry.drafted + jnp.maximum(size - 1, 0),
            carry.accepted + jnp.where(remaining > 0, accepted, 0),
        )

    def is_running(carry: Round) -> Any:
        return (~carry.has_stopped & (carry.count < n)).any()

    end = lax.while_loop(is_running, run_round, start)
    rate = end.accepted.astype(np.float32) / jnp.maximum(end.drafted, 1).astype(np.float32)
    return Speculated(end.tokens, end.count, rate)


def accept(rng: Any, drafts: Any, draft_odds: Any, odds: Any, sizes: Any) -> tuple[Any, Any]:
    """How many of the drafts (b, k) are accepted (b,), and the token (b,) that follows them.

    Of each row the first `sizes` (b,) drafts count. `draft_odds` (b, k, v) and `odds` (b, k + 1, v) are the
    distributions of both models. A draft x is accepted with the probability min(1, p(x) / q(x)), if all before it
    were; the token comes from max(0, p - q), normalized, after a rejected draft, and from p after all of them.
    """
    k = drafts.shape[1]
    accept_rng, token_rng = jax.random.split(rng)
    p, q = (jnp.take_along_axis(each[:, :k], drafts[..., None], axis=-1)[..., 0] for each in (odds, draft_odds))
    is_counted = jnp.arange(k, dtype=np.int32)[None] < sizes[:, None]
    is_accepted = (jax.random.uniform(accept_rng, q.shape, q.dtype) * q < p) & is_counted
    accepted = jnp.cumprod(is_accepted, axis=1).sum(axis=1).astype(np.int32)
    large = _take(odds, accepted)
    # past the last draft there is none to subtract
    small = jnp.where((accepted < sizes)[:, None], _take(jnp.pad(draft_odds, ((0, 0), (0, 1), (0, 0))), accepted), 0.0)
    residual = jnp.maximum(large - small, 0.0)
    has_residual = residual.sum(axis=-1, keepdims=True) > 0  # else both are equal, up to rounding
    return accepted, _draw(token_rng, jnp.where(has_residual, residual, large))


def _take(odds: Any, place: Any) -> Any:
    return jnp.take_along_axis(odds, place[:, None, None], axis=1)[:, 0]


def _draw(rng: Any, odds: Any) -> Any:
    """A token (b,) of each distribution (b, v), which need not sum to 1; -1 if it is zero or NaN."""
    logits = jnp.log(odds)
    return mark_invalid(logits, jax.random.categorical(rng, logits).astype(np.int32))


def _probabilities(sampler: Greedy | Sample, logits: Any, numbers: Any) -> Any:
    """The distribution (..., v) that the sampler draws from, float32; of Greedy, all of it on one token."""
    rows = logits.reshape(-1, logits.shape[-1])
    if isinstance(sampler, Greedy):
        return jax.nn.one_hot(sampler.choose(None, rows), rows.shape[-1]).reshape(logits.shape)
    values, tokens = sampler.filter(rows, None, numbers)
    odds = jax.nn.softmax(values, axis=-1)
    if tokens is not None:
        odds = jnp.zeros(rows.shape, odds.dtype).at[jnp.arange(rows.shape[0])[:, None], tokens].set(odds)
    return odds.reshape(logits.shape)


def _prepare(settings: SpeculativeSettings, model: Layer, length: int, trainables: Tree, rows: int) -> tuple[Any, Tree]:
    """The decoder, whose ring buffers have slots for tokens that may be rejected, and its trainables."""

    def widen_ring(path: str, layer: Layer) -> Layer:
        if isinstance(layer, nn.KeyValueCache) and layer.ring:
            return with_fields(layer, capacity=layer.capacity + settings.draft_tokens)
        return layer

    decoder, trainables = prepare_decoder(model, length, trainables, rows=rows, fuse=settings.fuse)
    return map_layers(decoder, "", widen_ring), trainables


def _with_all_logits(path: str, layer: Layer) -> Layer:
    return with_fields(layer, last_only=False) if "last_only" in fields_of(layer) else layer


CACHED = ("key", "value", "key_scale", "value_scale", "segments")


def _check_rewindable(state: Tree) -> None:
    """Raise for state other than KV caches and counts of tokens, which cannot go back."""
    for path in flatten_paths(state):
        *owner, name = path.split("/")
        if name != "count" and not (owner and owner[-1] == "cache" and name in CACHED):
            raise ValueError(
                f"speculative_generate: the state {path} cannot be rewound; only models that keep their past in KV "
                "caches can be verified or draft."
            )


def _rewind(state: Tree, size: Any) -> Tree:
    """The state before its last `size` (b,) tokens: their slots are overwritten by those that follow."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf - size if path[-1].key == "count" else leaf, state)
