"""Rows of Linear, Bias, Scaler and Embed."""

import numpy as np

from mlax import nn
from tests.catalogue.row import LayerRow

ROWS = {
    "Linear": LayerRow(
        lambda dtype: nn.Linear(5),
        (4, 3, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {}),
        lambda x, w: x @ w["kernel"] + w["bias"],
    ),
    "Bias": LayerRow(
        lambda dtype: nn.Bias(axes=(-3, -1)),
        (4, 3, 2, 6),
        ({"bias": (3, 1, 6)}, {}),
        lambda x, w: x + w["bias"],
    ),
    "Scaler": LayerRow(lambda dtype: nn.Scaler(), (4, 3, 6), ({"scale": (6,)}, {}), lambda x, w: x * w["scale"]),
    "Embed": LayerRow(
        lambda dtype: nn.Embed(11, 5, param_dtype=dtype),
        (4, 3),
        ({"table": (11, 5)}, {}),
        lambda x, w: np.take(w["table"], x, axis=0),
        integers=11,
    ),
}
