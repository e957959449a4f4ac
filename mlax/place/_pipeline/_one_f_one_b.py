"""1F1B: the pipeline schedule that keeps few microbatches in flight."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from mlax._jax import at_least_float32, leaves_with_paths, partition_inexact
from mlax.core import Tree
from mlax.place._pipeline._jaxpr_split import SplitJaxpr, split_at_pipeline

Leaves = list[Any]
ByIndex = dict[int, Any]  # leaves by their index among all inputs of the loss
Loss = Callable[[Tree, Any, Tree, jax.Array], tuple[jax.Array, tuple[Tree, Tree]]]


def one_forward_one_backward(
    loss: Loss, trainables: Tree, parts: Any, non_trainables: Tree, rngs: jax.Array, *, axis: str = "stage"
) -> tuple[Tree, Tree, Tree]:
    """The 1F1B schedule of a pipeline: the sums of a loss's values and gradients over the microbatches of a batch:
    (values, grads, non_trainables).

    `loss(trainables, part, non_trainables, rng)` returns `(loss, (values, non_trainables))` for one microbatch; `parts`
    and `rngs` have a leading axis of microbatches. The loss calls one `Pipelined` part, once: the first stage computes
    its input (an embedding, say), and the last stage all that depends on its output. A stage runs the backward pass of
    a microbatch as soon as it can, so that at most 2 stages - 1 microbatches are in flight. It stores their inputs and
    recomputes the rest.

    This is PipeDream-Flush of https://arxiv.org/abs/2006.09503, with all stages in lockstep. Keys are those that the
    loss passes on, and state goes from one microbatch to the next, as if they were computed one after another. Sums are
    accumulated in float32, or in the dtype of the weights if that is wider.
    """
    arguments = (trainables, jax.tree.map(lambda leaf: leaf[0], parts), non_trainables, rngs[0])
    leaves, structure = jax.tree.flatten(arguments)
    result_structure: Any = None

    def flat_loss(*leaves: Any) -> Leaves:
        nonlocal result_structure
        results, result_structure = jax.tree.flatten(loss(*jax.tree.unflatten(structure, leaves)))
        return results

    split = split_at_pipeline(flat_loss, leaves, axis)
    inputs = split.inputs
    # the arguments and results as pytrees of indices, into the inputs and into the flat results
    weights, part, state, rng = jax.tree.unflatten(structure, range(len(leaves)))
    _, (values, new_state) = jax.tree.unflatten(result_structure, range(result_structure.num_leaves))
    updated = _updated_state(split, state, new_state)
    stacked = dict(zip(jax.tree.leaves((part, rng)), jax.tree.leaves((parts, rngs)), strict=True))
    shared = _shared_weights(split, weights, stacked, updated)
    trained = set(jax.tree.leaves(weights))
    stage_weights = split.weights(inputs)
    frozen = {position for position, index in split.weights.forwarded.items() if index not in trained}
    live = tuple(position for position in range(len(stage_weights)) if position not in frozen)
    # without frozen weights of the pipeline, of which each stage only needs its slice
    constant = {*split.key.reads, *split.before.reads, *split.after.reads, *updated} - stacked.keys() - trained

    def run(number: jax.Array, stage_weights: Leaves, shared: ByIndex, constant: ByIndex, stacked: ByIndex) -> Any:
        stage = StageRuntime(split, rngs.shape[0], number[0], stage_weights, live, shared, constant, stacked)
        (grads, shared_grads), last = _run_schedule(stage, jax.tree.leaves(values), updated)
        return grads, lax.psum(shared_grads, axis), jax.tree.map(lambda leaf: leaf[None], last)

    stages = split.layer.stages
    pipeline = jax.shard_map(
        run,
        in_specs=(P(axis), P(axis), P(), P(), P()),
        out_specs=(P(axis), P(), P(axis)),
        axis_names={axis},
        check_vma=False,
    )
    grads, shared_grads, stage_results = jax.jit(pipeline)(
        jnp.arange(stages, dtype=np.int32),
        stage_weights,
        {index: inputs[index] for index in shared},
        {index: inputs[index] for index in constant},
        stacked,
    )
    sums, final_state = jax.tree.map(lambda leaf: leaf[stages - 1], stage_results)  # only the last stage has them
    return (
        jax.tree.unflatten(jax.tree.structure(values), sums),
        _combine_gradients(split, weights, grads, shared_grads),
        jax.tree.map(lambda index: final_state.get(index, inputs[index]), state),
    )


def _run_schedule(stage: "StageRuntime", values: list[int], updated: dict[int, int]) -> Any:
    """All ticks of a stage: its gradient sums, and, of the last stage, the sums of values and the state.

    In each tick a stage runs the forward pass of one microbatch and the backward pass of another. First the pipeline
    fills, without backward passes, and in the end it drains, without forward passes. A microbatch that does not exist
    is computed all the same and left out of the sums: inside a conditional, the collectives that the compiler
    inserts over other mesh axes would wait for every stage.
    """
    layer, last = stage.split.layer, stage.last

    def fill(carry: Any, time: jax.Array) -> tuple[Any, None]:
        received, buffers = carry
        y, buffers = stage.forward(time, received, buffers)
        return (layer.send(y, 1), buffers), None

    def steady(carry: Any, time: jax.Array) -> tuple[Any, None]:
        received, buffers, cotangents, grads, (sums, state) = carry
        y, buffers = stage.forward(time, received, buffers)
        results, shared_after, dy = stage.after(time, y, state)
        dy = [jnp.where(stage.number == last, mine, sent) for mine, sent in zip(dy, cotangents, strict=True)]
        dx, (stage_grads, shared_before) = stage.backward(time, buffers, dy)
        grads = _accumulate(grads, (stage_grads, _accumulate(shared_before, shared_after)))
        sums = _accumulate(sums, [results[index] for index in values])
        state = {index: results[result] for index, result in updated.items()}
        return (layer.send(y, 1), buffers, layer.send(dx, -1), grads, (sums, state)), None

    def drain(carry: Any, time: jax.Array) -> tuple[Any, None]:
        buffers, cotangents, grads = carry
        dx, new_grads = stage.backward(time, buffers, cotangents)
        return (buffers, layer.send(dx, -1), _accumulate(grads, new_grads)), None

    def ticks(start: int, number: int) -> jax.Array:
        return jnp.arange(start, start + number, dtype=np.int32)

    x = stage.first_input()
    (received, buffers), _ = lax.scan(fill, (x, stage.input_buffers(x)), ticks(0, last))
    cotangents = jax.tree.map(jnp.zeros_like, _inexact_leaves(x))
    grads = _zero_sums((stage.live_weights(), stage.shared))
    sums, state = _zero_sums([stage.split.avals[index] for index in values]), stage.initial_state(updated)
    carry = (received, buffers, cotangents, grads, (sums, state))
    (_, buffers, cotangents, grads, last_results), _ = lax.scan(steady, carry, ticks(last, stage.microbatches))
    (_, _, grads), _ = lax.scan(drain, (buffers, cotangents, grads), ticks(last + stage.microbatches, last))
    return grads, last_results


@dataclasses.dataclass(frozen=True)
class StageRuntime:
    """A running stage: its number, which is traced, and its inputs.

    A microbatch is an index; one that is out of range does not exist, and its results are left out of every sum.
    """

    split: SplitJaxpr
    microbatches: int
    number: jax.Array
    weights: Leaves  # this stage's slice of the pipeline's weights
    live: tuple[int, ...]  # the positions of those that are differentiated
    shared: ByIndex  # trainables that are used before or after the pipeline
    constant: ByIndex  # other inputs that are the same for all microbatches
    stacked: ByIndex  # inputs with a leading axis of microbatches

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.split.layer.stages - 1

    def live_weights(self) -> ByIndex:
        """The weights of this stage that are differentiated, by position."""
        return {position: self.weights[position] for position in self.live}

    def first_input(self) -> Leaves:
        """The input of the first stage for the first microbatch."""
        return self.split.before(self._inputs(jnp.int32(0), self.shared))

    def input_buffers(self, x: Leaves) -> Leaves:
        """Buffers for inputs like `x` of the microbatches in flight, for their backward pass."""
        slots = min(2 * self.last + 1, self.microbatches)
        return [jnp.zeros((slots, *leaf.shape), leaf.dtype) for leaf in x]

    def initial_state(self, updated: dict[int, int]) -> ByIndex:
        """The state that microbatches update, before the first one."""
        return {index: self.constant[index] for index in updated}

    def forward(self, time: jax.Array, received: Leaves, buffers: Leaves) -> tuple[Leaves, Leaves]:
        """The output for the microbatch of this tick, and the buffers with its input."""
        microbatch = time - self.number
        first = self.split.before(self._inputs(microbatch, self.shared))
        x = [jnp.where(self.number == 0, mine, sent) for mine, sent in zip(first, received, strict=True)]
        slot = microbatch % len(buffers[0])
        exists = self._exists(microbatch)
        buffers = [
            lax.dynamic_update_index_in_dim(buffer, jnp.where(exists, leaf, _index(buffer, slot)), slot, 0)
            for buffer, leaf in zip(buffers, x, strict=True)
        ]
        return self._run(self.weights, x, microbatch), buffers

    def after(self, time: jax.Array, y: Leaves, state: ByIndex) -> tuple[Leaves, ByIndex, Leaves]:
        """The results of the loss for the last stage's output, and the gradients of the shared weights and of `y`."""
        inputs = self._inputs(time - np.int32(self.last), self.shared, state)

        def after(shared: ByIndex, y_leaves: Leaves) -> tuple[jax.Array, Leaves]:
            results = self.split.after({**inputs, **shared}, _replace_inexact(y, y_leaves))
            return results[0], results

        loss, pullback, results = jax.vjp(after, self.shared, _inexact_leaves(y), has_aux=True)
        shared, dy = pullback(jnp.ones_like(loss))
        return results, _zero_unless(self.number == self.last, shared), dy

    def backward(self, time: jax.Array, buffers: Leaves, dy: Leaves) -> tuple[Leaves, tuple[ByIndex, ByIndex]]:
        """The gradients for the microbatch of this tick: of its input, and of this stage's and the shared weights."""
        microbatch = time - (np.int32(2 * self.last) - self.number)
        x = [_index(buffer, microbatch % len(buffer)) for buffer in buffers]

        def run(live_weights: ByIndex, x_leaves: Leaves) -> Leaves:
            stage_weights = [live_weights.get(position, leaf) for position, leaf in enumerate(self.weights)]
            return _inexact_leaves(self._run(stage_weights, _replace_inexact(x, x_leaves), microbatch))

        def before(shared: ByIndex) -> Leaves:
            return _inexact_leaves(self.split.before(self._inputs(microbatch, shared)))

        stage_grads, dx = jax.vjp(run, self.live_weights(), _inexact_leaves(x))[1](dy)
        (shared,) = jax.vjp(before, self.shared)[1](dx)
        exists = self._exists(microbatch)
        return dx, (_zero_unless(exists, stage_grads), _zero_unless(exists & (self.number == 0), shared))

    def _run(self, stage_weights: Leaves, x: Leaves, microbatch: jax.Array) -> Leaves:
        key = self.split.key(self._inputs(microbatch, self.shared))
        x, stage_weights, rng = jax.tree.unflatten(self.split.structure, [*x, *stage_weights, *key])
        return jax.tree.leaves(
            self.split.layer.run_stage(self.number, x, stage_weights, rng, self.split.inference_mode)
        )

    def _inputs(self, microbatch: jax.Array, shared: ByIndex, state: ByIndex | None = None) -> ByIndex:
        """The inputs of the loss for a microbatch, without the pipeline's weights."""
        clipped = jnp.clip(microbatch, 0, self.microbatches - 1)
        microbatch_inputs = {index: _index(leaf, clipped) for index, leaf in self.stacked.items()}
        return {**self.constant, **shared, **microbatch_inputs, **(state or {})}

    def _exists(self, microbatch: jax.Array) -> jax.Array:
        return (microbatch >= 0) & (microbatch < self.microbatches)


def _combine_gradients(split: SplitJaxpr, weights: Tree, grads: ByIndex, shared_grads: ByIndex) -> Tree:
    """The gradients of all trainables from those of the pipeline's weights, by position, and of the shared ones."""
    inputs, forwarded = split.inputs, split.weights.forwarded
    total = _zero_sums({index: inputs[index] for index in jax.tree.leaves(weights)})
    stage_grads = [(index, grads[position]) for position, index in forwarded.items() if position in grads]
    for index, grad in [*shared_grads.items(), *stage_grads]:
        total[index] = _accumulate(total[index], grad)
    computed = [position for position in grads if position not in forwarded]
    if computed:  # from the trainables, by equations outside the pipeline

        def compute(leaves: ByIndex) -> Leaves:
            outputs = split.weights({**inputs, **leaves})
            return [outputs[position] for position in computed]

        read = {index: inputs[index] for index in split.weights.reads if index in total}
        outputs, pullback = jax.vjp(compute, read)
        cotangents = [grads[position].astype(out.dtype) for position, out in zip(computed, outputs, strict=True)]
        (weight_grads,) = pullback(cotangents)
        total = {**total, **_accumulate({index: total[index] for index in read}, weight_grads)}
    return jax.tree.map(lambda index: total[index], weights)


def _updated_state(split: SplitJaxpr, state: Tree, new: Tree) -> dict[int, int]:
    """The indices of the state that microbatches update, each with the index of the result that replaces it."""
    if jax.tree.structure(state) != jax.tree.structure(new):
        raise ValueError(
            "one_forward_one_backward: the objective returned non_trainables of another structure than it received; "
            "return the new ones second, as `fwd` does."
        )
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True)
    return {index: result for index, result in pairs if split.after.forwarded.get(result) != index}


def _shared_weights(split: SplitJaxpr, weights: Tree, stacked: ByIndex, updated: dict[int, int]) -> list[int]:
    """The indices of trainables that are used outside the pipeline; raises for what this schedule cannot run."""
    early = {*split.weights.reads, *split.key.reads, *split.before.reads}
    if early & updated.keys():
        raise ValueError(
            "one_forward_one_backward: the pipeline's input depends on state that each microbatch updates, but several "
            "are in flight at once; use the schedule 'gpipe', or a layer without state."
        )
    if stacked.keys() & set(split.weights.reads):
        raise ValueError(
            "one_forward_one_backward: the pipeline's weights are computed from the batch or from a key; compute them "
            "from the trainables alone."
        )
    paths = {index: path for path, index in leaves_with_paths(weights)}
    outside = paths.keys() & {*split.key.reads, *split.before.reads, *split.after.reads}
    if both := sorted(paths[index] for index in outside & set(split.weights.reads)):
        raise ValueError(
            f"one_forward_one_backward: {', '.join(both)} is a weight of the pipeline and is also used outside it, "
            "as by a penalty, but each stage only has its own slice; use the optimizer's weight decay, or the schedule "
            "'gpipe'."
        )
    return sorted(outside)


def _zero_sums(tree: Any) -> Any:
    """Zeros to accumulate arrays like these in: float32 or wider."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, at_least_float32(leaf.dtype)), tree)


def _accumulate(sums: Any, terms: Any) -> Any:
    return jax.tree.map(lambda total, term: total + term.astype(total.dtype), sums, terms)


def _inexact_leaves(leaves: Leaves) -> Leaves:
    return partition_inexact(leaves)[0]


def _replace_inexact(leaves: Leaves, new: Leaves) -> Leaves:
    return partition_inexact(leaves)[1](new)


def _index(leaf: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)


def _zero_unless(condition: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)
