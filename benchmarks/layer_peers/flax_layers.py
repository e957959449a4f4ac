"""The layers of Flax NNX, by `nnx.split` and `nnx.merge` within `jax.jit`, the faster of the documented forms."""

from functools import partial

import numpy as np
from flax import nnx


def attention(rngs, kv_heads=None):
    return nnx.MultiHeadAttention(8, 256, num_kv_heads=kv_heads, decode=False, rngs=rngs)


def cnn(rngs):
    pool = partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
    return nnx.Sequential(
        nnx.Conv(1, 32, (3, 3), padding=1, rngs=rngs),
        nnx.relu,
        pool,
        nnx.Conv(32, 64, (3, 3), padding=1, rngs=rngs),
        nnx.relu,
        pool,
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Linear(7 * 7 * 64, 10, rngs=rngs),
    )


LAYERS = {
    "Linear": lambda rngs: nnx.Linear(512, 512, rngs=rngs),
    "Linear, 3 axes": lambda rngs: nnx.Linear(512, 512, rngs=rngs),
    "GELU MLP": lambda rngs: nnx.Sequential(
        nnx.Linear(256, 1024, rngs=rngs), nnx.gelu, nnx.Linear(1024, 256, rngs=rngs)
    ),
    "Embed": lambda rngs: nnx.Embed(8192, 256, rngs=rngs),
    "Conv": lambda rngs: nnx.Conv(32, 64, (3, 3), padding=1, rngs=rngs),
    "Conv, strided": lambda rngs: nnx.Conv(32, 64, (3, 3), strides=2, padding=1, rngs=rngs),
    "Conv, depthwise": lambda rngs: nnx.Conv(64, 64, (3, 3), padding=1, feature_group_count=64, rngs=rngs),
    "ConvTranspose": lambda rngs: nnx.ConvTranspose(64, 32, (4, 4), strides=2, rngs=rngs),
    "MaxPool 2/2": lambda rngs: nnx.Sequential(partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))),
    "MaxPool 3/2": lambda rngs: nnx.Sequential(
        partial(nnx.max_pool, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
    ),
    "MeanPool": lambda rngs: nnx.Sequential(partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))),
    "BatchNorm": lambda rngs: nnx.BatchNorm(64, rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(512, rngs=rngs),
    "RMSNorm": lambda rngs: nnx.RMSNorm(512, rngs=rngs),
    "GroupNorm": lambda rngs: nnx.GroupNorm(64, 8, rngs=rngs),
    "Dropout": lambda rngs: nnx.Dropout(0.1, rngs=rngs),
    "Attention": attention,
    "Attention, grouped": partial(attention, kv_heads=2),
    "Rotary": lambda rngs: nnx.RoPE(embedding_size=64, max_seq_len=512),
    "LSTM": lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(256, 256, rngs=rngs), time_major=True),
    "GRU": lambda rngs: nnx.RNN(nnx.GRUCell(256, 256, rngs=rngs), time_major=True),
    "CNN": cnn,
}
if not hasattr(nnx, "RoPE"):  # some versions do not have it
    del LAYERS["Rotary"]


def build(name: str, x: np.ndarray):
    """A pure function (weights, rest, x) to (y, rest), and its arguments."""
    graph, weights, rest = nnx.split(LAYERS[name](nnx.Rngs(0)), nnx.Param, ...)

    def call(weights, rest, x):
        model = nnx.merge(graph, weights, rest, copy=True)
        y = model(x, mask=nnx.make_causal_mask(x[..., 0])) if name.startswith("Attention") else model(x)
        return y, nnx.split(model, nnx.Param, ...)[2]

    return call, weights, rest, x.swapaxes(1, 2) if name == "Rotary" else x  # heads before time
