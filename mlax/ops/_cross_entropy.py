"""Cross-entropy of softmax: forward pass, backward pass and, for all other derivatives, the plain formula.

The forward pass keeps two numbers of each row, from which the backward pass computes the gradient in one pass over the
logits. Logits stay in their own dtype; what is computed from them in a wider one exists inside of these passes only.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from mlax._gpu import on_gpu, prefers_loss_kernel, softmax_gradient_kernel, softmax_statistics_kernel
from mlax._jax import broadcast_like, explicit_sharding, narrow_indices, reduce_mean, reduce_sum, with_jvps, with_vjp
from mlax.core import check_is_dtype
from mlax.ops._activations import soft_cap
from mlax.ops._checks import check_floating

FEW = 16  # classes, whose logits a GPU reads in less time than it takes to launch a kernel


class LossSpec(NamedTuple):
    """A cross-entropy but for its arrays."""

    smoothing: float
    z_loss: float
    dtype: Any  # of the sums and the result
    softcap: float | None = None  # of the logits
    classes: int | None = None  # None: all columns of the logits; those after the last class are padding


class Rows(NamedTuple):
    """What the backward pass needs of each row of logits."""

    top: Array  # (..., 1), the largest logit
    log_sum: Array  # (...), of `exp(logits - top)`


def softmax_cross_entropy(
    logits: Float[Array, "*b v"],
    labels: Integer[Array, "*b"] | Float[Array, "*b v"],
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    mask: Bool[Array, "*b"] | None = None,
    accum_dtype: Any = None,
) -> Float[Array, "*b"]:
    """The cross-entropy of softmax(logits) with labels, (..., v) to (...), in the dtype of the logits.

    Labels are classes, (...) integers, or probabilities, (..., v) in the dtype of the logits, such as those of a
    teacher. With label smoothing, a fraction `smoothing` of each label is spread over all classes. `z_loss` adds that
    multiple of `logsumexp(logits) ** 2`, which keeps the logits small. Where `mask` is False, the loss and its gradient
    are 0, whatever the logits; elsewhere, the loss of a class outside of 0 to v - 1 is NaN.

    With `accum_dtype="float32"`, all but the logits and their gradient is in float32, the result included, and no copy
    of the logits in float32 is stored for the backward pass. `ops.linear_cross_entropy` computes the logits, too.
    """
    check_is_dtype("softmax_cross_entropy", accum_dtype=accum_dtype)
    check_floating("softmax_cross_entropy", logits)
    dtype = jnp.dtype(logits.dtype if accum_dtype is None else accum_dtype)
    cross_entropy = _cross_entropy(LossSpec(float(smoothing), float(z_loss), dtype))
    if _are_classes(labels):
        return cross_entropy((logits, None), (narrow_indices(labels, logits.shape[-1]), mask))
    return cross_entropy((logits, labels), (None, mask))


@functools.cache
def _cross_entropy(spec: LossSpec) -> Callable[[Any, Any], Array]:
    """The loss as a function of (logits, probabilities or None) and of (classes or None, mask or None)."""

    def plain(primals: Any, consts: Any) -> Array:
        (logits, probabilities), (classes, mask) = primals, consts
        return plain_cross_entropy(logits, probabilities if classes is None else classes, mask, spec)

    def forward(primals: Any, consts: Any) -> tuple[Array, Rows]:
        (logits, probabilities), (classes, mask) = primals, consts
        return cross_entropy_rows(logits, probabilities if classes is None else classes, mask, spec)

    def backward(rows: Rows, primals: Any, consts: Any, grad: Array) -> tuple[Array, Array | None]:
        (logits, probabilities), (classes, mask) = primals, consts
        labels = probabilities if classes is None else classes
        by_logits = logit_gradient(logits, labels, mask, rows, grad, spec)
        return by_logits, None if probabilities is None else _label_gradient(logits, mask, rows, grad, spec)

    return with_vjp(plain, forward, backward)


def cross_entropy_rows(logits: Array, labels: Array, mask: Array | None, spec: LossSpec) -> tuple[Array, Rows]:
    """The loss of each row and what its gradient needs; not differentiable."""
    by_kernel = _prefers_kernel(logits, labels, spec)
    reduce = _max_and_sum_by_kernel if by_kernel else _max_and_sum
    value, rows = _rows(logits, labels, spec, reduce)
    return value if mask is None else jnp.where(mask, value, jnp.zeros_like(value)), rows


def _rows(logits: Array, labels: Array, spec: LossSpec, reduce: Callable[..., Any]) -> tuple[Array, Rows]:
    x = _read(logits, spec)
    top, total = reduce(logits, labels, spec)
    gap = _expected_gap(logits, top, labels, spec)
    log_sum = lax.log1p(total + lax.expm1(-gap)) if _are_classes(labels) else lax.log(total)
    if spec.smoothing:
        others = _mask_columns(top - x, spec)
        others = reduce_mean(others, (-1,)) * (x.shape[-1] / _classes(x, spec))
        gap = (1 - spec.smoothing) * gap + spec.smoothing * others
    value = gap + _total(labels, spec.smoothing, spec.dtype) * log_sum
    log_normalizer = top[..., 0] + log_sum
    value = value + spec.z_loss * log_normalizer * log_normalizer if spec.z_loss else value  # the square might overflow
    return value, Rows(top, log_sum)


def logit_gradient(logits: Array, labels: Array, mask: Array | None, rows: Rows, grad: Array, spec: LossSpec) -> Array:
    """The gradient of the logits, of that of the loss of each row, in the dtype of the logits."""
    by_xla = functools.partial(_logit_gradient, spec=spec)
    if not _prefers_kernel(logits, labels, spec):
        return by_xla(logits, labels, mask, rows, grad)
    kernel = functools.partial(_logit_gradient_by_kernel, spec=spec)
    return on_gpu(kernel, by_xla, logits, labels, mask, rows, grad)


def _logit_gradient(logits: Array, labels: Array, mask: Array | None, rows: Rows, grad: Array, spec: LossSpec) -> Array:
    x, (top, log_sum) = _read(logits, spec), rows
    log_sum = log_sum[..., None]
    factor = _total(labels, spec.smoothing, spec.dtype)[..., None]
    if spec.z_loss:
        factor = factor + 2 * spec.z_loss * (top + log_sum)
    target = _is_label(x, labels).astype(spec.dtype) if _are_classes(labels) else _widen(labels, spec.dtype)
    # the largest logit is subtracted first: with the logarithm it would be rounded to the spacing of large numbers
    softmax = lax.exp((x - top) - log_sum)
    gradient = softmax * factor - ((1 - spec.smoothing) * target + spec.smoothing / _classes(x, spec))
    if spec.softcap is not None:
        gradient = gradient * (1 - (x / spec.softcap) * (x / spec.softcap))
    gradient = _mask_columns(gradient * _widen(grad, spec.dtype)[..., None], spec)
    if mask is not None:
        gradient = jnp.where(mask[..., None], gradient, jnp.zeros_like(gradient))
    return _widen(gradient, logits.dtype)


def plain_cross_entropy(logits: Array, labels: Array, mask: Array | None, spec: LossSpec) -> Array:
    """The loss by its formula, with every derivative."""
    if spec.softcap is not None:
        logits = soft_cap(_widen(logits, spec.dtype), spec.softcap)
    cross_entropy = _differentiable_cross_entropy(spec._replace(softcap=None, classes=None))
    if mask is None:
        return cross_entropy(logits, labels)
    wide_mask = mask[..., None]  # the gradient of what is masked out is 0, even if logits are NaN and labels no class
    labels = jnp.where(mask if _are_classes(labels) else wide_mask, labels, 0)
    return jnp.where(mask, cross_entropy(jnp.where(wide_mask, logits, 0), labels), 0)


@functools.cache
def _differentiable_cross_entropy(spec: LossSpec) -> Callable[[Array, Array], Array]:
    """The loss as a function of logits and labels, with derivatives from these alone: nothing else is stored."""
    dtype, smoothing, z_loss = spec.dtype, spec.smoothing, spec.z_loss

    def loss(logits: Array, labels: Array) -> Array:
        return _rows(logits, labels, spec, _max_and_sum)[0]

    def by_logits(dot: Any, logits: Array, labels: Array) -> Array:
        _, (top, log_sum) = _rows(logits, labels, spec, _max_and_sum)
        x, log_sum = _widen(logits, dtype), log_sum[..., None]
        factor = _total(labels, smoothing, dtype)[..., None] + 2 * z_loss * (top + log_sum)
        target = _is_label(x, labels).astype(dtype) if _are_classes(labels) else _widen(labels, dtype)
        softmax = lax.exp((x - broadcast_like(top, x)) - broadcast_like(log_sum, x))
        gradient = softmax * broadcast_like(factor, x) - ((1 - smoothing) * target + smoothing / x.shape[-1])
        return reduce_sum(gradient * _widen(dot, dtype), (-1,))

    def by_labels(dot: Any, logits: Array, labels: Array) -> Array:
        _, (top, log_sum) = _rows(logits, labels, spec, _max_and_sum)
        x = _widen(logits, dtype)
        surprise = (broadcast_like(top, x) - x) + broadcast_like(log_sum[..., None], x)
        return (1 - smoothing) * reduce_sum(surprise * _widen(dot, dtype), (-1,))

    return with_jvps(loss, by_logits, by_labels)


def _prefers_kernel(logits: Array, labels: Array, spec: LossSpec) -> bool:
    has_kernel = _are_classes(labels) and spec.softcap is None
    return has_kernel and prefers_loss_kernel(logits, _classes(logits, spec), spec.dtype)


def _max_and_sum(logits: Array, labels: Array, spec: LossSpec) -> tuple[Array, Array]:
    """The largest logit, (..., 1), and the sum of `exp(logits - top)`, (...).

    The label's own term, 1 where it is the largest, is left out of the sum: a small loss is not rounded to that of 1.
    """
    x, top = _read(logits, spec), lax.reduce_max(_mask_columns(logits, spec, -jnp.inf), (logits.ndim - 1,))
    top = lax.stop_gradient(_read(top[..., None], spec))
    exponentials = _mask_columns(lax.exp(x - broadcast_like(top, x)), spec)
    if _are_classes(labels):
        exponentials = jnp.where(_is_label(x, labels), jnp.zeros_like(exponentials), exponentials)
    return top, reduce_sum(exponentials, (-1,))


def _max_and_sum_by_kernel(logits: Array, labels: Array, spec: LossSpec) -> tuple[Array, Array]:
    """As `_max_and_sum`, by a kernel."""

    def kernel(logits: Array, labels: Array) -> tuple[Array, Array]:
        rows = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).astype(np.int32)
        top, total = softmax_statistics_kernel(*rows, classes=_classes(logits, spec))
        return top.reshape(*labels.shape, 1), total.reshape(labels.shape)

    return on_gpu(kernel, functools.partial(_max_and_sum, spec=spec), logits, labels)


def _logit_gradient_by_kernel(
    logits: Array, labels: Array, mask: Array | None, rows: Rows, grad: Array, spec: LossSpec
) -> Array:
    top, log_sum = rows.top.reshape(-1), rows.log_sum.reshape(-1)
    grad = _widen(grad.reshape(-1), spec.dtype)
    classes = _classes(logits, spec)
    factors = (
        grad * (1 + 2 * spec.z_loss * (top + log_sum)),
        grad * (spec.smoothing / classes),
        grad * (1 - spec.smoothing),
    )
    is_valid = None if mask is None else mask.reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).astype(np.int32)
    return softmax_gradient_kernel(*flat, is_valid, top, log_sum, factors, classes=classes).reshape(logits.shape)


def _expected_gap(logits: Array, top: Array, labels: Array, spec: LossSpec) -> Array:
    """The largest logit minus that of the label, (...); for probabilities, its expectation."""
    if not _are_classes(labels):
        return reduce_sum(_widen(labels, top.dtype) * (top - _read(logits, spec)), (-1,))
    classes = _classes(logits, spec)
    is_none = (labels < 0) | (labels >= classes)  # a negative one would count from the end
    if jax.default_backend() == "gpu" and logits.shape[-1] <= FEW:  # XLA would not fuse a gather with the sums
        chosen = reduce_sum(jnp.where(_is_label(logits, labels), logits, jnp.zeros_like(logits)), (-1,))
        return jnp.where(is_none, jnp.nan, top[..., 0] - _read(chosen, spec))
    index = jnp.where(is_none, logits.shape[-1], labels.astype(np.int32))
    chosen = jnp.take_along_axis(logits, index[..., None], -1, mode="fill", fill_value=jnp.nan)
    return (top - _read(chosen, spec))[..., 0]


def _label_gradient(logits: Array, mask: Array | None, rows: Rows, grad: Array, spec: LossSpec) -> Array:
    """The gradient of the probabilities."""
    surprise = (rows.top - _read(logits, spec)) + rows.log_sum[..., None]
    gradient = (1 - spec.smoothing) * surprise * _widen(grad, spec.dtype)[..., None]
    if mask is not None:
        gradient = jnp.where(mask[..., None], gradient, jnp.zeros_like(gradient))
    return _widen(gradient, logits.dtype)


def _total(labels: Array, smoothing: float, dtype: Any) -> Array:
    """The sum of the probabilities of a label: 1, unless the caller's are not normalized."""
    if _are_classes(labels):
        return jnp.ones((1,) * labels.ndim, dtype)
    return (1 - smoothing) * reduce_sum(_widen(labels, dtype), (-1,)) + smoothing


def _read(logits: Array, spec: LossSpec) -> Array:
    """The logits in the dtype of the sums, after the soft cap."""
    x = _widen(logits, spec.dtype)
    return x if spec.softcap is None else soft_cap(x, spec.softcap)


def _classes(x: Array, spec: LossSpec) -> Any:
    return x.shape[-1] if spec.classes is None else spec.classes


def _is_label(x: Array, labels: Array) -> Array:
    return _columns(x) == labels[..., None].astype(np.int32)


def _mask_columns(x: Array, spec: LossSpec, value: float = 0.0) -> Array:
    """`x` with `value` in the columns that are padding."""
    if spec.classes is None:
        return x
    return jnp.where(_columns(x) < spec.classes, x, jnp.full_like(x, value))


def _columns(x: Array) -> Array:
    return lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1, out_sharding=explicit_sharding(x))


def _are_classes(labels: Array) -> bool:
    return jnp.issubdtype(labels.dtype, jnp.integer)


def _widen(x: Any, dtype: Any) -> Array:
    return lax.convert_element_type(x, dtype)
