"""The layers of mlax."""

import jax
import numpy as np

import mlax
from mlax import nn

LAYERS = {
    "Linear": nn.Linear(512),
    "Linear, 3 axes": nn.Linear(512),
    "GELU MLP": nn.MLP((1024, 256)),
    "Embed": nn.Embed(8192, 256),
    "Conv": nn.Conv(64, 3, padding=1),
    "Conv, strided": nn.Conv(64, 3, strides=2, padding=1),
    "Conv, depthwise": nn.Conv(64, 3, padding=1, groups="depthwise"),
    "ConvTranspose": nn.ConvTranspose(32, 4, strides=2, padding=1),
    "MaxPool 2/2": nn.MaxPool(2),
    "MaxPool 3/2": nn.MaxPool(3, strides=2, padding=1),
    "MeanPool": nn.MeanPool(2),
    "BatchNorm": nn.BatchNorm(),
    "LayerNorm": nn.LayerNorm(),
    "RMSNorm": nn.RMSNorm(),
    "GroupNorm": nn.GroupNorm(8),
    "Dropout": nn.Dropout(0.1),
    "Attention": nn.MultiHeadAttention(8, causal=True),
    "Attention, grouped": nn.MultiHeadAttention(8, kv_heads=2, causal=True),
    "Rotary": nn.Rotary(),
    "LSTM": mlax.Recurrent(nn.LSTMCell(256), axis=0),
    "GRU": mlax.Recurrent(nn.GRUCell(256), axis=0),
    "CNN": mlax.Series(
        nn.Conv(32, 3, padding=1),
        jax.nn.relu,
        nn.MaxPool(2),
        nn.Conv(64, 3, padding=1),
        jax.nn.relu,
        nn.MaxPool(2),
        nn.Flatten(),
        nn.Linear(10),
    ),
}


def build(name: str, x: np.ndarray):
    """A pure function (weights, rest, x) to (y, rest), and its arguments."""
    layer = LAYERS[name]
    trainables, non_trainables = layer.init(jax.random.key(0), x)
    rng = jax.random.key(1) if name == "Dropout" else None

    def call(trainables, rest, x):
        y, non_trainables = layer.fwd(x, trainables, rest["state"], rng=rest["rng"])
        return y, {**rest, "state": non_trainables}

    return call, trainables, {"state": non_trainables, "rng": rng}, x
