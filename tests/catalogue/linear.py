"""Rows of Linear, QuantizedLinear, Bias, Scaler, PReLU, Embed and EmbedBag."""

import numpy as np

import mlax
from mlax import nn
from tests.catalogue.row import LayerRow

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
}
