"""Beam search: the likeliest of several texts that are continued side by side."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax.core import Layer, Tree, frozen
from mlax.zoo._arguments import Padding, check_inputs, check_prompts, check_stop, explain_errors
from mlax.zoo._decoder import Fuse, choose_fusion, prepare_decoder, row_axes
from mlax.zoo._generate import Generated, capacity, count_tokens, ends_row, prefill, shift_left

EarlyStopping = Literal["heuristic", "first", "never"]
WORST = np.float32(-1e9)  # the score of what does not exist


def beam_search(
    model: Layer,
    trainables: Tree,
    prompts: Any,
    lengths: Any = None,
    *,
    beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = "heuristic",
    stop: int | Sequence[int] = (),
    returned: int | None = None,
    padding: Padding = "right",
    pad: int = 0,
    inputs: tuple[Any, ...] = (),
    non_trainables: Tree = None,
) -> Generated:
    """Beam search: continue prompts (b, t) of `lengths` (b,) by the text of the highest score, in one compiled program.

        result = zoo.beam_search(model, trainables, prompts, lengths, beams=4, max_new_tokens=64, stop=50256)

    Of each row `beams` texts are continued side by side, all with the prompt's KV cache. The score of a text is the sum
    of the log-probabilities of its tokens divided by its length to the power `length_penalty`, above 0 in favor of
    longer ones. A text ends at its first `stop` token, and a row when `beams` texts have ended and
    - "heuristic": no other is better at its present length, as `early_stopping=False` in transformers;
    - "first": at once, as True there;
    - "never": no other can become better.

    Tokens are the best text (b, n), or with `returned` so many texts (b, returned, n), the best one first; log_probs
    are their scores, (b,) or (b, returned). The other arguments are those of `zoo.generate`.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> zoo.beam_search(model, trainables, jnp.ones((2, 3), "int32"), beams=3, max_new_tokens=4).tokens.shape
    (2, 4)
    """
    prompts, lengths = check_prompts("beam_search", model, prompts, lengths, max_new_tokens, padding)
    if not isinstance(beams, int) or beams < 1:
        raise ValueError(f"beam_search: beams is {beams!r}, but must be an integer of at least 1.")
    if returned is not None and not 1 <= returned <= beams:
        raise ValueError(f"beam_search: returned is {returned}, but must be between 1 and the {beams} beams.")
    if early_stopping not in ("heuristic", "first", "never"):
        raise ValueError(f"beam_search: early_stopping is {early_stopping!r}, but must be heuristic, first or never.")
    stop, inputs = check_stop("beam_search", stop), check_inputs("beam_search", inputs)
    fuse = choose_fusion(trainables)
    search = BeamSearch(model, beams, max_new_tokens, early_stopping, padding, pad, fuse)
    arguments = (trainables, non_trainables, prompts, lengths, inputs, np.float32(length_penalty), stop)
    with explain_errors("beam_search", model, prompts, lengths, inputs):
        tokens, lengths, scores = _search(search, *arguments)
    best = 0 if returned is None else slice(returned)
    return Generated(tokens[:, best], lengths[:, best], scores[:, best])


@frozen
class BeamSearch:
    """What the compiled program depends on, besides shapes."""

    model: Layer
    beams: int
    max_new_tokens: int
    early_stopping: EarlyStopping
    padding: Padding
    pad: int
    fuse: Fuse


class Beams(NamedTuple):
    """Texts of each row, the best one first."""

    tokens: Any  # (b, k, n) int32
    scores: Any  # (b, k) float32

    def take(self, places: Any) -> "Beams":
        """The texts at `places` (b, j) of each row."""
        return Beams(*(_take_beams(each, places) for each in self))


class Carry(NamedTuple):
    """What the loop carries."""

    index: Any  # () int32, the tokens of each text so far
    running: Beams  # texts that are continued, with sums of log-probabilities
    ended: Beams  # the best that have ended, with their scores
    has_ended: Any  # (b, k) bool: whether there is an ended text at this place
    can_improve: Any  # (b,) bool: whether a running text may become better than an ended one
    all_end: Any  # () bool: whether no text can be continued
    state: Tree  # of the decoder, a row for each running text


@functools.partial(jax.jit, static_argnums=0)
def _search(
    search: BeamSearch,
    trainables: Tree,
    non_trainables: Tree,
    prompts: Any,
    lengths: Any,
    inputs: tuple[Any, ...],
    length_penalty: Any,
    stop: Any,
) -> tuple[Any, Any, Any]:
    b, k, n = prompts.shape[0], search.beams, search.max_new_tokens
    decoder, weights = prepare_decoder(search.model, capacity(prompts, n), trainables, rows=b * k, fuse=search.fuse)
    prompts = shift_left(prompts, lengths) if search.padding == "left" and lengths is not None else prompts
    logits, state = prefill(decoder, weights, non_trainables, prompts, lengths, inputs)
    axes = row_axes(decoder, (prompts, lengths, *inputs) if lengths is not None or inputs else prompts)
    state = jax.tree.map(lambda leaf, axis: leaf if axis < 0 else jnp.repeat(leaf, k, axis), state, axes)
    empty = jnp.full((b, k, n), search.pad, np.int32)
    none = jnp.full((b, k), WORST)
    carry = Carry(
        index=np.int32(0),
        running=Beams(empty, none.at[:, 0].set(0.0)),  # all texts are equal, so that only the first counts
        ended=Beams(empty, none),
        has_ended=jnp.zeros((b, k), bool),
        can_improve=jnp.ones(b, bool),
        all_end=np.bool_(False),
        state=state,
    )
    select = functools.partial(_select, search, axes, length_penalty, stop)

    def is_running(carry: Carry) -> Any:
        is_full = carry.has_ended.all() if search.early_stopping == "first" else np.bool_(False)
        return carry.can_improve.any() & ~is_full & ~carry.all_end

    def step(carry: Carry) -> Carry:
        token = lax.dynamic_index_in_dim(carry.running.tokens, carry.index - 1, axis=2)  # (b, k, 1)
        logits, state = decoder.fwd(token.reshape(b * k, 1), weights, carry.state, inference_mode=True)
        return select(logits[:, -1], carry._replace(state=state))

    carry = lax.while_loop(is_running, step, select(jnp.repeat(logits, k, axis=0), carry))
    tokens, scores = carry.ended
    return tokens, count_tokens(tokens.reshape(b * k, n), stop).reshape(b, k), scores


def _select(search: BeamSearch, axes: Tree, length_penalty: Any, stop: Any, logits: Any, carry: Carry) -> Carry:
    """The beams after one more token, given the logits (b * k, v) after each running text."""
    b, k = carry.running.scores.shape
    odds = jax.nn.log_softmax(logits.astype(np.float32), axis=-1).reshape(b, k, -1) + carry.running.scores[..., None]
    # so many that k of them do not end, whichever of the stop tokens the others have
    number = min(max(2, 1 + stop.size) * k, k * logits.shape[-1])
    scores, places = lax.top_k(odds.reshape(b, -1), number)
    origin, token = (each.astype(np.int32) for each in jnp.divmod(places, logits.shape[-1]))  # (b, number)
    token = jnp.where(jnp.isnan(scores), np.int32(-1), token)
    tokens = _take_beams(carry.running.tokens, origin)
    tokens = lax.dynamic_update_slice_in_dim(tokens, token[..., None], carry.index, axis=2)
    index = carry.index + 1
    ends = ends_row(token, stop) | (index == search.max_new_tokens)

    running, chosen = _best(Beams(tokens, scores + jnp.where(ends, WORST, 0.0)), k)
    rows = (jnp.arange(b, dtype=np.int32)[:, None] * k + jnp.take_along_axis(origin, chosen, axis=1)).reshape(-1)
    state = jax.tree.map(lambda leaf, axis: leaf if axis < 0 else jnp.take(leaf, rows, axis), carry.state, axes)

    # only of the k best, since the others are there to be continued
    has_ended = ends & (jnp.arange(number) < k)
    is_closed = ~carry.can_improve | (carry.has_ended.all(-1) & (search.early_stopping == "first"))
    final = scores / index.astype(np.float32) ** length_penalty
    final = final + jnp.where(has_ended, 0.0, WORST) + jnp.where(is_closed, WORST, 0.0)[:, None]
    both = Beams(*(jnp.concatenate(pair, axis=1) for pair in zip(carry.ended, (tokens, final), strict=True)))
    ended, places = _best(both, k)
    has_ended = jnp.take_along_axis(jnp.concatenate([carry.has_ended, has_ended], axis=1), places, axis=1)
    can_improve = carry.can_improve & _can_improve(search, running, ended, has_ended, index, length_penalty)
    return Carry(index, running, ended, has_ended, can_improve, ends.all(), state)


def _can_improve(
    search: BeamSearch, running: Beams, ended: Beams, has_ended: Any, index: Any, length_penalty: Any
) -> Any:
    """Whether the best running text of each row may become better than the worst that has ended: (b,)."""
    length = index.astype(np.float32)
    if search.early_stopping == "never":  # a longer text has a better score if the penalty is above 0
        length = jnp.where(length_penalty > 0.0, np.float32(search.max_new_tokens), length)
    best = running.scores[:, :1] / length**length_penalty
    worst = jnp.where(has_ended, ended.scores.min(axis=-1, keepdims=True), WORST)
    return (best > worst).any(axis=-1)


def _best(texts: Beams, number: int) -> tuple[Beams, Any]:
    """The texts of the highest scores, and their places (b, number)."""
    _, places = lax.top_k(texts.scores, number)
    return texts.take(places), places


def _take_beams(array: Any, places: Any) -> Any:
    """The entries (b, j, ...) of an array (b, k, ...) at places (b, j)."""
    return jnp.take_along_axis(array, jnp.expand_dims(places, range(2, array.ndim)), axis=1)
