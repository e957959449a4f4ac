"""The gradients of an objective over a batch, at once or in several parts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from mlax._jax import at_least_float32, map_chunks, tree_add
from mlax.core import Tree
from mlax.place import split_microbatches
from mlax.train._values import checked, mean, weight

Backward = Callable[..., tuple[Tree, Tree, Tree]]  # as `place.one_forward_one_backward`
Objective = Callable[..., tuple[Any, Tree]]  # (batch, trainables, non_trainables, rng=, inference_mode=), as `fwd`


class Gradients(NamedTuple):
    """What is known after the backward pass."""

    values: dict[str, jax.Array]  # the mean of each value, () float32 or wider
    grads: Tree  # of the mean loss
    non_trainables: Tree


def gradients(
    objective: Objective,
    batch: Any,
    trainables: Tree,
    non_trainables: Tree,
    rng: jax.Array,
    *,
    accumulate: int = 1,
    scale: jax.Array | None = None,
    backward: Backward | None = None,
) -> Gradients:
    """The means of the values and the gradient of the loss, the batch taken in `accumulate` parts one after another.

    The parts weigh as much as their masks say, so that the gradient is that of the whole batch. They are summed in
    float32, or in the weights' own dtype if that is wider. With a `scale` the loss is multiplied by it and the
    gradients divided. `backward` computes the parts otherwise than one after another, as in the stages of a pipeline.
    """
    total = weight(batch)

    def loss(trainables: Tree, part: Any, non_trainables: Tree, rng: jax.Array) -> tuple[jax.Array, Any]:
        values, new = checked(objective(part, trainables, non_trainables, rng=rng))
        means = {name: mean(name, value, part, total, accumulate) for name, value in values.items()}
        scaled = means["loss"] if scale is None else means["loss"] * scale.astype(means["loss"].dtype)
        return scaled, (means, new)

    def of(part: Any, non_trainables: Tree, rng: jax.Array) -> Gradients:
        (_, (means, new)), grads = jax.value_and_grad(loss, has_aux=True)(trainables, part, non_trainables, rng)
        return Gradients(means, grads, new)

    if accumulate == 1 and backward is None:
        found = of(batch, non_trainables, rng)
    else:
        name = "accumulate" if backward is None else "microbatches"
        parts, rngs = split_microbatches(batch, accumulate, name), random.split(rng, accumulate)
        if backward is None:
            nothing = map_chunks(lambda w: jnp.zeros(w.shape, at_least_float32(w.dtype)), trainables)
            found = _summed(of, nothing, parts, non_trainables, rngs)
        else:
            found = Gradients(*backward(loss, trainables, parts, non_trainables, rngs))
    if scale is None:
        return found
    return found._replace(
        grads=map_chunks(lambda g: _widened(g) / scale.astype(at_least_float32(g.dtype)), found.grads)
    )


def loss_of(
    objective: Objective, batch: Any, non_trainables: Tree, rng: jax.Array, *, accumulate: int = 1
) -> Callable[[Tree], jax.Array]:
    """The loss as a function of the weights, for optimizers that evaluate more often; in the same parts."""
    total = weight(batch)

    def of(trainables: Tree, part: Any, rng: jax.Array) -> jax.Array:
        values, _ = checked(objective(part, trainables, non_trainables, rng=rng))
        return mean("loss", values["loss"], part, total, accumulate)

    def in_parts(trainables: Tree) -> jax.Array:
        each = jax.checkpoint(lambda taken: of(trainables, *taken))  # so that one part is there at a time
        return jnp.sum(
            lax.map(each, (split_microbatches(batch, accumulate, "accumulate"), random.split(rng, accumulate)))
        )

    return in_parts if accumulate > 1 else lambda trainables: of(trainables, batch, rng)


def _summed(
    of: Callable[..., Gradients], nothing: Tree, parts: Any, non_trainables: Tree, rngs: jax.Array
) -> Gradients:
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes = jax.eval_shape(of, first, non_trainables, rngs[0])
    values = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, at_least_float32(leaf.dtype)), shapes.values)

    def add(sums: Any, taken: Any) -> tuple[Any, None]:
        (values, grads), non_trainables = sums
        part, rng = taken
        new = of(part, non_trainables, rng)
        return (tree_add((values, grads), (new.values, new.grads)), new.non_trainables), None

    ((values, grads), non_trainables), _ = lax.scan(add, ((values, nothing), non_trainables), (parts, rngs))
    return Gradients(values, grads, non_trainables)


def _widened(g: jax.Array) -> jax.Array:
    return g.astype(at_least_float32(g.dtype))
