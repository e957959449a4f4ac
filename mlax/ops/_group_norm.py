"""Normalisation of each example over groups of its channels."""

from typing import Any

from jax import lax
from jaxtyping import Array, Float

from mlax.ops._layer_norm import layer_norm


def group_norm(
    x: Float[Array, "b ..."],
    scale: Float[Array, " c"] | None = None,
    shift: Float[Array, " c"] | None = None,
    *,
    groups: int,
    axis: int = -1,
    eps: float = 1e-5,
    accum_dtype: Any = None,
) -> Float[Array, "b ..."]:
    """Normalise to mean 0 and variance 1 over each group of channels and all axes but the batch, scale, shift.

    `axis` holds the channels, c of them, and neighbours form a group. In the dtype of `x`, or within in `accum_dtype`.
    """
    axis %= x.ndim
    if axis == 0 or x.shape[axis] % groups:
        raise ValueError(
            f"group_norm: axis {axis} of the input {x.shape} cannot be cut into {groups} groups; "
            "it must not be the batch axis, and its size a multiple of the groups."
        )
    grouped = (groups, x.shape[axis] // groups)

    def along(weight: Any) -> Any:
        return None if weight is None else lax.reshape(weight, (*grouped, *(1,) * (x.ndim - axis - 1)))

    y = layer_norm(
        lax.reshape(x, (*x.shape[:axis], *grouped, *x.shape[axis + 1 :])),
        along(scale),
        along(shift),
        axes=tuple(each for each in range(1, x.ndim + 1) if each != axis),
        eps=eps,
        accum_dtype=accum_dtype,
    )
    return lax.reshape(y, x.shape)
