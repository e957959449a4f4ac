"""The kernel's gradient of a convolution, a few examples at a time."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mlax._jax import is_unsharded_cpu, with_jvps
from mlax.ops._checks import is_static
from mlax.ops._layout import Layout, parse_layout
from mlax.ops._windows import Windows, pad, window_slices

CHUNK_BYTES = 2**19  # bytes of windows that a core keeps at hand
MIN_CHANNELS = 128  # channels, of all examples together, below which JAX's own rule is as fast
Convolve = Callable[[Array, Array], Array]  # of (x, kernel)


def use_chunked_kernel_grad(x: Array, axes: Layout, groups: int, accum_dtype: Any) -> bool:
    """Whether the kernel's gradient is faster as a sum of products: on a CPU, where no axis may be sharded.

    By JAX's own rule it is a convolution whose window is the whole image and whose channels are the examples, for
    which XLA's CPU compiler has no fast loop, unless there are few of both, or one spatial axis
    (benchmarks/convs.py). In a narrow dtype each sum would be rounded.
    """
    return (
        is_unsharded_cpu(x)
        and groups == 1
        and len(axes.spatial) > 1
        and is_static(*x.shape)
        and x.shape[axes.batch] * x.shape[axes.channel] >= MIN_CHANNELS
        and accum_dtype is None
        and jnp.finfo(x.dtype).bits >= 32
    )


def with_chunked_kernel_grad(convolve: Convolve, axes: Layout, where: Windows, precision: Any) -> Convolve:
    """The same function, whose derivative by the kernel is taken a few examples at a time."""

    def by_x(dot: Array, x: Array, kernel: Array) -> Array:
        return made(dot, kernel)

    def by_kernel(dot: Array, x: Array, kernel: Array) -> Array:
        return _chunked_conv(x, dot, axes, where, precision)

    made = with_jvps(convolve, by_x, by_kernel)
    return made


def _chunked_conv(x: Array, kernel: Array, axes: Layout, where: Windows, precision: Any) -> Array:
    """The convolution as a product of all windows of a few examples with the kernel, then of the next few.

    Transposed, it is a sum of products. The windows are copies, many times the size of the input, so they are never
    all there at once, nor kept for the backward pass.
    """
    order = (axes.batch, *axes.spatial, axes.channel)
    x = lax.transpose(x, order)
    last = parse_layout("conv", "channel_last", x)
    matrix = lax.transpose(kernel, (axes.outputs, *axes.window, axes.inputs))
    matrix = matrix.reshape(matrix.shape[0], -1)  # (features, window times channels)
    side = int(matrix.shape[1] > matrix.shape[0])
    matrix = matrix if side else matrix.T  # products are faster whose longer side is the last

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product(x: Array, matrix: Array) -> Array:
        pieces = window_slices(pad(x, last.spatial, where.padding), last, where)
        rows = lax.concatenate(pieces, last.channel).reshape(-1, matrix.shape[side])
        return lax.dot_general(rows, matrix, (((1,), (side,)), ((), ())), precision)

    room = max(CHUNK_BYTES, matrix.nbytes)  # of which the sum, a pass over the kernel, is a small part
    fit = room // (math.prod(where.count) * matrix.shape[side] * x.dtype.itemsize)
    some = max(number for number in range(1, max(1, fit) + 1) if x.shape[0] % number == 0)
    chunks = x.reshape(-1, some, *x.shape[1:])
    y = lax.map(lambda chunk: product(chunk, matrix), chunks).reshape(x.shape[0], *where.count, -1)
    return lax.transpose(y, [order.index(axis) for axis in range(y.ndim)])
