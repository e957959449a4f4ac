"""The last step of the norms."""

from jax import lax
from jaxtyping import Array, Float


def affine(
    x: Float[Array, "..."], scale: Float[Array, "..."] | None, shift: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """`x * scale + shift`, in the dtype of `x`, to which both are cast; None stands for 1 and 0."""
    if scale is not None:
        x = x * lax.convert_element_type(scale, x.dtype)
    if shift is not None:
        x = x + lax.convert_element_type(shift, x.dtype)
    return x
