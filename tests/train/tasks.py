"""A small model, objective and dataset, shared by the tests of training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mlax
from mlax import nn, optim, train

MODEL = mlax.Series(
    up=nn.Linear(16, bias=False), norm=nn.BatchNorm(), tanh=mlax.F(jnp.tanh), drop=nn.Dropout(0.1), head=nn.Linear(3)
)
OPTIMIZER = optim.ClipGlobalNorm(optim.AdamW(optim.Cosine(1e-2, 200)), 1.0)


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False, model=MODEL):
    logits, non_trainables = model.fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return {"loss": losses, "accuracy": logits.argmax(-1) == batch["y"]}, non_trainables


def arrays(n=75, seed=0):
    """`n` points in five dimensions whose class is the sign pattern of two of them."""
    x = np.random.default_rng(seed).normal(size=(n, 5)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0), "id": np.arange(n, dtype=np.int32)}


def batch(size=8, seed=0):
    return jax.device_put(arrays(size, seed))


def feed(n=75, size=8, seed=0, **options):
    return train.Feed(arrays(n), batch=size, seed=seed, **options)


def init_state(step, model=MODEL, seed=0):
    init, rng = jax.random.split(jax.random.key(seed))
    return step.init(rng, *model.init(init, jax.ShapeDtypeStruct((8, 5), jnp.float32)))
