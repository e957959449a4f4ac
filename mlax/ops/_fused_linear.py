"""Fused linear layers: several of one input, and an MLP with GELU, whose products are kernels on a GPU."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._gpu import (
    biased_product_kernel,
    gelu_product_gradient_kernel,
    gelu_product_kernel,
    kernel_gradients,
    on_gpu,
    prefers_mlp_kernels,
    prefers_product_kernels,
    sum_of_products,
)
from mlax._jax import with_layer_form, with_vjp
from mlax.ops._activations import exact_gelu, gelu
from mlax.ops._checks import check_same_dtype
from mlax.ops._linear import linear


def linears(
    x: Float[Array, "... d"], kernels: Sequence[Float[Array, "d f"]], biases: Sequence[Float[Array, " f"] | None]
) -> list[Float[Array, "... f"]]:
    """`linear(x, kernel, bias)` for each pair.

    Where `prefers_product_kernels`, the gradients with respect to x and to the kernels are two kernels on a GPU.
    """
    check_same_dtype("linears", x=x, **{f"kernel {index}": kernel for index, kernel in enumerate(kernels)})
    if not prefers_product_kernels(x, kernels):
        return [linear(x, *pair) for pair in zip(kernels, biases, strict=True)]
    products = with_vjp(_multiply_each, _multiply_apart, _differentiate_products)
    return products((x, list(kernels), list(biases)))


def _multiply_each(primals: Any, consts: Any = None) -> list[Array]:
    x, *pairs = primals
    return [linear(x, *pair) for pair in zip(*pairs, strict=True)]


def _multiply_apart(primals: Any, consts: Any) -> tuple[list[Array], None]:
    """Behind barriers, since XLA would concatenate two of the kernels, and take the result apart by copies."""
    x, kernels, biases = primals
    apart = [x, *lax.optimization_barrier([x] * (len(kernels) - 1))]
    return list(map(_multiply_with_bias, apart, kernels, biases)), None


def _multiply_with_bias(x: Array, kernel: Array, bias: Array | None) -> Array:
    """`linear`, with a bias by a kernel where the result is a slice of a stack."""
    if bias is None:
        return linear(x, kernel)

    def by_kernel(x: Array, kernel: Array, bias: Array) -> Array:
        return on_gpu(biased_product_kernel, linear, _rows(x), kernel, bias).reshape(*x.shape[:-1], kernel.shape[1])

    return with_layer_form(linear, by_kernel)(x, kernel, bias)


def _differentiate_products(
    residuals: None, primals: Any, consts: Any, grads: list[Array]
) -> tuple[Array, list[Array], list[Array | None]]:
    x, kernels, biases = primals
    grads = [_rows(grad) for grad in grads]

    def plain_sum(grads: list[Array], kernels: list[Array]) -> Array:
        return functools.reduce(lax.add, map(_multiply_transposed, grads, kernels))

    def plain_gradients(rows: Array, grads: list[Array]) -> list[Array]:
        return [_kernel_gradient(rows, grad) for grad in grads]

    dx = on_gpu(sum_of_products, plain_sum, grads, kernels)
    return (
        dx.reshape(x.shape),
        on_gpu(kernel_gradients, plain_gradients, _rows(x), grads),
        list(map(_bias_gradient, biases, grads)),
    )


def _bias_gradient(bias: Array | None, grad: Float[Array, "r f"]) -> Array | None:
    """The sum over rows, in float32."""
    if bias is None:
        return None
    return lax.convert_element_type(lax.convert_element_type(grad, np.float32).sum(0), bias.dtype)


def gelu_mlp(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"],
    *,
    down: Float[Array, "f e"],
    activation: Callable[[jax.Array], jax.Array],
) -> Float[Array, "... e"]:
    """An MLP with GELU: `linear(linear(x, kernel, bias, activation=activation), down)`, for `gelu` or `exact_gelu`.

    Where `prefers_mlp_kernels`, one kernel computes the first product and GELU on a GPU, another one its gradient.
    """
    check_same_dtype("gelu_mlp", x=x, kernel=kernel, bias=bias, down=down)
    if activation not in (gelu, exact_gelu) or not prefers_mlp_kernels(x, kernel, down):
        return linear(linear(x, kernel, bias, activation=activation), down)
    return _gelu_mlp(activation is gelu)((x, kernel, bias, down))


@functools.cache
def _gelu_mlp(approximate: bool) -> Callable[..., Array]:
    activation = gelu if approximate else exact_gelu

    def plain(primals: Any, consts: Any = None) -> Array:
        x, up, bias, down = primals
        return linear(linear(x, up, bias, activation=activation), down)

    def forward(primals: Any, consts: Any) -> tuple[Array, tuple[Array, Array]]:
        x, up, bias, down = primals
        h, y = on_gpu(functools.partial(gelu_product_kernel, approximate=approximate), by_xla, _rows(x), up, bias)
        return linear(y, down).reshape(*x.shape[:-1], down.shape[1]), (h, y)

    def by_xla(x: Array, up: Array, bias: Array) -> tuple[Array, Array]:
        h = linear(x, up, bias)
        return h, activation(h)

    def backward(residuals: Any, primals: Any, consts: Any, grad: Array) -> Any:
        (x, up, bias, down), (h, y), grad = primals, residuals, _rows(grad)
        kernel = functools.partial(gelu_product_gradient_kernel, approximate=approximate)
        dh, dbias = on_gpu(kernel, gradient_by_xla, grad, down, h)
        return (
            _multiply_transposed(dh, up).reshape(x.shape),
            _kernel_gradient(_rows(x), dh),
            lax.convert_element_type(dbias, bias.dtype),
            _kernel_gradient(y, grad),
        )

    def gradient_by_xla(grad: Array, down: Array, h: Array) -> tuple[Array, Array]:
        (dh,) = jax.vjp(activation, h)[1](_multiply_transposed(grad, down))
        return dh, lax.convert_element_type(dh, np.float32).sum(0)

    return with_vjp(plain, forward, backward)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _multiply_transposed(grad: Float[Array, "r f"], kernel: Float[Array, "d f"]) -> Float[Array, "r d"]:
    return lax.dot_general(grad, kernel, (((1,), (1,)), ((), ())))


def _kernel_gradient(x: Float[Array, "r d"], grad: Float[Array, "r f"]) -> Float[Array, "d f"]:
    return lax.dot_general(x, grad, (((0,), (0,)), ((), ())))
