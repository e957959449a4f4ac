"""One forward, one backward: the schedule of a pipeline that holds few microbatches at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from mlax.core import Tree
from mlax.place._cut import Cut, cut
from mlax.place._one_stage import By, Leaves, Stage, added, floats, nothing

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

    pieces = cut(flat_loss, leaves, axis)
    inputs = pieces.inputs
    weights, part, state, rng = jax.tree.unflatten(tree, range(len(leaves)))  # places among the inputs
    _, (values, new) = jax.tree.unflatten(returned[0], range(returned[0].num_leaves))  # and among the results
    changed = _changed(pieces, state, new)
    several = dict(zip(jax.tree.leaves((part, rng)), jax.tree.leaves((parts, rngs)), strict=True))
    shared = _shared(pieces, weights, several, changed)
    fixed = inputs.keys() - several.keys() - set(jax.tree.leaves(weights))

    def run(number: jax.Array, own: Leaves, shared: By, fixed: By, several: By) -> Any:
        stage = Stage(pieces, rngs.shape[0], number[0], own, shared, fixed, several)
        (grads, outside), ended = _in_step(stage, jax.tree.leaves(values), changed)
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
        _gathered(pieces, inputs, weights, grads, outside),
        jax.tree.map(lambda place: last_state.get(place, inputs[place]), state),
    )


def _in_step(stage: Stage, values: list[int], changed: dict[int, int]) -> Any:
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
        sums = added(sums, (own, added(before, outside)))
        found = added(found, [results[place] for place in values])
        state = {place: results[new] for place, new in changed.items()}
        return (layer.sent(y, 1), kept, layer.sent(dx, -1), sums, (found, state)), None

    def drain(carry: Any, time: jax.Array) -> tuple[Any, None]:
        kept, returned, sums = carry
        dx, grads = stage.backward(time, kept, returned)
        return (kept, layer.sent(dx, -1), added(sums, grads)), None

    def ticks(start: int, number: int) -> jax.Array:
        return jnp.arange(start, start + number, dtype=np.int32)

    x = stage.first()
    state = {place: stage.fixed[place] for place in changed}
    found = nothing([stage.pieces.shapes[place] for place in values])
    begun = jax.tree.map(jnp.zeros_like, floats(x)), nothing((stage.own, stage.shared)), (found, state)
    (x, kept), _ = lax.scan(fill, (x, stage.room(x)), ticks(0, last))
    (_, kept, returned, sums, ended), _ = lax.scan(steady, (x, kept, *begun), ticks(last, stage.microbatches))
    (_, _, sums), _ = lax.scan(drain, (kept, returned, sums), ticks(last + stage.microbatches, last))
    return sums, ended


def _gathered(pieces: Cut, inputs: By, weights: Tree, grads: Leaves, outside: By) -> Tree:
    """The gradients of all trainables from those of the pipeline's weights and of those outside of it."""
    piece = pieces.weights
    computed = [index for index in range(len(grads)) if index not in piece.unchanged]
    total = nothing({place: inputs[place] for place in jax.tree.leaves(weights)})
    for place, grad in [*outside.items(), *((place, grads[index]) for index, place in piece.unchanged.items())]:
        total[place] = added(total[place], grad)
    if computed:

        def prepared(leaves: By) -> Leaves:
            made = piece({**inputs, **leaves})
            return [made[index] for index in computed]

        read = {place: inputs[place] for place in piece.reads if place in total}
        made, pull = jax.vjp(prepared, read)
        (more,) = pull([grads[index].astype(leaf.dtype) for index, leaf in zip(computed, made, strict=True)])
        total = {**total, **added({place: total[place] for place in read}, more)}
    return jax.tree.map(lambda place: total[place], weights)


def _changed(pieces: Cut, state: Tree, new: Tree) -> dict[int, int]:
    """The places of state that each microbatch changes, and where the results have it."""
    if jax.tree.structure(state) != jax.tree.structure(new):
        raise ValueError(
            "one_forward_one_backward: the objective returned non_trainables of another structure than it was given; "
            "return the new ones second, as `fwd` gives them."
        )
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True)
    return {place: result for place, result in pairs if pieces.after.unchanged.get(result) != place}


def _shared(pieces: Cut, weights: Tree, several: By, changed: dict[int, int]) -> list[int]:
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
    names = {place: _name(path) for path, place in jax.tree_util.tree_leaves_with_path(weights)}
    outside = names.keys() & {*pieces.key.reads, *pieces.before.reads, *pieces.after.reads}
    if both := sorted(names[place] for place in outside & set(pieces.weights.reads)):
        raise ValueError(
            f"one_forward_one_backward: {', '.join(both)} is a weight of the pipeline and is used outside of it too, "
            "as by a penalty, but each stage has its own slice only; leave that to the optimizer's decay, or take the "
            "schedule 'gpipe'."
        )
    return sorted(outside)


def _name(path: Any) -> str:
    return "/".join(str(getattr(key, "key", key)) for key in path)
