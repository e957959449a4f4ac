"""1F1B: the pipeline schedule that keeps few microbatches in flight."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from mlax._jax import at_least_float32
from mlax.core import Tree
from mlax.place._inexact import split_inexact
from mlax.place._pipeline._jaxpr_split import SplitJaxpr, split_at_pipeline

ByIndex = dict[int, Any]  # leaves by their place among all inputs of the loss
Leaves = list[Any]
Loss = Callable[[Tree, Any, Tree, jax.Array], tuple[jax.Array, tuple[Tree, Tree]]]


def one_forward_one_backward(
    loss: Loss, trainables: Tree, parts: Any, non_trainables: Tree, rngs: jax.Array, *, axis: str = "stage"
) -> tuple[Tree, Tree, Tree]:
    """The sums of a loss's values and gradients over the parts of a batch: (values, grads, non_trainables).

    `loss(trainables, part, non_trainables, rng)` gives `(loss, (values, non_trainables))` for one microbatch; `parts`
    and `rngs` have a leading axis of microbatches. The loss calls one `Pipelined` part, once: what that is called on
    (an embedding, say) is computed by the first stage, and all that depends on its output by the last. A stage turns
    to the backward pass of a microbatch as soon as it can, so that at most 2 stages - 1 are under way, however many
    there are. It stores their inputs, and computes the rest again.

    This is PipeDream-Flush of https://arxiv.org/abs/2006.09503, the stages in step with each other. Keys are those that
    the loss hands on, and the state goes from one microbatch to the next, as if they were computed one after another.
    Sums are taken in float32, or in the weights' own dtype if that is wider.
    """
    groups = (trainables, jax.tree.map(lambda leaf: leaf[0], parts), non_trainables, rngs[0])
    leaves, tree = jax.tree.flatten(groups)
    returned: list[Any] = []

    def flat_loss(*leaves: Any) -> Leaves:
        results, structure = jax.tree.flatten(loss(*jax.tree.unflatten(tree, leaves)))
        returned[:] = [structure]
        return results

    pieces = split_at_pipeline(flat_loss, leaves, axis)
    inputs = pieces.inputs
    weights, part, state, rng = jax.tree.unflatten(tree, range(len(leaves)))  # places among the inputs
    _, (values, new) = jax.tree.unflatten(returned[0], range(returned[0].num_leaves))  # and among the results
    changed = _updated_state(pieces, state, new)
    several = dict(zip(jax.tree.leaves((part, rng)), jax.tree.leaves((parts, rngs)), strict=True))
    shared = _shared_weights(pieces, weights, several, changed)
    fixed = inputs.keys() - several.keys() - set(jax.tree.leaves(weights))

    def run(number: jax.Array, own: Leaves, shared: ByIndex, fixed: ByIndex, several: ByIndex) -> Any:
        stage = Stage(pieces, rngs.shape[0], number[0], own, shared, fixed, several)
        (grads, outside), ended = _run_schedule(stage, jax.tree.leaves(values), changed)
        return grads, lax.psum(outside, axis), jax.tree.map(lambda leaf: leaf[None], ended)

    stages = pieces.layer.stages
    piped = jax.shard_map(
        run,
        in_specs=(P(axis), P(axis), P(), P(), P()),
        out_specs=(P(axis), P(), P(axis)),
        axis_names={axis},
        check_vma=False,
    )
    grads, outside, ended = jax.jit(piped)(
        jnp.arange(stages, dtype=np.int32),
        pieces.weights(inputs),
        {place: inputs[place] for place in shared},
        {place: inputs[place] for place in fixed},
        several,
    )
    sums, last_state = jax.tree.map(lambda leaf: leaf[stages - 1], ended)  # as the last stage has them
    return (
        jax.tree.unflatten(jax.tree.structure(values), sums),
        _combine_gradients(pieces, inputs, weights, grads, outside),
        jax.tree.map(lambda place: last_state.get(place, inputs[place]), state),
    )


def _run_schedule(stage: "Stage", values: list[int], changed: dict[int, int]) -> Any:
    """All ticks of a stage: its sums of gradients, and the sums of values and the state, if it is the last stage.

    In each tick a stage computes one microbatch forward and one backward. First the pipeline fills, without backward
    passes, and at last it drains, without forward ones. A microbatch that is not there is computed all the same and
    left out of the sums: in a conditional, what the compiler sends along other mesh axes would wait for every stage.
    """
    layer, last = stage.pieces.layer, stage.last

    def fill(carry: Any, time: jax.Array) -> tuple[Any, None]:
        received, kept = carry
        y, kept = stage.forward(time, received, kept)
        return (layer.sent(y, 1), kept), None

    def steady(carry: Any, time: jax.Array) -> tuple[Any, None]:
        received, kept, returned, sums, (found, state) = carry
        y, kept = stage.forward(time, received, kept)
        results, outside, dy = stage.end(time, y, state)
        dy = [jnp.where(stage.number == last, own, back) for own, back in zip(dy, returned, strict=True)]
        dx, (own, before) = stage.backward(time, kept, dy)
        sums = add_to_sums(sums, (own, add_to_sums(before, outside)))
        found = add_to_sums(found, [results[place] for place in values])
        state = {place: results[new] for place, new in changed.items()}
        return (layer.sent(y, 1), kept, layer.sent(dx, -1), sums, (found, state)), None

    def drain(carry: Any, time: jax.Array) -> tuple[Any, None]:
        kept, returned, sums = carry
        dx, grads = stage.backward(time, kept, returned)
        return (kept, layer.sent(dx, -1), add_to_sums(sums, grads)), None

    def ticks(start: int, number: int) -> jax.Array:
        return jnp.arange(start, start + number, dtype=np.int32)

    x = stage.first()
    state = {place: stage.fixed[place] for place in changed}
    found = zero_sums([stage.pieces.shapes[place] for place in values])
    begun = jax.tree.map(jnp.zeros_like, inexact_leaves(x)), zero_sums((stage.own, stage.shared)), (found, state)
    (x, kept), _ = lax.scan(fill, (x, stage.room(x)), ticks(0, last))
    (_, kept, returned, sums, ended), _ = lax.scan(steady, (x, kept, *begun), ticks(last, stage.microbatches))
    (_, _, sums), _ = lax.scan(drain, (kept, returned, sums), ticks(last + stage.microbatches, last))
    return sums, ended


def _combine_gradients(pieces: SplitJaxpr, inputs: ByIndex, weights: Tree, grads: Leaves, outside: ByIndex) -> Tree:
    """The gradients of all trainables from those of the pipeline's weights and of those outside of it."""
    piece = pieces.weights
    computed = [index for index in range(len(grads)) if index not in piece.unchanged]
    total = zero_sums({place: inputs[place] for place in jax.tree.leaves(weights)})
    for place, grad in [*outside.items(), *((place, grads[index]) for index, place in piece.unchanged.items())]:
        total[place] = add_to_sums(total[place], grad)
    if computed:

        def prepared(leaves: ByIndex) -> Leaves:
            made = piece({**inputs, **leaves})
            return [made[index] for index in computed]

        read = {place: inputs[place] for place in piece.reads if place in total}
        made, pull = jax.vjp(prepared, read)
        (more,) = pull([grads[index].astype(leaf.dtype) for index, leaf in zip(computed, made, strict=True)])
        total = {**total, **add_to_sums({place: total[place] for place in read}, more)}
    return jax.tree.map(lambda place: total[place], weights)


def _updated_state(pieces: SplitJaxpr, state: Tree, new: Tree) -> dict[int, int]:
    """The places of state that each microbatch changes, and where the results have it."""
    if jax.tree.structure(state) != jax.tree.structure(new):
        raise ValueError(
            "one_forward_one_backward: the objective returned non_trainables of another structure than it was given; "
            "return the new ones second, as `fwd` gives them."
        )
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True)
    return {place: result for place, result in pairs if pieces.after.unchanged.get(result) != place}


def _shared_weights(pieces: SplitJaxpr, weights: Tree, several: ByIndex, changed: dict[int, int]) -> list[int]:
    """The places of trainables that are used outside of the pipeline; refuses what no schedule could run."""
    early = {*pieces.weights.reads, *pieces.key.reads, *pieces.before.reads}
    if early & changed.keys():
        raise ValueError(
            "one_forward_one_backward: the pipeline's input depends on state that each microbatch changes, and the "
            "microbatches are under way together; take the schedule 'gpipe', or a layer without state."
        )
    if several.keys() & set(pieces.weights.reads):
        raise ValueError(
            "one_forward_one_backward: the pipeline's weights are computed from the batch or from a key; compute them "
            "from the trainables alone."
        )
    names = {place: _path_name(path) for path, place in jax.tree_util.tree_leaves_with_path(weights)}
    outside = names.keys() & {*pieces.key.reads, *pieces.before.reads, *pieces.after.reads}
    if both := sorted(names[place] for place in outside & set(pieces.weights.reads)):
        raise ValueError(
            f"one_forward_one_backward: {', '.join(both)} is a weight of the pipeline and is used outside of it too, "
            "as by a penalty, but each stage has its own slice only; leave that to the optimizer's decay, or take the "
            "schedule 'gpipe'."
        )
    return sorted(outside)


def _path_name(path: Any) -> str:
    return "/".join(str(getattr(key, "key", key)) for key in path)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage while it runs: its number, which is traced, and all that it has.

    A microbatch is named by its index; one below zero or too large stands for none, and what is computed for it is
    left out of every sum.
    """

    pieces: SplitJaxpr
    microbatches: int
    number: jax.Array
    own: Leaves  # this stage's slice of the pipeline's weights
    shared: ByIndex  # trainables that are used before the pipeline or after it
    fixed: ByIndex  # what is the same for all microbatches
    several: ByIndex  # what is not, on a leading axis

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.pieces.layer.stages - 1

    def first(self) -> Leaves:
        """The first stage's input for the first microbatch."""
        return self.pieces.before(self._inputs(jnp.int32(0), self.shared))

    def forward(self, time: jax.Array, received: Leaves, kept: Leaves) -> tuple[Leaves, Leaves]:
        """The output for the microbatch whose turn it is, and what is kept with its input in it."""
        microbatch = time - self.number
        fresh = self.pieces.before(self._inputs(microbatch, self.shared))
        x = [jnp.where(self.number == 0, new, old) for new, old in zip(fresh, received, strict=True)]
        slot = microbatch % len(kept[0])
        here = self._is_there(microbatch)
        kept = [
            lax.dynamic_update_index_in_dim(room, jnp.where(here, leaf, _index(room, slot)), slot, 0)
            for room, leaf in zip(kept, x, strict=True)
        ]
        return self._through(self.own, x, microbatch), kept

    def end(self, time: jax.Array, y: Leaves, state: ByIndex) -> tuple[Leaves, ByIndex, Leaves]:
        """All that the loss returns for the last stage's output, and gradients by the shared weights and by `y`."""
        inputs = self._inputs(time - np.int32(self.last), self.shared, state)

        def after(shared: ByIndex, moving: Leaves) -> tuple[jax.Array, Leaves]:
            results = self.pieces.after({**inputs, **shared}, _replace_inexact(y, moving))
            return results[0], results

        loss, pull, results = jax.vjp(after, self.shared, inexact_leaves(y), has_aux=True)
        shared, dy = pull(jnp.ones_like(loss))
        return results, _zero_unless(self.number == self.last, shared), dy

    def backward(self, time: jax.Array, kept: Leaves, dy: Leaves) -> tuple[Leaves, tuple[Leaves, ByIndex]]:
        """Gradients for the microbatch whose turn it is: by the input, by its own and by the shared weights."""
        microbatch = time - (np.int32(2 * self.last) - self.number)
        x = [_index(room, microbatch % len(room)) for room in kept]

        def through(own: Leaves, moving: Leaves) -> Leaves:
            return inexact_leaves(self._through(own, _replace_inexact(x, moving), microbatch))

        def before(shared: ByIndex) -> Leaves:
            return inexact_leaves(self.pieces.before(self._inputs(microbatch, shared)))

        own, dx = jax.vjp(through, self.own, inexact_leaves(x))[1](dy)
        (shared,) = jax.vjp(before, self.shared)[1](dx)
        here = self._is_there(microbatch)
        return dx, (_zero_unless(here, own), _zero_unless(here & (self.number == 0), shared))

    def room(self, x: Leaves) -> Leaves:
        """Where inputs like `x` are kept until their backward pass."""
        slots = min(2 * self.last + 1, self.microbatches)
        return [jnp.zeros((slots, *leaf.shape), leaf.dtype) for leaf in x]

    def _through(self, own: Leaves, x: Leaves, microbatch: jax.Array) -> Leaves:
        keys = self.pieces.key(self._inputs(microbatch, self.shared))
        x, own, key = jax.tree.unflatten(self.pieces.tree, [*x, *own, *keys])
        return jax.tree.leaves(self.pieces.layer.stage(self.number, x, own, key, self.pieces.inference_mode))

    def _inputs(self, microbatch: jax.Array, shared: ByIndex, state: ByIndex | None = None) -> ByIndex:
        there = jnp.clip(microbatch, 0, self.microbatches - 1)
        now = {place: _index(leaf, there) for place, leaf in self.several.items()}
        return {**self.fixed, **shared, **now, **(state or {})}

    def _is_there(self, microbatch: jax.Array) -> jax.Array:
        return (microbatch >= 0) & (microbatch < self.microbatches)


def inexact_leaves(leaves: Leaves) -> Leaves:
    """The leaves that have a derivative."""
    return split_inexact(leaves)[0]


def zero_sums(tree: Any) -> Any:
    """Sums of arrays like these before anything was added, wide enough to add up many."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, at_least_float32(leaf.dtype)), tree)


def add_to_sums(sums: Any, more: Any) -> Any:
    """The sums with one more added to each."""
    return jax.tree.map(lambda total, one: total + one.astype(total.dtype), sums, more)


def _replace_inexact(leaves: Leaves, moving: Leaves) -> Leaves:
    return split_inexact(leaves)[1](moving)


def _index(leaf: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)


def _zero_unless(condition: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)
