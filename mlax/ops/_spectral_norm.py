"""A kernel over its largest singular value, which power iteration finds."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax.ops._reduce import norm


def spectral_norm(
    kernel: Float[Array, "..."],
    left: Float[Array, " o"],
    right: Float[Array, " i"],
    *,
    axis: int = -1,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "..."]:
    """`kernel / (left @ matrix @ right)`, the matrix being the kernel with `axis` as its rows and the rest flattened.

    In the dtype of the kernel, and within in that of the vectors, which are taken as constants.
    """
    matrix = _matrix(lax.convert_element_type(kernel, left.dtype), axis)
    left, right = lax.stop_gradient((left, right))
    sigma = _dot(left, _dot(matrix, right, precision), precision)
    return lax.convert_element_type(lax.convert_element_type(kernel, left.dtype) / sigma, kernel.dtype)


def power_iteration(
    kernel: Float[Array, "..."],
    left: Float[Array, " o"],
    right: Float[Array, " i"],
    *,
    axis: int = -1,
    times: int = 1,
    precision: lax.PrecisionLike = None,
) -> tuple[Float[Array, " o"], Float[Array, " i"]]:
    """The singular vectors of the largest singular value, nearer by some iterations; in the dtype of the vectors.

    The matrix is that of `spectral_norm`. No gradient passes. https://arxiv.org/abs/1802.05957, algorithm 1.
    """
    matrix = lax.stop_gradient(_matrix(lax.convert_element_type(kernel, left.dtype), axis))

    def nearer(_: Any, vectors: Any) -> Any:
        left = unit(_dot(matrix, vectors[1], precision))
        return left, unit(_dot(matrix.T, left, precision))

    return lax.fori_loop(0, times, nearer, lax.stop_gradient((left, right)))


def unit(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """`x` over its Euclidean norm, and 0 for 0."""
    return x / jnp.maximum(norm(x, (0,)), jnp.finfo(x.dtype).tiny)


def _matrix(kernel: Any, axis: int) -> Any:
    rows = jnp.moveaxis(kernel, axis, 0)
    return rows.reshape(rows.shape[0], -1)


def _dot(a: Any, b: Any, precision: lax.PrecisionLike) -> Any:
    return lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), precision=precision)
