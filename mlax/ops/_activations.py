"""Activations that `jax.nn` lacks or that store less than its own, and a softmax that stays in one dtype."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from mlax._gpu import gelu_gradient_kernel, gelu_kernel, on_gpu, prefers_gelu_kernel
from mlax._jax import broadcast_like, divide, expand_last, reduce_sum, with_vjp
from mlax.core import check_is_dtype
from mlax.ops._checks import check_floating, check_same_dtype


def gelu(x: Float[Array, "..."], approximate: bool = True) -> Float[Array, "..."]:
    """GELU, the Gaussian error linear unit, in the dtype of `x`; the backward pass computes it again from `x` alone.

    The values and the derivatives are those of `jax.nn.gelu`, which stores two arrays for the backward pass, and is
    slower on a GPU. With `approximate`, it is the form by tanh; else the exact one. https://arxiv.org/abs/1606.08415
    """
    check_floating("gelu", x)
    return _gelu(bool(approximate))((x,))


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU in its exact form, as PyTorch's default: `gelu(x, approximate=False)`."""
    return gelu(x, approximate=False)


def activate(
    x: Float[Array, "... d"], bias: Float[Array, " d"] | None, activation: Callable[[jax.Array], jax.Array]
) -> Float[Array, "... d"]:
    """`activation(x + bias)`, on a GPU in one pass for `gelu` and `exact_gelu`, in the product for `jax.nn.relu`."""
    if activation is jax.nn.relu and jax.default_backend() == "gpu":
        activation = relu_from_output
    if bias is None:
        return activation(x)
    if activation in (gelu, exact_gelu) and prefers_gelu_kernel(x):
        return _biased_gelu(activation is gelu)((x, bias))
    return activation(x + expand_last(bias, x))


@jax.custom_jvp
def relu_from_output(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`jax.nn.relu`, with a derivative that reads its output, which the next layer stores anyway, and not its input.

    So a matrix product that `x` comes from can add the bias and apply the activation: cuBLAS writes the output alone.
    """
    return jnp.maximum(x, 0)


@relu_from_output.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = relu_from_output(*primals)
    is_positive = (y != 0) & (y == y)  # `y > 0`, for which XLA would read `x`; false for NaN
    return y, jnp.where(is_positive, tangents[0], jnp.zeros_like(y))


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The squared ReLU: `max(x, 0) ** 2`, in the dtype of `x`. https://arxiv.org/abs/2109.08668, section 3."""
    positive = jax.nn.relu(x)
    return positive * positive


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Quick GELU: `x * sigmoid(1.702 x)`, in the dtype of `x`: the GELU that CLIP was trained with.

    https://arxiv.org/abs/1606.08415, section 2.
    """
    return x * jax.nn.sigmoid(1.702 * x)


def prelu(x: Float[Array, "..."], slope: Float[Array, "..."]) -> Float[Array, "..."]:
    """The parametric ReLU: `x` where it is positive and `slope * x` elsewhere, in the dtype of `x`; the slope is over
    the last axes of `x`.

    https://arxiv.org/abs/1502.01852, equation 1.
    """
    check_same_dtype("prelu", x=x, slope=slope)
    return jnp.where(x > 0, x, expand_last(slope, x) * x)


def snake(x: Float[Array, "..."], frequency: float = 1.0) -> Float[Array, "..."]:
    """The Snake activation: `x + sin(frequency x)^2 / frequency`, in the dtype of `x`: the identity plus a periodic
    function.

    https://arxiv.org/abs/2006.08195, equation 3.
    """
    sine = jnp.sin(frequency * x)
    return x + sine * sine / frequency


def soft_cap(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Soft capping: `cap * tanh(x / cap)`, in the dtype of `x`: close to the identity around 0, and bounded by `cap`.

    Used on logits by Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """
    return cap * jnp.tanh(x / cap)


def glu(
    gate: Float[Array, "..."], value: Float[Array, "..."], activation: Callable[[jax.Array], jax.Array]
) -> Float[Array, "..."]:
    """A gated linear unit (GLU): `activation(gate) * value`, in the dtype of both. https://arxiv.org/abs/2002.05202,
    equations 4 and 5.
    """
    check_same_dtype("glu", gate=gate, value=value)
    return activation(gate) * value


def softmax(
    x: Float[Array, "..."], visible: Bool[Array, "..."] | None = None, *, axis: int = -1, accum_dtype: Any = None
) -> Float[Array, "..."]:
    """Softmax: `exp(x) / sum(exp(x))` along `axis`, in the dtype of `x`, or in `accum_dtype` with one cast at the end.

    Elements that are not `visible` count as minus infinity; where none is visible the result is 0, not NaN.
    (`jax.nn.softmax` sums float16 and bfloat16 in float32.)
    """
    check_is_dtype("softmax", accum_dtype=accum_dtype)
    wide = x if accum_dtype is None else lax.convert_element_type(x, jnp.dtype(accum_dtype))
    numerator, denominator, _ = softmax_parts(wide, visible, axis=axis)
    return lax.convert_element_type(divide(numerator, denominator), x.dtype)


def softmax_parts(
    x: Float[Array, "..."],
    visible: Bool[Array, "..."] | None,
    sinks: Float[Array, "..."] | None = None,
    *,
    axis: int = -1,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Softmax before its division: (exp(x - m), their sum along `axis`, m), the sum never 0.

    `sinks` broadcasts against the sum and counts as one more element of x, which takes weight but gives no output.
    """
    axis = axis % x.ndim
    if visible is not None:
        x = jnp.where(visible, x, min_value(x.dtype))
    top = lax.expand_dims(lax.reduce_max(x, (axis,)), (axis,))
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    top = lax.stop_gradient(safe_max(top))
    numerator = lax.exp(x - top)
    total = lax.expand_dims(reduce_sum(numerator, (axis,)), (axis,))
    if sinks is not None:
        total = total + lax.exp(broadcast_like(sinks, top) - top)
    return numerator, guard_zero(total), top


def min_value(dtype: Any) -> float:
    """The lowest finite value of a dtype, used for minus infinity: differences of it are not NaN."""
    return float(jnp.finfo(dtype).min)


def safe_max(top: Float[Array, "..."]) -> Float[Array, "..."]:
    """The maxima, or 0 where nothing is visible, so that exp(min_value - top) is 0 there and not 1."""
    return jnp.where(top <= min_value(top.dtype), jnp.zeros_like(top), top)


def guard_zero(total: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sums, or 1 where nothing is visible, so that dividing by them gives 0."""
    return jnp.where(total == 0, jnp.ones_like(total), total)


@functools.cache
def _gelu(approximate: bool) -> Callable[..., Array]:
    slope = _approximate_gelu_slope if approximate else _gelu_slope

    def plain(primals: Any, consts: Any = None) -> Array:
        return jax.nn.gelu(*primals, approximate=approximate)

    def forward(primals: Any, consts: Any) -> tuple[Array, None]:
        return plain(primals), None

    def backward(residuals: None, primals: Any, consts: Any, grad: Array) -> Any:
        return (grad * slope(*primals),)

    return with_vjp(plain, forward, backward)


@functools.cache
def _biased_gelu(approximate: bool) -> Callable[..., Array]:
    """GELU of the sum of (x, bias) by kernels."""

    def plain(primals: Any, consts: Any = None) -> Array:
        x, bias = primals
        return jax.nn.gelu(x + expand_last(bias, x), approximate=approximate)

    def forward(primals: Any, consts: Any) -> tuple[Array, None]:
        kernel = functools.partial(gelu_kernel, approximate=approximate)
        return on_gpu(kernel, lambda *primals: plain(primals), *primals), None

    def backward(residuals: None, primals: Any, consts: Any, grad: Array) -> Any:
        def kernel(x: Array, bias: Array, grad: Array) -> tuple[Array, Array]:
            dx, dbias = gelu_gradient_kernel(x, bias, grad, approximate=approximate)
            return dx, lax.convert_element_type(dbias, bias.dtype)

        def by_xla(x: Array, bias: Array, grad: Array) -> tuple[Array, Array]:
            return jax.vjp(lambda *primals: plain(primals), x, bias)[1](grad)

        return on_gpu(kernel, by_xla, *primals, grad)

    return with_vjp(plain, forward, backward)


def _approximate_gelu_slope(x: Array) -> Array:
    """The derivative of `x * sigmoid(2 u)`, which is GELU's `x * (1 + tanh(u)) / 2`.

    In another form than the forward pass, since XLA would store what both compute.
    """
    scale = 2 * math.sqrt(2 / math.pi)
    near = jnp.clip(x, -12, 12)  # beyond, sigmoid is 0 or 1, and the cube might overflow
    square = near * near
    sigmoid = jax.nn.sigmoid(scale * (near + 0.044715 * (near * square)))
    return sigmoid + near * (scale * (1 + 3 * 0.044715 * square)) * (sigmoid * (1 - sigmoid))


def _gelu_slope(x: Array) -> Array:
    """The derivative of `x * cdf(x)`, where cdf is the distribution function of the normal distribution."""
    density = lax.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + lax.erf(x * math.sqrt(0.5))) + x * density
