"""Weight normalization and spectral normalization of kernels."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import broadcast_like, divide, euclidean_norm
from mlax.core import check_is_dtype
from mlax.ops._checks import check_same_dtype


def weight_norm(
    direction: Float[Array, "..."], magnitude: Float[Array, "..."], *, axis: int = -1, accum_dtype: Any = None
) -> Float[Array, "..."]:
    """Weight normalization: `magnitude * direction / norm(direction)`, the norm over all axes but `axis`, in the dtype
    of `direction`.
    """
    check_is_dtype("weight_norm", accum_dtype=accum_dtype)
    check_same_dtype("weight_norm", direction=direction, magnitude=magnitude)
    length = output_norms(direction, axis=axis, accum_dtype=accum_dtype)
    wide = lax.convert_element_type(direction, length.dtype)
    scale = lax.convert_element_type(magnitude, length.dtype)
    return lax.convert_element_type(divide(wide, length) * broadcast_like(scale, wide), direction.dtype)


def output_norms(kernel: Float[Array, "..."], *, axis: int = -1, accum_dtype: Any = None) -> Float[Array, "..."]:
    """The Euclidean norm of a kernel over all axes but `axis`, which remain as axes of size 1."""
    wide = lax.convert_element_type(kernel, kernel.dtype if accum_dtype is None else accum_dtype)
    return euclidean_norm(wide, tuple(each for each in range(kernel.ndim) if each != axis % kernel.ndim))


def spectral_norm(
    kernel: Float[Array, "..."],
    left: Float[Array, " o"],
    right: Float[Array, " i"],
    *,
    axis: int = -1,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "..."]:
    """Spectral normalization: `kernel / (left @ matrix @ right)`, where `matrix` is the kernel with `axis` as rows and
    the rest flattened.

    In the dtype of the kernel, computed in that of the singular vectors, which gradients treat as constants.
    """
    matrix = _as_matrix(lax.convert_element_type(kernel, left.dtype), axis)
    left, right = lax.stop_gradient((left, right))
    sigma = _dot(left, _dot(matrix, right, precision), precision)
    wide = lax.convert_element_type(kernel, left.dtype)
    return lax.convert_element_type(divide(wide, lax.expand_dims(sigma, range(wide.ndim))), kernel.dtype)


def power_iteration(
    kernel: Float[Array, "..."],
    left: Float[Array, " o"],
    right: Float[Array, " i"],
    *,
    axis: int = -1,
    times: int = 1,
    precision: lax.PrecisionLike = None,
) -> tuple[Float[Array, " o"], Float[Array, " i"]]:
    """Improved estimates of the singular vectors of the largest singular value, in the dtype of the vectors.

    `kernel` is reshaped to a matrix as in `spectral_norm`, and gradients are stopped. Algorithm 1 of
    https://arxiv.org/abs/1802.05957.
    """
    matrix = lax.stop_gradient(_as_matrix(lax.convert_element_type(kernel, left.dtype), axis))

    def iterate(_: Any, vectors: Any) -> Any:
        left = l2_normalize(_dot(matrix, vectors[1], precision))
        return left, l2_normalize(_dot(matrix.T, left, precision))

    return lax.fori_loop(0, times, iterate, lax.stop_gradient((left, right)))


def l2_normalize(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """`x` over its Euclidean norm, and 0 for 0."""
    return x / jnp.maximum(euclidean_norm(x, (0,)), jnp.finfo(x.dtype).tiny)


def _as_matrix(kernel: Any, axis: int) -> Any:
    rows = jnp.moveaxis(kernel, axis, 0)
    return rows.reshape(rows.shape[0], -1)


def _dot(a: Any, b: Any, precision: lax.PrecisionLike) -> Any:
    return lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), precision=precision)
