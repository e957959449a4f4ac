"""The CTC loss, which Optax computes in another dtype than that of its inputs."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from mlax._jax import broadcast_like, narrow_indices, reduce_sum
from mlax.core import check_is_dtype
from mlax.ops._activations import min_value
from mlax.ops._checks import check_floating


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
    check_is_dtype("ctc_loss", accum_dtype=accum_dtype)
    check_floating("ctc_loss", logits)
    x = logits if accum_dtype is None else lax.convert_element_type(logits, accum_dtype)
    if logit_mask is not None:
        x = jnp.where(logit_mask[..., None], x, 0)  # padding has the gradient 0, even if it is NaN
    if label_mask is not None:
        labels = jnp.where(label_mask, labels, blank)
    labels = narrow_indices(labels, logits.shape[-1])
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
