"""A kernel from its direction and its magnitude."""

from typing import Any

from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype
from mlax.ops._reduce import norm


def weight_norm(
    direction: Float[Array, "..."], magnitude: Float[Array, "..."], *, axis: int = -1, accum_dtype: Any = None
) -> Float[Array, "..."]:
    """`direction` with the Euclidean norm `magnitude` for each place along `axis`, in its dtype."""
    same_dtype("weight_norm", direction=direction, magnitude=magnitude)
    length = output_norms(direction, axis=axis, accum_dtype=accum_dtype)
    unit = lax.convert_element_type(direction, length.dtype) / length
    return lax.convert_element_type(unit * lax.convert_element_type(magnitude, length.dtype), direction.dtype)


def output_norms(kernel: Float[Array, "..."], *, axis: int = -1, accum_dtype: Any = None) -> Float[Array, "..."]:
    """The Euclidean norm of a kernel over all axes but `axis`; they stay as axes of size 1."""
    wide = lax.convert_element_type(kernel, kernel.dtype if accum_dtype is None else accum_dtype)
    return norm(wide, tuple(each for each in range(kernel.ndim) if each != axis % kernel.ndim))
