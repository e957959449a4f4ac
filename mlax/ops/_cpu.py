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

from mlax._jax import explicit_sharding, is_static, is_unsharded_cpu, with_jvps
from mlax.ops._layout import Layout
from mlax.ops._windows import Windows, pad, window_slices

Convolve = Callable[[Array, Array], Array]  # of (x, kernel)

MIN_EXAMPLES = 32  # of a piece of a batch whose transpose stays in the cache
MAX_PIECES = 4  # of a batch, each with a convolution of its own
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


def prefers_canonical_conv(x: Array, axes: Layout, groups: int, accum_dtype: Any) -> bool:
    """Whether to compute a convolution and its gradients by `canonical_conv` (benchmarks/convs.py)."""
    is_wide = accum_dtype is None and jnp.finfo(x.dtype).bits >= 32
    return is_unsharded_cpu(x) and groups == 1 and is_static(*x.shape) and is_wide and x.shape[axes.batch] > 0


def canonical_conv(axes: Layout, windows: Windows, precision: Any) -> Convolve:
    """A convolution of (x, kernel) whose value and gradients are convolutions in the layout of XLA's fast loops.

    That is (b, *spatial, c) and (*window, c, f). XLA transposes operands to it at the top level of a program only, so
    that a training step inside of a loop would take many times as long. JAX's gradients have the layouts of what they
    are the gradient of, so each gets its own.
    """

    def in_layouts(x: Array, kernel: Array, orders: tuple[str, str, str]) -> Array:
        return _conv_in_layouts(x, kernel, orders, axes, windows, precision)

    def x_jvp(dot: Array, x: Array, kernel: Array) -> Array:
        return in_layouts(dot, kernel, ("nsc", "soi", "nsc"))

    @functools.partial(jax.checkpoint, prevent_cse=False)  # or the transposed input would be a residual
    def kernel_jvp(dot: Array, x: Array, kernel: Array) -> Array:
        pieces = min(MAX_PIECES, max(1, x.shape[axes.batch] // MIN_EXAMPLES))
        split = jnp.array_split(x, pieces, axes.batch)
        return lax.concatenate([in_layouts(each, dot, ("csn", "iso", "snc")) for each in split], axes.batch)

    return with_jvps(lambda x, kernel: in_layouts(x, kernel, ("nsc", "sio", "nsc")), x_jvp, kernel_jvp)


def _conv_in_layouts(
    x: Array, kernel: Array, orders: tuple[str, str, str], axes: Layout, windows: Windows, precision: Any
) -> Array:
    """The convolution of `x` and `kernel`, transposed to these orders of axes, as is the result before it is returned.

    The axes of images are n, s (spatial) and c, those of a kernel o, s and i.
    """
    images = {"n": (axes.batch,), "s": axes.spatial, "c": (axes.channel,)}
    kernels = {"o": (axes.outputs,), "s": axes.window, "i": (axes.inputs,)}
    image, weight, output = (
        [axis for letter in order for axis in places[letter]]
        for order, places in zip(orders, (images, kernels, images), strict=True)
    )
    numbers = [
        tuple(order.index(axis) for axis in (first, second, *spatial))
        for order, first, second, spatial in (
            (image, axes.batch, axes.channel, axes.spatial),
            (weight, axes.outputs, axes.inputs, axes.window),
            (output, axes.batch, axes.channel, axes.spatial),
        )
    ]
    y = lax.conv_general_dilated(
        lax.transpose(x, image),
        lax.transpose(kernel, weight),
        windows.strides,
        windows.padding,
        rhs_dilation=windows.dilation,
        dimension_numbers=lax.ConvDimensionNumbers(*numbers),
        precision=precision,
    )
    return lax.transpose(y, [output.index(axis) for axis in range(y.ndim)])


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
