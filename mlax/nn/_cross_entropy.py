"""CrossEntropyHead: an output layer that, given labels, returns losses in place of logits."""

from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax import ops
from mlax.core import DType, Wrapper, frozen, short_repr
from mlax.dtypes import cast
from mlax.nn._embed import Embed
from mlax.nn._linear import Linear

INPUTS = ("x", "labels", "lengths")


@frozen
class CrossEntropyHead(Wrapper):
    """An output layer (head) with its cross-entropy: logits for vectors, and losses for vectors with labels.

    `layer` is a Linear, or an Embed, whose table is tied to the output layer. Called on anything but a dict, it is that
    layer, with the logits soft-capped. Called on a dict of x (..., d) and labels (...), integers, it returns the loss
    of each label, (...), by `ops.linear_cross_entropy`: faster than a loss of its logits, and with less memory. Where a
    label is negative, and in a row (b, t) from `lengths` (b,) on, an optional entry, the loss is 0.

    A loss has the dtype of x, or `accum_dtype`, which mixed precision sets to float32. Any other layer may be wrapped,
    too, and its logits are computed. Variables: those of `layer`.

    >>> layer, x = nn.CrossEntropyHead(nn.Linear(50), smoothing=0.1), jnp.ones((8, 20, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd({"x": x, "labels": jnp.zeros((8, 20), "int32")}, trainables)[0].shape
    (8, 20)
    """

    has_statistics: ClassVar[bool] = True  # the softmax

    _: KW_ONLY
    smoothing: float = 0.0  # of labels: the fraction that is spread over all classes
    z_loss: float = 0.0  # times logsumexp(logits) ** 2 is added
    softcap: float | None = None  # c maps a logit x to c * tanh(x / c)
    chunks: int = 1  # of the axis before the last; the logits of one exist at a time
    accum_dtype: DType = None  # of the sums and the losses; None: the input's

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"CrossEntropyHead: smoothing is {self.smoothing}, but must be a fraction below 1.")
        if not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"CrossEntropyHead: chunks is {self.chunks!r}, but must be an integer of at least 1.")

    def init(self, rng, x):
        return self.layer.init(rng, self._check_names(x)["x"] if isinstance(x, dict) else x)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        if not isinstance(x, dict):
            y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
            if self.softcap is not None and jnp.issubdtype(x.dtype, jnp.floating):  # integers are looked up
                y = ops.soft_cap(y, self.softcap)
            return y, new
        x, labels = self._check_names(x), x["labels"]
        options = {"smoothing": self.smoothing, "z_loss": self.z_loss, "accum_dtype": self.accum_dtype}
        options |= {"mask": self._mask(labels, x.get("lengths"))}
        fused, vectors = {**options, "softcap": self.softcap, "chunks": self.chunks}, x["x"]
        self.layer.check_variables(vectors, trainables, non_trainables)
        if isinstance(self.layer, Linear) and self.layer.activation is None:
            weights = cast(trainables, vectors.dtype)
            losses = ops.linear_cross_entropy(
                vectors, labels=labels, **weights, precision=self.layer.precision, **fused
            )
            return losses, non_trainables
        if isinstance(self.layer, Embed):
            return ops.tied_cross_entropy(vectors, trainables["table"], labels, **fused), non_trainables
        y, new = self.fwd(vectors, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return ops.softmax_cross_entropy(y, labels, **options), new

    def _check_names(self, x: dict[str, Any]) -> dict[str, Any]:
        if not {"x", "labels"} <= x.keys() <= {*INPUTS}:
            raise ValueError(
                f"{short_repr(self)}: the input has {', '.join(x)}, but must be an array, or a dict of x, labels and, "
                "if rows are padded, lengths."
            )
        return x

    def _mask(self, labels: Any, lengths: Any) -> Any:
        """Which labels count."""
        if lengths is None:
            return labels >= 0
        if labels.ndim != 2:
            raise ValueError(f"{short_repr(self)}: with lengths, labels must be (b, t), but are {labels.shape}.")
        ops.check_lengths("CrossEntropyHead", lengths, labels.shape[0], labels.shape[1], "labels")
        return (labels >= 0) & (lax.broadcasted_iota(np.int32, labels.shape, 1) < lengths[:, None].astype(np.int32))
