"""PyTorch's names and their equivalents here, for the error about a layer that `mlax.nn` does not have."""

import difflib
import re
from collections.abc import Iterable

import jax

_LOSSES = {
    "BCEWithLogitsLoss": "optax.sigmoid_binary_cross_entropy",
    "CosineEmbeddingLoss": "optax.cosine_distance",
    "CrossEntropyLoss": "mlax.ops.softmax_cross_entropy",
    "CTCLoss": "mlax.ops.ctc_loss",
    "HuberLoss": "optax.huber_loss",
    "KLDivLoss": "optax.kl_divergence",
    "MSELoss": "optax.squared_error",
    "NLLLoss": "mlax.ops.softmax_cross_entropy of logits",
    "SmoothL1Loss": "optax.huber_loss",
    "TripletMarginLoss": "optax.losses.triplet_margin_loss",
}
_EQUIVALENTS = {
    "AvgPool": "nn.MeanPool",
    "AdaptiveAvgPool": "nn.AdaptivePool, or nn.GlobalPool for one value per channel",
    "AdaptiveMaxPool": 'nn.AdaptivePool(size, by="max")',
    "Dense": "nn.Linear",
    "Embedding": "nn.Embed",
    "EmbeddingBag": "nn.EmbedBag",
    "functional": "mlax.ops, jax.nn or jax.numpy",
    "GRU": "mlax.Recurrent(nn.GRUCell(features))",
    "Identity": "mlax.Series() where a layer is required, or nothing at all",
    "LSTM": "mlax.Recurrent(nn.LSTMCell(features))",
    "Module": "mlax.Composite for a layer made of layers, mlax.Layer for one that owns arrays",
    "ModuleDict": "mlax.Series, or a field of an mlax.Composite: a dict of layers",
    "ModuleList": "mlax.Series, or a field of an mlax.Composite: a tuple of layers",
    "Parameter": "nn.Bias or nn.Scaler, or an mlax.Layer, whose `init` makes its arrays",
    "RNN": "mlax.Recurrent(nn.RNNCell(features))",
    "Sequential": "mlax.Series",
    "Softmax": "mlax.F(mlax.ops.softmax)",
    "Unflatten": "nn.Reshape",
    "UpsamplingBilinear": 'nn.Upsample(factor, by="linear", align_corners=True)',
    "UpsamplingNearest": "nn.Upsample(factor)",
}


def missing_layer_message(name: str, names: Iterable[str]) -> str:
    """The error for a name that `mlax.nn` lacks, with what to write instead."""
    names = list(names)
    plain, rank = re.fullmatch(r"(.*?)([123]d)?", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    functions = {function.replace("_", ""): function for function in dir(jax.nn) if not function.startswith("_")}
    if rank and plain == "Dropout":
        advice = "write nn.ChannelDropout."
    elif rank and plain in names:
        advice = f"nn.{plain} takes any number of axes."
    elif plain in _EQUIVALENTS:
        advice = f"write {_EQUIVALENTS[plain]}."
    elif name.endswith("Loss"):
        advice = f"a loss is a function, {_LOSSES.get(name, 'such as one of optax')}, which the objective calls."
    elif name.replace("_", "").lower() in functions:
        advice = f"mlax.F(jax.nn.{functions[name.replace('_', '').lower()]}) makes a layer of the function."
    elif close := difflib.get_close_matches(name, names, n=3, cutoff=0.7):
        advice = f"did you mean {' or '.join(close)}?"
    else:
        advice = f"it has {', '.join(names)}."
    return f"mlax.nn has no {name}; {advice}"
