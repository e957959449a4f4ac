"""The objective: its values, their means over a batch, and the gradients of its loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from mlax._jax import at_least_float32, leaves_with_paths, map_chunks, tree_add
from mlax.core import NoMatch, Tree, signature
from mlax.place import split_microbatches

RESERVED_NAMES = ("step", "seconds", "evaluation", "event", "ids", "rate", "gradient_norm", "skipped", "scale")
MASK = "mask"  # the name in a batch of what says which examples count, and how much


def check_output(returned: Any) -> tuple[dict[str, jax.Array], Any]:
    """What an objective returned, as a dict of arrays with a loss, and the new non_trainables."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"the objective returned {signature(returned)}, but must return a pair as `fwd` does: (values, "
            "non_trainables), the values being the loss or a dict with a 'loss'."
        )
    values, non_trainables = returned
    values = dict(values) if isinstance(values, dict) else {"loss": values}
    if "loss" not in values:
        raise NoMatch(f"the objective returned {', '.join(map(str, values)) or 'nothing'}, but no 'loss'; name one so.")
    for name, value in values.items():
        if name in RESERVED_NAMES:
            raise ValueError(f"the objective has a value {name!r}, which the log uses otherwise; rename it.")
        if not hasattr(value, "dtype"):
            raise TypeError(f"the objective's {name!r} is {signature(value)}, but must be an array.")
    if not jnp.issubdtype(values["loss"].dtype, jnp.floating):
        raise TypeError(f"the objective's loss is {signature(values['loss'])}, but must be floating.")
    return values, non_trainables


def check_non_trainables(given: Any, returned: Any) -> None:
    """Refuse non_trainables of another structure, shape or dtype than they had: the next step could not take them."""
    before, after = ({path: signature(leaf) for path, leaf in leaves_with_paths(tree)} for tree in (given, returned))
    for path in dict.fromkeys([*before, *after]):
        if before.get(path) != after.get(path):
            raise ValueError(
                f"the objective was given non_trainables with {path or 'a leaf'}: {before.get(path, 'nothing')}, and "
                f"returned {after.get(path, 'nothing')}; return the new non_trainables second, as `fwd` gives them."
            )


def batch_weight(batch: Any) -> jax.Array | None:
    """How much a batch weighs: the sum of its mask, or None if it has none, so that all examples count alike."""
    mask = _mask(batch)
    return None if mask is None else jnp.sum(mask, dtype=jnp.float32)


def weighted_mean(name: str, value: jax.Array, batch: Any, total: jax.Array | None, parts: int = 1) -> jax.Array:
    """What this batch adds to the mean of a value over all of its `parts`, which weigh `total` together.

    A value for each example, (b, ...), is weighed by the mask, (b,) or (b, t); a scalar by the batch's whole weight.
    In float32, or in the value's own dtype if that is wider.
    """
    value = value.astype(at_least_float32(value.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.float32)
    mask = _mask(batch)
    if mask is None or total is None:
        return jnp.mean(value) / parts
    total = jnp.where(total > 0, total, 1).astype(value.dtype)
    if value.ndim == 0:
        share = jnp.sum(mask, dtype=jnp.float32).astype(value.dtype) / total
        return jnp.where(share > 0, value, 0) * share  # of nothing a mean may be NaN
    if value.shape[: mask.ndim] != mask.shape:
        raise ValueError(
            f"the objective's {name!r} is {signature(value)}, but the mask is {signature(mask)}; give a scalar, or a "
            "value for each entry of the mask."
        )
    rest = value.size // max(mask.size, 1)  # trailing axes are averaged too
    weights = mask.astype(value.dtype).reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
    return jnp.sum(jnp.where(weights != 0, value, 0) * weights) / (total * max(rest, 1))


def _mask(batch: Any) -> jax.Array | None:
    return batch.get(MASK) if isinstance(batch, dict) else None


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
    total = batch_weight(batch)

    def loss(trainables: Tree, part: Any, non_trainables: Tree, rng: jax.Array) -> tuple[jax.Array, Any]:
        values, new = check_output(objective(part, trainables, non_trainables, rng=rng))
        means = {name: weighted_mean(name, value, part, total, accumulate) for name, value in values.items()}
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
            found = _accumulate(of, nothing, parts, non_trainables, rngs)
        else:
            found = Gradients(*backward(loss, trainables, parts, non_trainables, rngs))
    if scale is None:
        return found
    return found._replace(grads=map_chunks(lambda g: _upcast(g) / scale.astype(at_least_float32(g.dtype)), found.grads))


def loss_function(
    objective: Objective, batch: Any, non_trainables: Tree, rng: jax.Array, *, accumulate: int = 1
) -> Callable[[Tree], jax.Array]:
    """The loss as a function of the weights, for optimizers that evaluate more often; in the same parts."""
    total = batch_weight(batch)

    def of(trainables: Tree, part: Any, rng: jax.Array) -> jax.Array:
        values, _ = check_output(objective(part, trainables, non_trainables, rng=rng))
        return weighted_mean("loss", values["loss"], part, total, accumulate)

    def in_parts(trainables: Tree) -> jax.Array:
        each = jax.checkpoint(lambda taken: of(trainables, *taken))  # so that one part is there at a time
        return jnp.sum(
            lax.map(each, (split_microbatches(batch, accumulate, "accumulate"), random.split(rng, accumulate)))
        )

    return in_parts if accumulate > 1 else lambda trainables: of(trainables, batch, rng)


def _accumulate(
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


def _upcast(g: jax.Array) -> jax.Array:
    return g.astype(at_least_float32(g.dtype))
