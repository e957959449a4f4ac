"""The layers of Equinox, by `partition` and `combine` within `jax.jit`, the documented form with the least overhead.

They take one example, with channels first, and are mapped over the batch.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import nn


def attention(key):
    biases = dict.fromkeys(("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True)
    return nn.MultiheadAttention(8, 256, **biases, key=key)


def cnn(key):
    keys = jax.random.split(key, 3)
    return nn.Sequential(
        [
            nn.Conv2d(1, 32, 3, padding=1, key=keys[0]),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(32, 64, 3, padding=1, key=keys[1]),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2, 2),
            nn.Lambda(jnp.ravel),
            nn.Linear(7 * 7 * 64, 10, key=keys[2]),
        ]
    )


LAYERS = {
    "Linear": lambda key: nn.Linear(512, 512, key=key),
    "Linear, 3 axes": lambda key: nn.Linear(512, 512, key=key),
    "GELU MLP": lambda key: nn.MLP(256, 256, 1024, depth=1, activation=jax.nn.gelu, key=key),
    "Embed": lambda key: nn.Embedding(8192, 256, key=key),
    "Conv": lambda key: nn.Conv2d(32, 64, 3, padding=1, key=key),
    "Conv, strided": lambda key: nn.Conv2d(32, 64, 3, stride=2, padding=1, key=key),
    "Conv, depthwise": lambda key: nn.Conv2d(64, 64, 3, padding=1, groups=64, key=key),
    "ConvTranspose": lambda key: nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1, key=key),
    "MaxPool 2/2": lambda key: nn.MaxPool2d(2, 2),
    "MaxPool 3/2": lambda key: nn.MaxPool2d(3, 2, padding=1),
    "MeanPool": lambda key: nn.AvgPool2d(2, 2),
    "BatchNorm": lambda key: nn.BatchNorm(64, "batch", mode="batch"),
    "LayerNorm": lambda key: nn.LayerNorm(512),
    "RMSNorm": lambda key: nn.RMSNorm(512, use_bias=False),
    "GroupNorm": lambda key: nn.GroupNorm(8, 64),
    "Dropout": lambda key: nn.Dropout(0.1),
    "Attention": attention,
    "Rotary": lambda key: nn.RotaryPositionalEmbedding(64),
    "LSTM": lambda key: nn.LSTMCell(256, 256, key=key),
    "GRU": lambda key: nn.GRUCell(256, 256, key=key),
    "CNN": cnn,
}
EACH_TOKEN = ("Linear, 3 axes", "GELU MLP", "Embed", "LayerNorm", "RMSNorm", "Rotary")  # each head for Rotary


def build(name: str, x: np.ndarray):
    """A pure function (weights, rest, x) to (y, rest), and its arguments."""
    model, state = eqx.nn.make_with_state(LAYERS[name])(jax.random.key(0))
    weights, static = eqx.partition(model, eqx.is_inexact_array)

    def call(weights, rest, x):
        return apply(name, eqx.combine(weights, static), x, *rest)

    if name == "Rotary":
        x = x.swapaxes(1, 2)  # heads before time
    elif x.ndim == 4:
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return call, weights, (state, jax.random.key(1) if name == "Dropout" else None), x


def apply(name, model, x, state, key):
    if name == "BatchNorm":
        y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    elif name in ("LSTM", "GRU"):
        y = recurrent(model, x)
    elif name == "Attention":
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        y = jax.vmap(lambda x: model(x, x, x, mask=mask))(x)
    elif name == "Dropout":
        y = model(x, key=key)
    else:
        y = jax.vmap(jax.vmap(model) if name in EACH_TOKEN else model)(x)
    return y, (state, key)


def recurrent(cell, x):
    """A cell over the first axis, as in the example "Train an RNN"."""

    def step(carry, x):
        carry = jax.vmap(cell)(x, carry)
        return carry, carry[0] if isinstance(carry, tuple) else carry

    zeros = jnp.zeros(x.shape[1:])
    return jax.lax.scan(step, (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros, x)[1]
