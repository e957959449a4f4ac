"""What goes by another name here than in PyTorch: the words for a layer that `mlax.nn` does not have."""

import difflib
import re
from collections.abc import Iterable

import jax

_EQUIVALENTS = {
    "AvgPool": "nn.MeanPool",
    "AdaptiveAvgPool": "nn.AdaptivePool, or nn.GlobalPool for one number a channel",
    "AdaptiveMaxPool": 'nn.AdaptivePool(size, by="max")',
    "Embedding": "nn.Embed",
    "functional": "mlax.ops, jax.nn or jax.numpy",
    "GRU": "mlax.Recurrent(nn.GRUCell(features))",
    "Identity": "mlax.Series() where a layer must be, or nothing at all",
    "LSTM": "mlax.Recurrent(nn.LSTMCell(features))",
    "Module": "mlax.Composite for a layer made of layers, mlax.Layer for one with weights of its own",
    "ModuleDict": "mlax.Series, or the `parts` of an mlax.Composite",
    "ModuleList": "mlax.Series, or the `parts` of an mlax.Composite",
    "Parameter": "an mlax.Layer, whose `init` makes its arrays",
    "RNN": "mlax.Recurrent(nn.RNNCell(features))",
    "Sequential": "mlax.Series",
    "Unflatten": "nn.Reshape",
    "Upsample": "mlax.F of a function that calls jax.image.resize",
}


def missing_layer_message(name: str, names: Iterable[str]) -> str:
    """The words for a name that `mlax.nn` lacks, with what there is in its place."""
    names = list(names)
    plain, axes = re.fullmatch(r"(.*?)([123]d)?", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    functions = {function.replace("_", ""): function for function in dir(jax.nn) if not function.startswith("_")}
    if axes and plain == "Dropout":
        advice = "write nn.ChannelDropout."
    elif axes and plain in names:
        advice = f"nn.{plain} takes any number of axes."
    elif plain in _EQUIVALENTS:
        advice = f"write {_EQUIVALENTS[plain]}."
    elif name.endswith("Loss"):
        advice = "a loss is a function, one of optax say, which the objective of train.step calls."
    elif name.replace("_", "").lower() in functions:
        advice = f"functions are layers by mlax.F(jax.nn.{functions[name.replace('_', '').lower()]})."
    elif close := difflib.get_close_matches(name, names, n=3, cutoff=0.7):
        advice = f"did you mean {' or '.join(close)}?"
    else:
        advice = f"it has {', '.join(names)}."
    return f"mlax.nn has no {name}; {advice}"
