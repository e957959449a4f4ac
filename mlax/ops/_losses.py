"""Losses that Optax lacks, or computes in another dtype than that of its inputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from mlax._jax import broadcast_like, reduce_mean, reduce_sum, with_jvps
from mlax.ops._activations import min_value
from mlax.ops._checks import check_floating


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
    of the logits in float32 is stored for the backward pass.
    """
    check_floating("softmax_cross_entropy", logits)
    dtype = jnp.dtype(logits.dtype if accum_dtype is None else accum_dtype)
    cross_entropy = _cross_entropy(float(smoothing), float(z_loss), dtype)
    if mask is None:
        return cross_entropy(logits, labels)
    wide_mask = mask[..., None]  # the gradient of what is masked out is 0, even if logits are NaN and labels no class
    labels = jnp.where(mask if _are_classes(labels) else wide_mask, labels, 0)
    return jnp.where(mask, cross_entropy(jnp.where(wide_mask, logits, 0), labels), 0)


def ctc_loss(
    logits: Float[Array, "b t v"],
    labels: Integer[Array, "b n"],
    *,
    logit_mask: Bool[Array, "b t"] | None = None,
    label_mask: Bool[Array, "b n"] | None = None,
    blank: int = 0,
    accum_dtype: Any = None,
) -> Float[Array, " b"]:
    """Connectionist temporal classification: minus the log probability of a label sequence, (b, t, v) to (b,).

    It is the sum over all alignments with the t logits, in which a label may be repeated and separated by blanks. The
    masks are False for padding at the end of a sequence, which may have any value. The loss of labels that have no
    alignment, since there are too few logits, is infinite, and its gradient 0: leave such examples out. In the dtype of
    the logits, or in `accum_dtype`, the result included. Narrow logits need `accum_dtype="float32"`, since the log
    probability of a long sequence is a large number. https://dl.acm.org/doi/10.1145/1143844.1143891, section 4.1.
    """
    check_floating("ctc_loss", logits)
    x = _widen(logits, jnp.dtype(logits.dtype if accum_dtype is None else accum_dtype))
    if logit_mask is not None:
        x = jnp.where(logit_mask[..., None], x, 0)  # padding has the gradient 0, even if it is NaN
    if label_mask is not None:
        labels = jnp.where(label_mask, labels, blank)
    unlikely = min_value(x.dtype) / 2  # minus infinity has no finite derivatives
    is_repeated = jnp.pad(labels[:, 1:] == labels[:, :-1], ((0, 0), (1, 0)))
    is_first = jnp.pad(jnp.zeros_like(labels[:, 1:], bool), ((0, 0), (1, 0)), constant_values=True)
    states = _between_blanks(labels, blank)  # (b, 2 n + 1)
    may_skip = _between_blanks(~(is_repeated | is_first), False)  # the blank before a label
    emitted = jnp.take_along_axis(x, states[:, None], 2) - _log_normalizer(x)[..., None]  # (b, t, 2 n + 1)
    valid_logits = jnp.ones_like(x[..., 0], bool) if logit_mask is None else logit_mask
    valid_labels = jnp.ones_like(labels, bool) if label_mask is None else label_mask

    def advance(alpha: Array, inputs: tuple[Array, Array]) -> tuple[Array, None]:
        emitted, valid = inputs
        once, twice = (jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=unlikely)[:, :-by] for by in (1, 2))
        new = _log_add_exp(alpha, once, jnp.where(may_skip, twice, unlikely)) + emitted
        return jnp.where(valid[:, None], jnp.maximum(new, unlikely), alpha), None

    is_start = lax.broadcasted_iota(np.int32, states.shape, 1) == 0  # before the first blank or label
    start = jnp.where(is_start, 0, jnp.full_like(emitted[:, 0], unlikely))
    alpha, _ = lax.scan(advance, start, (jnp.swapaxes(emitted, 0, 1), jnp.swapaxes(valid_logits, 0, 1)))
    number = _count(valid_labels)
    at_blank = jnp.take_along_axis(alpha, 2 * number[:, None], 1)[:, 0]
    at_label = jnp.take_along_axis(alpha, jnp.maximum(2 * number - 1, 0)[:, None], 1)[:, 0]
    log_probability = _log_add_exp(at_blank, jnp.where(number > 0, at_label, unlikely))
    has_alignment = _count(valid_logits) >= number + _count(valid_labels & is_repeated)
    return jnp.where(has_alignment, -log_probability, jnp.inf)


@functools.cache
def _cross_entropy(smoothing: float, z_loss: float, dtype: Any) -> Callable[[Array, Array], Array]:
    """The loss as a function of logits and labels, with derivatives from these alone: nothing else is stored."""

    def loss(logits: Array, labels: Array) -> Array:
        top, log_sum = _log_sum_exp(logits, labels, dtype)
        gap = _expected_gap(logits, top, labels)
        if smoothing:
            gap = (1 - smoothing) * gap + smoothing * reduce_mean(top - _widen(logits, dtype), (-1,))
        value = gap + _total(labels, smoothing, dtype) * log_sum
        log_normalizer = top[..., 0] + log_sum
        return value + z_loss * log_normalizer * log_normalizer if z_loss else value  # the square might overflow

    def by_logits(dot: Any, logits: Array, labels: Array) -> Array:
        top, log_sum = _log_sum_exp(logits, labels, dtype)
        x, log_sum = _widen(logits, dtype), log_sum[..., None]
        factor = _total(labels, smoothing, dtype)[..., None] + 2 * z_loss * (top + log_sum)
        target = _is_label(x, labels).astype(dtype) if _are_classes(labels) else _widen(labels, dtype)
        # the largest logit is subtracted first: with the logarithm it would be rounded to the spacing of large numbers
        softmax = lax.exp((x - broadcast_like(top, x)) - broadcast_like(log_sum, x))
        gradient = softmax * broadcast_like(factor, x) - ((1 - smoothing) * target + smoothing / x.shape[-1])
        return reduce_sum(gradient * _widen(dot, dtype), (-1,))

    def by_labels(dot: Any, logits: Array, labels: Array) -> Array:
        top, log_sum = _log_sum_exp(logits, labels, dtype)
        x = _widen(logits, dtype)
        surprise = (broadcast_like(top, x) - x) + broadcast_like(log_sum[..., None], x)
        return (1 - smoothing) * reduce_sum(surprise * _widen(dot, dtype), (-1,))

    return with_jvps(loss, by_logits, by_labels)


def _log_sum_exp(logits: Array, labels: Array, dtype: Any) -> tuple[Array, Array]:
    """The largest logit, (..., 1), and the logarithm of the sum of `exp(logits - top)`, (...).

    The label's own term, 1 where it is the largest, is left out of the sum: a small loss is not rounded to that of 1.
    """
    axis = logits.ndim - 1
    top = _widen(lax.stop_gradient(lax.expand_dims(lax.reduce_max(logits, (axis,)), (axis,))), dtype)
    x = _widen(logits, dtype)
    powers = lax.exp(x - broadcast_like(top, x))
    if not _are_classes(labels):
        return top, lax.log(reduce_sum(powers, (-1,)))
    others = reduce_sum(jnp.where(_is_label(x, labels), jnp.zeros_like(powers), powers), (-1,))
    return top, lax.log1p(others + lax.expm1(-_expected_gap(logits, top, labels)))


def _expected_gap(logits: Array, top: Array, labels: Array) -> Array:
    """The largest logit minus that of the label, (...); for probabilities, its expectation."""
    if not _are_classes(labels):
        return reduce_sum(_widen(labels, top.dtype) * (top - _widen(logits, top.dtype)), (-1,))
    index = jnp.where(labels < 0, logits.shape[-1], labels.astype(np.int32))  # a negative one would count from the end
    chosen = jnp.take_along_axis(logits, index[..., None], -1, mode="fill", fill_value=jnp.nan)
    return (top - _widen(chosen, top.dtype))[..., 0]


def _total(labels: Array, smoothing: float, dtype: Any) -> Array:
    """The sum of the probabilities of a label: 1, unless the caller's are not normalized."""
    if _are_classes(labels):
        return jnp.ones((1,) * labels.ndim, dtype)
    return (1 - smoothing) * reduce_sum(_widen(labels, dtype), (-1,)) + smoothing


def _is_label(x: Array, labels: Array) -> Array:
    return lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1) == labels[..., None].astype(np.int32)


def _are_classes(labels: Array) -> bool:
    return jnp.issubdtype(labels.dtype, jnp.integer)


def _widen(x: Any, dtype: Any) -> Array:
    return lax.convert_element_type(x, dtype)


def _log_normalizer(x: Array) -> Array:
    """`logsumexp` over the last axis."""
    top = lax.stop_gradient(lax.expand_dims(lax.reduce_max(x, (x.ndim - 1,)), (x.ndim - 1,)))
    return top[..., 0] + lax.log(reduce_sum(lax.exp(x - broadcast_like(top, x)), (-1,)))


def _log_add_exp(*arrays: Array) -> Array:
    top = lax.stop_gradient(functools.reduce(lax.max, arrays))
    return top + lax.log(functools.reduce(lax.add, [lax.exp(each - top) for each in arrays]))


def _between_blanks(labels: Array, blank: int) -> Array:
    """The labels, (b, n), with a blank before each and one at the end, (b, 2 n + 1)."""
    pairs = jnp.stack([jnp.full_like(labels, blank), labels], -1)
    return jnp.pad(pairs.reshape(labels.shape[0], -1), ((0, 0), (0, 1)), constant_values=blank)


def _count(mask: Array) -> Array:
    return jnp.sum(mask, 1, dtype=np.int32)
