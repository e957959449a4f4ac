"""An output layer and its cross-entropy in one function, which holds logits in the dtype of the input only.

The product with the weights, the loss and their gradients are one unit: the vocabulary can be padded to a size that
matrix products are fast for, and the tokens can go by chunks, so that the logits of one chunk exist at a time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from mlax._jax import expand_last, explicit_sharding, is_static, narrow_indices, pcast_like, reduce_sum, with_vjp
from mlax.core import check_is_dtype
from mlax.ops._checks import check_floating, check_same_dtype
from mlax.ops._cpu import is_cpu
from mlax.ops._cross_entropy import LossSpec, cross_entropy_rows, logit_gradient, plain_cross_entropy

ALIGNED = 8  # of which a multiple needs no padding: 16 bytes of a narrow dtype
TILE = 128  # to a multiple of which other vocabularies are padded


def linear_cross_entropy(
    x: Float[Array, "*b d"],
    kernel: Float[Array, "d v"],
    labels: Integer[Array, "*b"],
    *,
    bias: Float[Array, " v"] | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    mask: Bool[Array, "*b"] | None = None,
    chunks: int = 1,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "*b"]:
    """A linear output layer fused with its cross-entropy: (..., d) and the labels (...), integers, to losses (...).

    It is `softmax_cross_entropy(linear(x, kernel, bias), labels)`, with that function's arguments and gradients, but
    logits exist in the dtype of `x` only, also with `accum_dtype="float32"`, the dtype of all sums and of the losses;
    and on a GPU, odd vocabularies are padded, for which products are slow. `softcap` is that of `ops.soft_cap`.

    With `chunks`, the axis before the last is split into that many parts, and the logits of one exist at a time. Its
    gradients are computed along with its losses, assuming that all losses have the same cotangent, as by a mean; if
    not, the backward pass computes the logits again.
    """
    check_is_dtype("linear_cross_entropy", accum_dtype=accum_dtype)
    loss = _loss_spec(x, smoothing, z_loss, softcap, accum_dtype)
    head = Head("linear_cross_entropy", 0, chunks, precision, loss)
    return _head_loss(head, x, kernel, bias, labels, mask)


def tied_cross_entropy(
    x: Float[Array, "*b d"],
    table: Float[Array, "v d"],
    labels: Integer[Array, "*b"],
    *,
    bias: Float[Array, " v"] | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    mask: Bool[Array, "*b"] | None = None,
    chunks: int = 1,
    precision: lax.PrecisionLike = None,
    accum_dtype: Any = None,
) -> Float[Array, "*b"]:
    """An output layer tied to an embedding table, fused with its cross-entropy: `linear_cross_entropy` for the kernel
    `table.T`, without a transpose.
    """
    check_is_dtype("tied_cross_entropy", accum_dtype=accum_dtype)
    loss = _loss_spec(x, smoothing, z_loss, softcap, accum_dtype)
    head = Head("tied_cross_entropy", 1, chunks, precision, loss)
    return _head_loss(head, x, table, bias, labels, mask)


class Head(NamedTuple):
    """An output layer and its loss but for their arrays."""

    name: str  # of the function, for errors
    axis: int  # of the weights that is multiplied: 0 of a kernel (d, v), 1 of a table (v, d)
    chunks: int  # of tokens
    precision: Any  # of the products
    loss: LossSpec


class Tokens(NamedTuple):
    """What is not differentiated."""

    labels: Array  # (...)
    mask: Array | None  # (...)


def _loss_spec(x: Array, smoothing: float, z_loss: float, softcap: float | None, accum_dtype: Any) -> LossSpec:
    dtype = jnp.dtype(x.dtype if accum_dtype is None else accum_dtype)
    return LossSpec(float(smoothing), float(z_loss), dtype, None if softcap is None else float(softcap))


def _head_loss(head: Head, x: Array, weights: Array, bias: Array | None, labels: Array, mask: Array | None) -> Array:
    _check_arguments(head, x, weights, bias, labels)
    classes = weights.shape[1 - head.axis]
    if _prefers_padding(classes, weights, bias):
        head = head._replace(loss=head.loss._replace(classes=classes))
    arrays = (x, weights, bias), Tokens(narrow_indices(labels, classes), mask)
    (x, weights, bias), tokens = pcast_like(arrays, arrays)
    tokens = jax.tree.map(lambda each: _shard_like_rows(each, x), tokens)
    if head.chunks == 1:
        x, tokens = _flatten_tokens(x, tokens)
        return _whole(head)((x, weights, bias), tokens).reshape(labels.shape)
    axis, length = x.ndim - 2, x.shape[-2]
    head = head._replace(chunks=max(1, min(head.chunks, length)))
    if more := -length % head.chunks:
        tokens = tokens._replace(mask=jnp.ones_like(tokens.labels, bool) if mask is None else tokens.mask)
        x, tokens = jax.tree.map(lambda each: _pad_end(each, axis, more), (x, tokens))
    losses = _by_chunks(head)((x, weights, bias), tokens)
    return lax.slice_in_dim(losses, 0, length, axis=axis) if more else losses


@functools.cache
def _whole(head: Head) -> Callable[..., Array]:
    """The losses with the logits of all tokens at once, which the backward pass reads again."""

    def forward(primals: Any, tokens: Tokens) -> tuple[Array, Any]:
        logits = _logits(head, _pad_columns(head, primals))
        losses, rows = cross_entropy_rows(logits, *tokens, head.loss)
        return losses, (logits, rows)

    def backward(residuals: Any, primals: Any, tokens: Tokens, grad: Array) -> Any:
        logits, rows = residuals
        d_logits = logit_gradient(logits, *tokens, rows, grad, head.loss)
        return _trim(head, _gradients(head, d_logits, _pad_columns(head, primals), d_logits.dtype), primals)

    return with_vjp(functools.partial(_plain, head), forward, backward)


@functools.cache
def _by_chunks(head: Head) -> Callable[..., Array]:
    """The losses by chunks along the axis before the last, which `head.chunks` divides."""
    wide = head.loss.dtype
    are_gradients_known = jnp.finfo(wide).bits >= 32  # narrow sums of gradients that are not scaled yet might overflow

    def forward(primals: Any, tokens: Tokens) -> tuple[Array, Any]:
        losses, gradients = _scan_chunks(head, primals, tokens, jnp.ones_like(tokens.labels, wide))
        return losses, gradients if are_gradients_known else None

    def backward(residuals: Any, primals: Any, tokens: Tokens, grad: Array) -> Any:
        def recompute() -> Any:
            return _scan_chunks(head, primals, tokens, grad)[1]

        if not are_gradients_known:
            return _trim(head, recompute(), primals)
        d_x, *sums = residuals
        d_x = lax.convert_element_type(d_x, wide) * grad[..., None]  # 0 already where the mask is False
        common, is_common = _common_value(grad, tokens.mask)
        sums = lax.cond(is_common, lambda: jax.tree.map(lambda x: x * common, sums), lambda: list(recompute()[1:]))
        return _trim(head, (d_x, *sums), primals)

    return with_vjp(functools.partial(_plain, head), forward, backward)


def _scan_chunks(head: Head, primals: Any, tokens: Tokens, grad: Array) -> tuple[Array, Any]:
    """The losses, and the gradients of the padded primals, those of weights and bias in a wide dtype."""
    x, weights, bias = _pad_columns(head, primals)
    axis = x.ndim - 2
    size = x.shape[axis] // head.chunks

    def run(sums: Any, index: Array) -> tuple[Any, Any]:
        def cut(array: Array) -> Array:
            return lax.dynamic_slice_in_dim(array, index * size, size, axis)

        part, local, part_grad = jax.tree.map(cut, (x, tokens, grad))
        rows, local = _flatten_tokens(part, local)
        logits = _logits(head, (rows, weights, bias))
        losses, statistics = cross_entropy_rows(logits, *local, head.loss)
        d_logits = logit_gradient(logits, *local, statistics, part_grad.reshape(losses.shape), head.loss)
        d_x, *more = _gradients(head, d_logits, (rows, weights, bias), head.loss.dtype)
        return jax.tree.map(lax.add, sums, more), (losses.reshape(part_grad.shape), d_x.reshape(part.shape))

    start = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, head.loss.dtype), [weights, bias])
    sums, outputs = lax.scan(run, pcast_like(start, grad), jnp.arange(head.chunks, dtype=np.int32))
    losses, d_x = (lax.collapse(jnp.moveaxis(each, 0, axis), axis, axis + 2) for each in outputs)
    return losses, (d_x, *sums)


def _plain(head: Head, primals: Any, tokens: Tokens) -> Array:
    """The losses by their formula."""
    return plain_cross_entropy(_logits(head, primals), *tokens, head.loss)


def _logits(head: Head, primals: Any) -> Array:
    """The logits, in the dtype of x."""
    x, weights, bias = primals
    dimensions = (((x.ndim - 1,), (head.axis,)), ((), ()))
    logits = lax.dot_general(x, weights, dimensions, precision=head.precision)
    return logits if bias is None else logits + expand_last(bias, logits)


def _gradients(head: Head, d_logits: Array, primals: Any, wide: Any) -> Any:
    """The gradients of x, in its dtype, and of weights and bias, if there is one, in a wide one."""
    x, weights, bias = primals
    rows = tuple(range(x.ndim - 1))
    d_x = lax.dot_general(
        d_logits,
        weights,
        (((x.ndim - 1,), (1 - head.axis,)), ((), ())),
        precision=head.precision,
        out_sharding=_out_sharding(x, d_logits),
    )
    pair = (d_logits, x) if head.axis else (x, d_logits)
    d_weights = lax.dot_general(
        *pair,
        ((rows, rows), ((), ())),
        precision=head.precision,
        preferred_element_type=wide,
        out_sharding=_out_sharding(weights, d_logits),
    )
    d_bias = None if bias is None else reduce_sum(lax.convert_element_type(d_logits, wide), rows)
    return d_x, d_weights, d_bias


def _trim(head: Head, gradients: Any, primals: Any) -> Any:
    """The gradients without those of padding, in the dtypes of the primals."""
    (d_x, d_weights, d_bias), classes = gradients, head.loss.classes
    if classes is not None:
        d_weights = lax.slice_in_dim(d_weights, 0, classes, axis=1 - head.axis)
        d_bias = None if d_bias is None else d_bias[:classes]
    return jax.tree.map(
        lambda each, like: lax.convert_element_type(each, like.dtype), (d_x, d_weights, d_bias), primals
    )


def _pad_columns(head: Head, primals: Any) -> Any:
    """The primals with zeros for the classes that are padding."""
    if head.loss.classes is None:
        return primals
    x, weights, bias = primals
    more = -head.loss.classes % TILE
    return x, _pad_end(weights, 1 - head.axis, more), None if bias is None else _pad_end(bias, 0, more)


def _pad_end(x: Array, axis: int, more: int) -> Array:
    return jnp.pad(x, [(0, more if each == axis else 0) for each in range(x.ndim)])


def _common_value(grad: Array, mask: Array | None) -> tuple[Array, Array]:
    """The value of all elements that are not masked out, and whether it is one."""
    low = high = grad
    if mask is not None:
        low, high = (jnp.where(mask, grad, jnp.full_like(grad, value)) for value in (jnp.inf, -jnp.inf))
    return high.max(), low.min() == high.max()


def _flatten_tokens(x: Array, tokens: Tokens) -> tuple[Array, Tokens]:
    """The vectors and the tokens as rows, so that the gradient of the logits can take their place in memory.

    Not where axes but the first are or may be sharded: they would have to be gathered.
    """
    sharding = jax.typeof(x).sharding
    if x.ndim < 3 or x.size == 0 or sharding.mesh.auto_axes or any(sharding.spec[1:-1]):
        return x, tokens
    x = x.reshape(-1, x.shape[-1])
    return x, jax.tree.map(lambda each: each.reshape(x.shape[:-1]), tokens)


def _prefers_padding(classes: Any, weights: Array, bias: Array | None) -> bool:
    """Whether matrix products are faster with more classes: a GPU needs rows at a multiple of 16 bytes."""
    is_sharded = explicit_sharding(weights) is not None or (bias is not None and explicit_sharding(bias) is not None)
    return is_static(classes) and classes % ALIGNED > 0 and not is_cpu() and not is_sharded


def _shard_like_rows(each: Array, x: Array) -> Array:
    """One number of each row of `x`, on an explicit mesh sharded like the rows."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return each
    return jax.sharding.reshard(each, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1])))


def _out_sharding(like: Array, factor: Array) -> NamedSharding | None:
    """That of a product with `factor`, sharded like `like`; only an explicit mesh requires it."""
    mesh = jax.typeof(factor).sharding.mesh
    return NamedSharding(mesh, jax.typeof(like).sharding.spec) if mesh.explicit_axes else None


def _check_arguments(head: Head, x: Array, weights: Array, bias: Array | None, labels: Array) -> None:
    check_floating(head.name, x)
    check_same_dtype(head.name, x=x, **{"table" if head.axis else "kernel": weights}, bias=bias)
    if x.shape[-1] != weights.shape[head.axis]:
        raise ValueError(
            f"{head.name}: the input has the shape {x.shape} but the weights {weights.shape}; the last axis of the "
            f"input must have the size of their axis {head.axis}."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"{head.name}: the labels are {labels.dtype}, but must be integers; for probabilities, use "
            "softmax_cross_entropy of the logits."
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"{head.name}: the labels have the shape {labels.shape}, but must have {x.shape[:-1]}.")
    if type(head.chunks) is not int or head.chunks < 1:
        raise ValueError(f"{head.name}: chunks is {head.chunks!r}, but must be an integer of at least 1.")
    if head.chunks > 1 and (x.ndim < 2 or not is_static(x.shape[-2])):
        raise ValueError(
            f"{head.name}: chunks is {head.chunks}, but the input {x.shape} has no axis of known size before its last."
        )
