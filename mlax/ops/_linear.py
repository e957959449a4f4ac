"""The affine map over the last axis."""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._checks import same_dtype


def linear(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"] | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... f"]:
    """`x @ kernel + bias`, in the dtype of `x`; the sum of products runs in `accum_dtype` if one is given."""
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"linear: the input has the shape {x.shape} but the kernel {kernel.shape}; "
            "the last axis of the input must be as long as the first of the kernel."
        )
    same_dtype("linear", x=x, kernel=kernel, bias=bias)
    rows = x.reshape(-1, x.shape[-1]) if _flatten(x) else x
    y = lax.dot_general(
        rows, kernel, (((rows.ndim - 1,), (0,)), ((), ())), precision=precision, preferred_element_type=accum_dtype
    ).reshape(*x.shape[:-1], kernel.shape[1])
    if bias is not None:
        y = y + lax.convert_element_type(bias, y.dtype)
    return lax.convert_element_type(y, x.dtype)


def _flatten(x: jax.Array) -> bool:
    """Whether to multiply over two axes instead of all: on a CPU, where no axis but the first may be sharded.

    XLA's CPU compiler is faster so (benchmarks/linear.py), and the others are not. A sharded axis that is merged with
    the one before it would have to be gathered, or change its sharding; over a mesh in auto mode nobody knows which
    are. The device is read here and not by `lax.platform_dependent`, which would put both products, and the gradients
    of both, into every jaxpr.
    """
    if x.ndim < 3 or x.size == 0 or jax.default_backend() != "cpu":
        return False
    sharding = jax.typeof(x).sharding
    return not sharding.mesh.auto_axes and not any(sharding.spec[1:-1])
