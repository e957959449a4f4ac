"""Products with a kernel or an embedding table over the last axis, and embedding lookups."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from mlax._jax import (
    broadcast_like,
    expand_last,
    explicit_sharding,
    narrow_indices,
    reduce_sum,
    take_rows,
    with_layer_form,
    with_vjp,
)
from mlax.core import check_is_dtype
from mlax.ops._activations import activate, exact_gelu, gelu
from mlax.ops._checks import check_same_dtype
from mlax.ops._cpu import flatten_rows
from mlax.ops._gpu import on_gpu
from mlax.ops._gpu_mlp import (
    biased_product_kernel,
    gelu_product_gradient_kernel,
    gelu_product_kernel,
    prefers_mlp_kernels,
)
from mlax.ops._gpu_products import kernel_gradients, prefers_product_kernels, sum_of_products


def linear(
    x: Float[Array, "... d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"] | None = None,
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... f"]:
    """A linear map: `activation(x @ kernel + bias)`, in the dtype of `x`.

    Products are summed in `accum_dtype` if given. On a GPU, the bias and `ops.gelu` or `ops.exact_gelu` are one pass.
    """
    check_is_dtype("linear", accum_dtype=accum_dtype)
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"linear: the input has the shape {x.shape} but the kernel {kernel.shape}; "
            "the last axis of the input must have the size of the first of the kernel."
        )
    check_same_dtype("linear", x=x, kernel=kernel, bias=bias)
    y = _dot(flatten_rows(x), kernel, 0, precision, accum_dtype).reshape(*x.shape[:-1], kernel.shape[1])
    bias = None if bias is None else lax.convert_element_type(bias, y.dtype)
    if activation is not None:
        y = activate(y, bias, activation)
    elif bias is not None:
        y = y + expand_last(bias, y)
    return lax.convert_element_type(y, x.dtype)


def linears(
    x: Float[Array, "... d"], kernels: Sequence[Float[Array, "d f"]], biases: Sequence[Float[Array, " f"] | None]
) -> list[Float[Array, "... f"]]:
    """`linear(x, kernel, bias)` for each pair.

    Where `prefers_product_kernels`, the gradients by x and by the kernels are two kernels on a GPU.
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
        return functools.reduce(lax.add, [_dot(*pair, 1, None, None) for pair in zip(grads, kernels, strict=True)])

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
    activation: Callable[[jax.Array], jax.Array] | None,
) -> Float[Array, "... e"] | None:
    """`linear(linear(x, kernel, bias, activation=activation), down)`, if kernels are faster; else None.

    One kernel computes the first product and the activation, another one the gradient of both by the first product.
    """
    if activation not in (gelu, exact_gelu) or not prefers_mlp_kernels(x, kernel, down):
        return None
    check_same_dtype("gelu_mlp", x=x, kernel=kernel, bias=bias, down=down)
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
        return _dot(y, down, 0, None, None).reshape(*x.shape[:-1], down.shape[1]), (h, y)

    def by_xla(x: Array, up: Array, bias: Array) -> tuple[Array, Array]:
        h = linear(x, up, bias)
        return h, activation(h)

    def backward(residuals: Any, primals: Any, consts: Any, grad: Array) -> Any:
        (x, up, bias, down), (h, y), grad = primals, residuals, _rows(grad)
        kernel = functools.partial(gelu_product_gradient_kernel, approximate=approximate)
        dh, dbias = on_gpu(kernel, gradient_by_xla, grad, down, h)
        dx = _dot(dh, up, 1, None, None).reshape(x.shape)
        return (
            dx,
            _kernel_gradient(_rows(x), dh),
            lax.convert_element_type(dbias, bias.dtype),
            _kernel_gradient(y, grad),
        )

    def gradient_by_xla(grad: Array, down: Array, h: Array) -> tuple[Array, Array]:
        (dh,) = jax.vjp(activation, h)[1](_dot(grad, down, 1, None, None))
        return dh, lax.convert_element_type(dh, np.float32).sum(0)

    return with_vjp(plain, forward, backward)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _kernel_gradient(x: Float[Array, "r d"], grad: Float[Array, "r f"]) -> Float[Array, "d f"]:
    return lax.dot_general(x, grad, (((0,), (0,)), ((), ())))


def tied_logits(
    x: Float[Array, "... d"],
    table: Float[Array, "v d"],
    *,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "... v"]:
    """`x @ table.T`, the logits of an output layer tied to an embedding table, in the dtype of `x`.

    Products are summed in `accum_dtype` if given. https://arxiv.org/abs/1608.05859
    """
    check_is_dtype("tied_logits", accum_dtype=accum_dtype)
    if x.ndim == 0 or x.shape[-1] != table.shape[1]:
        raise ValueError(
            f"tied_logits: the input has the shape {x.shape} but the table {table.shape}; their last axes must be of "
            "equal size."
        )
    check_same_dtype("tied_logits", x=x, table=table)
    return lax.convert_element_type(_dot(x, table, 1, precision, accum_dtype), x.dtype)


def embedding(
    x: Integer[Array, "..."], table: Float[Array, "v d"], *, padding: int | None = None
) -> Float[Array, "... d"]:
    """Embedding lookup: the row of `table` for each index in `x`, in the dtype of the table.

    An index out of bounds gives NaN, and no gradient, so that the mistake shows; `padding` gives no gradient either.
    """
    _check_indices("embedding", x)
    rows = gather_rows(table, x, mode="fill")
    return rows if padding is None else jnp.where((x == padding)[..., None], lax.stop_gradient(rows), rows)


def embedding_bag(
    x: Integer[Array, "... n"],
    table: Float[Array, "v d"],
    weights: Float[Array, "... n"] | Bool[Array, "... n"] | None = None,
    *,
    by: Literal["sum", "mean", "max"] = "mean",
    padding: int | None = None,
) -> Float[Array, "... d"]:
    """A bag of embeddings: the sum, mean or maximum of the rows of `table` for the indices along the last axis of `x`.

    `weights` are booleans that say which indices count, or, for the sum, numbers to multiply the rows with. `padding`
    does not count. Where none counts the result is 0.
    """
    _check_indices("embedding_bag", x)
    rows = gather_rows(table, x, mode="fill")  # (..., n, d)
    counts = jnp.ones(x.shape, bool) if padding is None else x != padding
    if weights is not None and jnp.issubdtype(weights.dtype, jnp.bool_):
        counts = counts & weights
    elif weights is not None:
        if by != "sum":
            raise ValueError(f"embedding_bag: the weights are {weights.dtype}, but a {by} takes booleans only.")
        check_same_dtype("embedding_bag", table=table, weights=weights)
        rows = rows * broadcast_like(weights[..., None], rows)
    counts, axis = counts[..., None], (x.ndim - 1,)
    if by == "max":
        lowest = jnp.where(counts, rows, jnp.full_like(rows, -jnp.inf))
        highest = lowest.max(axis=axis, initial=-jnp.inf)
        return jnp.where(counts.any(axis=axis), highest, jnp.zeros_like(highest))
    total = reduce_sum(jnp.where(counts, rows, jnp.zeros_like(rows)), axis)
    if by == "sum":
        return total
    number = jnp.maximum(lax.convert_element_type(counts.sum(axis=axis, dtype=jnp.int32), total.dtype), 1.0)
    return total / broadcast_like(number, total)


def _check_indices(name: str, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: the input is {x.dtype}, but must be integers; cast it to int32.")


@functools.partial(jax.jit, static_argnames="mode")
def gather_rows(table: jax.Array, indices: jax.Array, mode: Literal["fill", "clip"]) -> jax.Array:
    """`table[indices]`, over explicit mesh axes sharded like the indices.

    An index out of bounds gives NaN ("fill") or the nearest row ("clip"). Negative indices are out of bounds.
    """
    indices = narrow_indices(indices, table.shape[0])
    if mode == "fill" and jnp.issubdtype(indices.dtype, jnp.signedinteger):
        # without a sign, negative ones lie beyond the last row, and JAX adds no code that counts them from the end
        indices = indices.astype(jnp.int32).astype(jnp.uint32)
    sharding = explicit_sharding(indices)
    if sharding is None:
        return take_rows(table, indices, mode)
    spec = PartitionSpec(*sharding.spec, *jax.typeof(table).sharding.spec[1:])
    return table.at[indices].get(mode=mode, out_sharding=NamedSharding(sharding.mesh, spec))


def _dot(x: Array, kernel: Array, axis: int, precision: lax.PrecisionLike, accum_dtype: Any) -> Array:
    """The product of the last axis of `x` with one axis of the kernel, in `accum_dtype` if given."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, kernel, dimensions, precision=precision, preferred_element_type=accum_dtype)
