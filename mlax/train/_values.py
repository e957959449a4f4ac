"""What an objective gives for a batch, and its means over the examples that count."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax import at_least_float32, leaves_with_paths
from mlax.core import NoMatch, signature

TAKEN = ("step", "seconds", "evaluation", "event", "ids", "rate", "gradient_norm", "skipped", "scale")
MASK = "mask"  # the name in a batch of what says which examples count, and how much


def checked(returned: Any) -> tuple[dict[str, jax.Array], Any]:
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
        if name in TAKEN:
            raise ValueError(f"the objective has a value {name!r}, which the log uses otherwise; rename it.")
        if not hasattr(value, "dtype"):
            raise TypeError(f"the objective's {name!r} is {signature(value)}, but must be an array.")
    if not jnp.issubdtype(values["loss"].dtype, jnp.floating):
        raise TypeError(f"the objective's loss is {signature(values['loss'])}, but must be floating.")
    return values, non_trainables


def refuse_changed(given: Any, returned: Any) -> None:
    """Refuse non_trainables of another structure, shape or dtype than they had: the next step could not take them."""
    before, after = ({path: signature(leaf) for path, leaf in leaves_with_paths(tree)} for tree in (given, returned))
    for path in dict.fromkeys([*before, *after]):
        if before.get(path) != after.get(path):
            raise ValueError(
                f"the objective was given non_trainables with {path or 'a leaf'}: {before.get(path, 'nothing')}, and "
                f"returned {after.get(path, 'nothing')}; return the new non_trainables second, as `fwd` gives them."
            )


def weight(batch: Any) -> jax.Array | None:
    """How much a batch weighs: the sum of its mask, or None if it has none, so that all examples count alike."""
    mask = _mask(batch)
    return None if mask is None else jnp.sum(mask, dtype=jnp.float32)


def mean(name: str, value: jax.Array, batch: Any, total: jax.Array | None, parts: int = 1) -> jax.Array:
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
