"""The objective: its values, their means over a batch, and the gradient of its loss."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from mlax._jax import at_least_float32, leaves_with_paths, map_chunks, tree_add
from mlax._metric import Metric
from mlax.core import NoMatch, Tree, function_name, signature

MASK = "mask"  # the entry of a batch that says which of its examples, or of their entries, count in the loss
Objective = Callable[..., tuple[Any, Tree]]  # (batch, trainables, non_trainables, rng=, inference_mode=), as `fwd`
Backward = Callable[..., tuple[Tree, Tree, Tree]]  # as `place.one_forward_one_backward`

RESERVED_NAMES = ("step", "seconds", "evaluation", "event", "ids", "rate", "gradient_norm", "skipped", "scale")


class Gradients(NamedTuple):
    """The mean values of an objective over a batch, the gradient of its mean loss, and its new non_trainables."""

    values: dict[str, Any]  # the mean of each value, () float32 or wider; the MetricSums of a metric
    grads: Tree  # of the mean loss; None for frozen leaves
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
    is_frozen: Callable[[str], bool] = lambda path: False,
) -> Gradients:
    """The mean of each value and the gradient of the mean loss, over `accumulate` microbatches.

    Microbatches are weighted by their masks, so that the gradient equals the whole batch's. Gradients are accumulated
    in float32, or in the weights' own dtype if that is wider. With a `scale`, the loss is multiplied by it and the
    gradients are divided by it. `backward` replaces the loop over microbatches, as a pipeline does. Leaves whose path
    `is_frozen` are not differentiated.
    """
    total = batch_weight(batch)
    live, merge_frozen = split_frozen(trainables, is_frozen)

    def loss(live: Tree, microbatch: Any, non_trainables: Tree, rng: jax.Array) -> tuple[jax.Array, Any]:
        values, new = call_objective(objective, microbatch, merge_frozen(live), non_trainables, rng=rng)
        means = reduce_values(values, microbatch, total, accumulate)
        scaled = means["loss"] if scale is None else means["loss"] * scale.astype(means["loss"].dtype)
        return scaled, (means, new)

    if backward is not None:
        microbatches = split_microbatches(batch, accumulate, "microbatches")
        found = Gradients(*backward(loss, live, microbatches, non_trainables, random.split(rng, accumulate)))
    elif accumulate > 1:
        microbatches = split_microbatches(batch, accumulate, "accumulate")
        found = _accumulate(loss, live, microbatches, non_trainables, random.split(rng, accumulate))
    else:
        (_, (means, new)), grads = jax.value_and_grad(loss, has_aux=True)(live, batch, non_trainables, rng)
        found = Gradients(means, grads, new)
    return found if scale is None else found._replace(grads=_unscale(found.grads, scale))


def split_microbatches(batch: Any, number: int, name: str) -> Any:
    """The batch split into `number` microbatches on a leading axis, each with every number-th example.

    So no example moves between devices if the number of microbatches divides the examples of a device. `name` is what
    the number is called in the error if it does not divide the batch.
    """

    def split(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0 or leaf.shape[0] % number:
            raise ValueError(
                f"{name} is {number}, which does not divide the batch, {signature(leaf)}; use a batch size that is a "
                f"multiple of {number}."
            )
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // number, number, *leaf.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def _accumulate(loss: Any, trainables: Tree, microbatches: Any, non_trainables: Tree, rngs: jax.Array) -> Gradients:
    """The sums of values and gradients over microbatches, by a scan that also threads the non_trainables."""
    differentiate = jax.value_and_grad(loss, has_aux=True)
    first = jax.tree.map(lambda leaf: leaf[0], microbatches)
    (_, (shapes, _)), _ = jax.eval_shape(differentiate, trainables, first, non_trainables, rngs[0])
    values = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, at_least_float32(leaf.dtype)), shapes)
    grads = map_chunks(lambda w: jnp.zeros(w.shape, at_least_float32(w.dtype)), trainables)

    def add(carry: Any, xs: Any) -> tuple[Any, None]:
        sums, non_trainables = carry
        microbatch, rng = xs
        (_, (means, new)), grads = differentiate(trainables, microbatch, non_trainables, rng)
        return (tree_add(sums, (means, grads)), new), None

    ((values, grads), non_trainables), _ = lax.scan(add, ((values, grads), non_trainables), (microbatches, rngs))
    return Gradients(values, grads, non_trainables)


def split_frozen(trainables: Tree, is_frozen: Callable[[str], bool]) -> tuple[Tree, Callable[[Tree], Tree]]:
    """The trainables with None for frozen leaves, and the function that fills these in again."""
    leaves, structure = jax.tree.flatten(trainables)
    frozen = [is_frozen(path) for path, _ in leaves_with_paths(trainables)]
    live = structure.unflatten([None if skip else leaf for leaf, skip in zip(leaves, frozen, strict=True)])

    def merge_frozen(live: Tree) -> Tree:
        trained = iter(jax.tree.leaves(live))
        return structure.unflatten([leaf if skip else next(trained) for leaf, skip in zip(leaves, frozen, strict=True)])

    return live, merge_frozen


def _unscale(grads: Tree, scale: jax.Array) -> Tree:
    def divide(g: jax.Array) -> jax.Array:
        dtype = at_least_float32(g.dtype)
        return g.astype(dtype) / scale.astype(dtype)

    return map_chunks(divide, grads)


def loss_function(
    objective: Objective, batch: Any, non_trainables: Tree, rng: jax.Array, *, accumulate: int = 1
) -> Callable[[Tree], jax.Array]:
    """The mean loss as a function of the weights, for optimizers that evaluate it again; in the same microbatches."""
    total = batch_weight(batch)

    def loss(trainables: Tree, microbatch: Any, rng: jax.Array) -> jax.Array:
        values, _ = call_objective(objective, microbatch, trainables, non_trainables, rng=rng)
        return mean_contribution("loss", values["loss"], microbatch, total, accumulate)

    def accumulated_loss(trainables: Tree) -> jax.Array:
        microbatches_and_keys = split_microbatches(batch, accumulate, "accumulate"), random.split(rng, accumulate)
        # rematerialized, so that only one microbatch's activations are alive at a time
        return jnp.sum(lax.map(jax.checkpoint(lambda each: loss(trainables, *each)), microbatches_and_keys))

    return accumulated_loss if accumulate > 1 else lambda trainables: loss(trainables, batch, rng)


def count_labels(
    objective: Objective, batch: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array
) -> jax.Array | int:
    """The number of labels in a batch, without padding: the elements of the loss; of a scalar loss, the examples."""
    values, _ = jax.eval_shape(
        lambda *args: call_objective(objective, *args[:-1], rng=args[-1]), batch, trainables, non_trainables, rng
    )
    loss, mask = values["loss"], _mask(batch)
    if mask is not None:
        return jnp.sum(mask, dtype=jnp.float32) * max(loss.size // mask.size, 1)
    return loss.size if loss.ndim else next((len(leaf) for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)


def check_signature(owner: str, objective: Objective, **options: Any) -> None:
    """Raise if the objective cannot be called with a batch, variables and these options."""
    try:
        inspect.signature(objective).bind(None, None, None, **options)
    except TypeError as error:
        raise TypeError(
            f"{owner}: the objective {function_name(objective)}{inspect.signature(objective)} does not take what it is "
            f"called with ({error}); define it as `def objective(batch, trainables, non_trainables, rng=None, "
            "inference_mode=False)`."
        ) from None
    except ValueError:  # no signature is known
        return


def call_objective(
    objective: Objective, batch: Any, trainables: Tree, non_trainables: Tree, **options: Any
) -> tuple[dict[str, Any], Any]:
    """The values of an objective by name, and its new non_trainables."""
    try:
        return unpack_output(objective(batch, trainables, non_trainables, **options))
    except KeyError as error:
        if type(error) is KeyError and isinstance(batch, dict) and error.args and error.args[0] not in batch:
            error.add_note(f"The batch has {', '.join(map(str, batch))}.")
        raise


def unpack_output(output: Any) -> tuple[dict[str, Any], Any]:
    """The values of an objective as a dict of arrays and metrics with a 'loss', and its non_trainables."""
    if not isinstance(output, tuple) or len(output) != 2:
        raise TypeError(
            f"the objective returned {signature(output)}, but must return a pair as `fwd` does: (values, "
            "non_trainables), where values is the loss or a dict with a 'loss'."
        )
    values, non_trainables = output
    values = dict(values) if isinstance(values, dict) else {"loss": values}
    if "loss" not in values:
        names = ", ".join(map(str, values)) or "an empty dict"
        raise NoMatch(f"the objective returned {names}, but no 'loss'; call the value to minimize 'loss'.")
    for name, value in values.items():
        if name in RESERVED_NAMES:
            raise ValueError(f"the objective returned a value {name!r}, a name that the log reserves; rename it.")
        if not hasattr(value, "dtype") and (name == "loss" or not isinstance(value, Metric)):
            wanted = "an array" if name == "loss" else "an array or a train.Metric"
            raise TypeError(f"the objective's {name!r} is {signature(value)}, but must be {wanted}.")
    if not jnp.issubdtype(values["loss"].dtype, jnp.floating):
        raise TypeError(f"the objective's loss is {signature(values['loss'])}, but must be floating point.")
    return values, non_trainables


def check_non_trainables(before: Any, after: Any) -> None:
    """Raise if the structure, a shape or a dtype of the non_trainables changed: the next step could not take them."""
    old, new = ({path: signature(leaf) for path, leaf in leaves_with_paths(tree)} for tree in (before, after))
    for path in dict.fromkeys([*old, *new]):
        if old.get(path) != new.get(path):
            raise ValueError(
                f"the objective was called with non_trainables that have {path or 'a leaf'}: "
                f"{old.get(path, 'nothing')}, and returned {new.get(path) or _list_paths(new)}; return the new "
                "non_trainables second, as `fwd` does."
            )


def _list_paths(leaves: dict[str, str]) -> str:
    names = [path or "a leaf" for path in leaves]
    return ("only " + ", ".join(names[:4]) + " ..." * (len(names) > 4)) if names else "nothing"


def batch_weight(batch: Any) -> jax.Array | None:
    """The sum of a batch's mask, () float32; None without a mask, where all examples weigh the same."""
    mask = _mask(batch)
    return None if mask is None else jnp.sum(mask, dtype=jnp.float32)


def reduce_values(values: dict[str, Any], batch: Any, total: jax.Array | None, microbatches: int = 1) -> dict[str, Any]:
    """The contribution of this batch to each value: to the mean of an array, and to the sums of a metric."""
    return {
        name: value.sum(_mask(batch))
        if isinstance(value, Metric)
        else mean_contribution(name, value, batch, total, microbatches)
        for name, value in values.items()
    }


def mean_contribution(
    name: str, value: jax.Array, batch: Any, total: jax.Array | None, microbatches: int = 1
) -> jax.Array:
    """The contribution of this batch to the mean of a value over `microbatches` whose weights sum to `total`.

    A value per example, (b, ...), is weighted by the mask, (b,) or (b, t), and a scalar by the weight of the batch. In
    float32, or in the value's own dtype if that is wider.
    """
    value = value.astype(at_least_float32(value.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.float32)
    mask = _mask(batch)
    if mask is None or total is None:
        return jnp.mean(value) / microbatches
    total = jnp.where(total > 0, total, 1).astype(value.dtype)
    if value.ndim == 0:
        share = jnp.sum(mask, dtype=jnp.float32).astype(value.dtype) / total
        return jnp.where(share > 0, value, 0) * share  # the mean of an empty batch may be NaN
    if value.shape[: mask.ndim] != mask.shape:
        raise ValueError(
            f"the objective's {name!r} is {signature(value)}, but the mask is {signature(mask)}; return a scalar, or a "
            "value for each element of the mask."
        )
    rest = value.size // max(mask.size, 1)  # trailing axes are averaged too
    weights = mask.astype(value.dtype).reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
    return jnp.sum(jnp.where(weights != 0, value, 0) * weights) / (total * max(rest, 1))


def _mask(batch: Any) -> jax.Array | None:
    return batch.get(MASK) if isinstance(batch, dict) else None
