"""Rows of the first layers."""

import numpy as np

from mlax import nn
from tests.catalogue.core import normed
from tests.catalogue.row import Row

ROWS = {
    "Linear": Row(
        lambda dtype: nn.Linear(5),
        (4, 3, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: x @ w["kernel"] + w["bias"],
    ),
    "Bias": Row(
        lambda dtype: nn.Bias(axes=(-3, -1)),
        (4, 3, 2, 6),
        ({"bias": (3, 1, 6)}, {}),
        lambda x, w: x + w["bias"],
    ),
    "Scaler": Row(lambda dtype: nn.Scaler(), (4, 3, 6), ({"scale": (6,)}, {}), lambda x, w: x * w["scale"]),
    "Dropout": Row(lambda dtype: nn.Dropout(0.3), (4, 6), ({}, {}), lambda x, w: x, needs_key=True),
    "LayerNorm": Row(
        lambda dtype: nn.LayerNorm(),
        (4, 3, 6),
        ({"scale": (6,), "shift": (6,)}, {}),
        lambda x, w: normed(x, w["scale"], w["shift"]),
        tolerance=3e-6,
    ),
    "Embed": Row(
        lambda dtype: nn.Embed(11, 5, param_dtype=dtype),
        (4, 3),
        ({"table": (11, 5)}, {}),
        lambda x, w: np.take(w["table"], x, axis=0),
        integers=11,
    ),
}
