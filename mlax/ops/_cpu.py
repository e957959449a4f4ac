"""Forms of operations that run faster on a CPU than the ones XLA compiles well elsewhere.

An operation with such a form has a predicate here, `prefers_...`, or a function that returns its argument on other
devices. The backend is read while tracing: `lax.platform_dependent` would put both forms, and the gradients of both,
into every jaxpr. Dtypes below 32 bits keep the plain form, since sums of products would be rounded at every step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mlax._jax import explicit_sharding, is_unsharded_cpu, with_jvps
from mlax.ops._checks import is_static
from mlax.ops._layout import Layout, parse_layout
from mlax.ops._windows import Windows, pad, window_slices

Convolve = Callable[[Array, Array], Array]  # of (x, kernel)

CHUNK_BYTES = 2**19  # of windows, which stay in the cache of a core
MIN_CHANNELS = 128  # of all examples together, below which JAX's own kernel gradient is as fast
MIN_SIZE = 128  # of an image, in pixels or in channels: for smaller ones JAX's own is up to 3 times as fast
MAX_DEPTHWISE_WINDOW = 64  # elements; a larger window would make a large program


def is_cpu() -> bool:
    """Whether JAX computes on a CPU by default."""
    return jax.default_backend() == "cpu"


def materialize(x: Array) -> Array:
    """`x`, on a CPU not fused into its consumers: they would compute it in their own loop order, or several times."""
    return lax.optimization_barrier(x) if is_cpu() else x


def flatten_rows(x: Array) -> Array:
    """`x` (..., d) as (n, d) where a product over two axes is faster; else `x`.

    Not where an axis but the first is or may be sharded: merged with the axis before it, it would have to be gathered.
    (benchmarks/linear.py)
    """
    sharding = jax.typeof(x).sharding
    if x.ndim < 3 or x.size == 0 or not is_cpu() or sharding.mesh.auto_axes or any(sharding.spec[1:-1]):
        return x
    return x.reshape(-1, x.shape[-1])


def prefers_depthwise_products(x: Array, kernel: Array, axes: Layout, groups: int, accum_dtype: Any) -> bool:
    """Whether to compute a depthwise convolution as a sum of products of whole arrays (benchmarks/layers.py)."""
    return (
        is_cpu()
        and groups == x.shape[axes.channel] == kernel.shape[axes.outputs]
        and math.prod(kernel.shape) <= MAX_DEPTHWISE_WINDOW * groups
        and jnp.finfo(accum_dtype or x.dtype).bits >= 32
    )


def depthwise_products(x: Array, kernel: Array, axes: Layout, windows: Windows, accum_dtype: Any) -> Array:
    """A depthwise convolution, as the sum over the window of slices of `x` times one weight of each channel."""
    x, weights = (lax.convert_element_type(each, accum_dtype or x.dtype) for each in (x, kernel))
    weights = lax.transpose(weights, (*axes.window, axes.outputs, axes.inputs)).reshape(-1, kernel.shape[axes.outputs])
    slices = window_slices(pad(x, axes.spatial, windows.padding), axes, windows)
    others = axes.non_channel_axes()
    products = [each * lax.expand_dims(weight, others) for each, weight in zip(slices, weights, strict=True)]
    return functools.reduce(lax.add, products)


def prefers_chunked_kernel_grad(x: Array, axes: Layout, groups: int, accum_dtype: Any) -> bool:
    """Whether the kernel's gradient of a convolution is faster as a sum of matrix products.

    By JAX's own rule it is a convolution whose window is the whole image and whose channels are the examples. XLA has
    no fast loop for that, unless there are few of both, or one spatial axis (benchmarks/convs.py).
    """
    pixels = [x.shape[axis] for axis in axes.spatial]
    return (
        is_unsharded_cpu(x)
        and groups == 1
        and len(axes.spatial) > 1
        and is_static(*x.shape)
        and x.shape[axes.batch] * x.shape[axes.channel] >= MIN_CHANNELS
        and max(math.prod(pixels), x.shape[axes.channel]) >= MIN_SIZE
        and accum_dtype is None
        and jnp.finfo(x.dtype).bits >= 32
    )


def with_chunked_kernel_grad(convolve: Convolve, axes: Layout, windows: Windows, precision: Any) -> Convolve:
    """`convolve`, whose derivative by the kernel is computed a few examples at a time."""

    def x_jvp(dot: Array, x: Array, kernel: Array) -> Array:
        return chunked(dot, kernel)

    def kernel_jvp(dot: Array, x: Array, kernel: Array) -> Array:
        return _chunked_conv(x, dot, axes, windows, precision)

    chunked = with_jvps(convolve, x_jvp, kernel_jvp)
    return chunked


def _chunked_conv(x: Array, kernel: Array, axes: Layout, windows: Windows, precision: Any) -> Array:
    """A convolution as matrix products of the kernel with all windows of a few examples at a time.

    Its transpose is a sum of products. The windows are copies, many times the size of the input, so they never all
    exist at once, nor are they residuals of the backward pass.
    """
    order = (axes.batch, *axes.spatial, axes.channel)
    x = lax.transpose(x, order)
    last = parse_layout("conv", "channel_last", x)
    matrix = lax.transpose(kernel, (axes.outputs, *axes.window, axes.inputs))
    matrix = matrix.reshape(matrix.shape[0], -1)  # (features, window times channels)
    side = int(matrix.shape[1] > matrix.shape[0])
    matrix = matrix if side else matrix.T  # products are faster if the longer axis is the last

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def product(x: Array, matrix: Array) -> Array:
        slices = window_slices(pad(x, last.spatial, windows.padding), last, windows)
        rows = lax.concatenate(slices, last.channel).reshape(-1, matrix.shape[side])
        return lax.dot_general(rows, matrix, (((1,), (side,)), ((), ())), precision)

    chunk_bytes = max(CHUNK_BYTES, matrix.nbytes)  # so that adding to the kernel's gradient is a small part of the work
    fit = chunk_bytes // (math.prod(windows.count) * matrix.shape[side] * x.dtype.itemsize)
    examples = max(number for number in range(1, max(1, fit) + 1) if x.shape[0] % number == 0)
    chunks = x.reshape(-1, examples, *x.shape[1:])
    y = lax.map(lambda chunk: product(chunk, matrix), chunks).reshape(x.shape[0], *windows.count, -1)
    return lax.transpose(y, [order.index(axis) for axis in range(y.ndim)])


def prefers_undilated_kernel_grad(x: Array, strides: tuple[int, ...], groups: int, accum_dtype: Any) -> bool:
    """Whether to compute the kernel's gradient of a transposed convolution without dilating the input.

    Not for groups over explicit mesh axes: JAX would merge the axis of the groups with a sharded one.
    """
    is_grouped = groups > 1 and explicit_sharding(x)
    return is_cpu() and max(strides, default=1) > 1 and accum_dtype is None and not is_grouped


def with_undilated_kernel_grad(convolve: Convolve) -> Convolve:
    """`convolve`, a transposed convolution, with the kernel's gradient of the convolution that it is the transpose of.

    By JAX's own rule it is a convolution of the input with zeros between its elements, for which XLA has no fast loop:
    a training step takes ten times as long (benchmarks/layers.py).
    """
    undilated = jax.custom_jvp(convolve)

    @undilated.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (x, kernel), (x_dot, kernel_dot) = primals, tangents
        y = undilated(x, kernel)

        def kernel_grad(y_grad: Array) -> Array:
            def conv(kernel: Array) -> Array:
                return jax.linear_transpose(lambda x: convolve(x, kernel), x)(y_grad)[0]

            return jax.linear_transpose(conv, kernel)(x)[0]

        return y, undilated(x_dot, kernel) + jax.linear_transpose(kernel_grad, y)(kernel_dot)[0]

    return undilated
