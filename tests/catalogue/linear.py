"""Rows of Linear, QuantizedLinear, Bias, Scaler, PReLU, Embed, EmbedBag and CrossEntropyHead."""

import jax.numpy as jnp
import numpy as np
from jax import lax

import mlax
from mlax import nn
from tests.catalogue.row import LayerRow


def add_labels(x):
    """The input of a CrossEntropyHead: labels by column, the last of which is left out."""
    labels = lax.broadcasted_iota(np.int32, x.shape[:-1], x.ndim - 2)
    return {"x": x, "labels": jnp.where(labels == x.shape[-2] - 1, -100, labels)}


def cross_entropy(x, kernel, bias):
    """With smoothing 0.1, z-loss 0.01 and a soft cap of 2."""
    logits = 2 * np.tanh((x @ kernel + bias) / 2)
    log_sum = np.log(np.exp(logits).sum(-1))
    targets = 0.9 * np.eye(x.shape[-2], logits.shape[-1]) + 0.1 / logits.shape[-1]
    losses = log_sum - (targets * logits).sum(-1) + 0.01 * log_sum**2
    return np.where(np.arange(x.shape[-2]) == x.shape[-2] - 1, 0, losses)


LOSS = {"smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}

ROWS = {
    "Linear": LayerRow(
        lambda dtype: nn.Linear(5),
        (4, 3, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: x @ w["kernel"] + w["bias"],
    ),
    "QuantizedLinear": LayerRow(
        lambda dtype: nn.QuantizedLinear(nn.Linear(5), "int8"),
        (4, 3, 6),
        ({"kernel": (6, 5), "scale": (5,), "bias": (5,)}, {}),
        lambda x, w: x @ (w["kernel"] * w["scale"]) + w["bias"],
        quantized="int8",
    ),
    "Bias": LayerRow(
        lambda dtype: nn.Bias(axes=(-3, -1)),
        (4, 3, 2, 6),
        ({"bias": (3, 1, 6)}, {}),
        lambda x, w: x + w["bias"],
    ),
    "Scaler": LayerRow(lambda dtype: nn.Scaler(), (4, 3, 6), ({"scale": (6,)}, {}), lambda x, w: x * w["scale"]),
    "PReLU": LayerRow(
        lambda dtype: nn.PReLU(),
        (4, 3, 6),
        ({"slope": ()}, {}),
        lambda x, w: np.where(x > 0, x, w["slope"] * x),
    ),
    "PReLU channels": LayerRow(
        lambda dtype: nn.PReLU(axes=(-2,), slope_init=mlax.Normal(1.0)),
        (4, 3, 6),
        ({"slope": (3, 1)}, {}),
        lambda x, w: np.where(x > 0, x, w["slope"] * x),
        variant=True,
    ),
    "Embed": LayerRow(
        lambda dtype: nn.Embed(11, 5, param_dtype=dtype),
        (4, 3),
        ({"table": (11, 5)}, {}),
        lambda x, w: np.take(w["table"], x, axis=0),
        integers=11,
    ),
    "Embed padded": LayerRow(
        lambda dtype: nn.Embed(11, 5, padding=2, param_dtype=dtype),
        (4, 3),
        ({"table": (11, 5)}, {}),
        lambda x, w: np.take(w["table"], x, axis=0),
        integers=11,
        no_second_derivatives="the row of the padding has no gradient",
        variant=True,
    ),
    "EmbedBag": LayerRow(
        lambda dtype: nn.EmbedBag(11, 5, table_init=mlax.Normal(1.0), param_dtype=dtype),
        (4, 3, 6),
        ({"table": (11, 5)}, {}),
        lambda x, w: np.take(w["table"], x, axis=0).mean(-2),
        integers=11,
    ),
    "EmbedBag max": LayerRow(
        lambda dtype: nn.EmbedBag(11, 5, by="max", padding=2, table_init=mlax.Normal(1.0), param_dtype=dtype),
        (4, 3, 6),
        ({"table": (11, 5)}, {}),
        lambda x, w: np.where((x == 2)[..., None], -np.inf, np.take(w["table"], x, axis=0)).max(-2),
        integers=11,
        variant=True,
    ),
    "CrossEntropyHead": LayerRow(
        lambda dtype: nn.CrossEntropyHead(nn.Linear(5), softcap=2.0),
        (4, 3, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: 2 * np.tanh((x @ w["kernel"] + w["bias"]) / 2),
    ),
    "Series losses": LayerRow(
        lambda dtype: mlax.Series(labels=add_labels, head=nn.CrossEntropyHead(nn.Linear(5), **LOSS)),
        (4, 3, 6),
        ({"head/kernel": (6, 5), "head/bias": (5,)}, {}),
        lambda x, w: cross_entropy(x, w["head/kernel"], w["head/bias"]),
        tolerance=2e-6,
        variant=True,
    ),
    "Series losses by chunks": LayerRow(
        lambda dtype: mlax.Series(
            labels=add_labels, head=nn.CrossEntropyHead(nn.Embed(5, 6, param_dtype=dtype), chunks=2, **LOSS)
        ),
        (4, 3, 6),
        ({"head/table": (5, 6)}, {}),
        lambda x, w: cross_entropy(x, w["head/table"].T, 0),
        tolerance=2e-6,
        variant=True,
    ),
}
