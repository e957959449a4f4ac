"""Layers for the tests, as a user would write them: one with state, a cell, a block."""

import jax
import jax.numpy as jnp

import mlax
from mlax import nn


def fwd(layer, *args, **kwargs):
    """What the layer computes, compiled, without its state."""
    return jax.jit(layer.fwd, static_argnames="inference_mode")(*args, **kwargs)[0]


def tanh(x):
    return jnp.tanh(x)


@mlax.frozen
class Count(mlax.Layer):
    """The identity, which counts its calls while training."""

    def init(self, rng, x):
        return None, {"calls": jnp.zeros((), jnp.int32)}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x, non_trainables if inference_mode else {"calls": non_trainables["calls"] + 1}


@mlax.frozen
class Cell(mlax.Cell):
    """Elman's: h' = tanh(x kernel + h recurrent + bias), and y = h'."""

    features: int

    def initial_carry(self, x):
        return jnp.zeros((*x.shape[:-1], self.features), x.dtype)

    def init(self, rng, x):
        _, x = x
        draw = mlax.lecun()
        return {
            "kernel": draw(mlax.named_key(rng, "kernel"), (x.shape[-1], self.features), x.dtype),
            "recurrent": draw(mlax.named_key(rng, "recurrent"), (self.features, self.features), x.dtype),
            "bias": jnp.zeros(self.features, x.dtype),
        }, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        h, x = x
        h = jnp.tanh(x @ trainables["kernel"] + h @ trainables["recurrent"] + trainables["bias"][None])
        return (h, h), non_trainables


@mlax.frozen
class Block(mlax.Composite):
    """A residual block with weights, keys and state."""

    width: int
    dropout: float = 0.5

    def parts(self):
        return {
            "norm": nn.LayerNorm(),
            "up": nn.Linear(2 * self.width),
            "down": nn.Linear(self.width),
            "drop": nn.Dropout(self.dropout),
            "count": Count(),
        }

    def wire(self, sub, x):
        return x + sub.count(sub.drop(sub.down(jax.nn.gelu(sub.up(sub.norm(x))))))


@mlax.frozen
class Modulated(mlax.Composite):
    """A residual block of two inputs, of which the second modulates the first, scaled at random in training."""

    width: int

    def parts(self):
        return {"norm": nn.LayerNorm(), "scale": nn.Linear(self.width), "down": nn.Linear(self.width), "count": Count()}

    def wire(self, sub, x, t):
        y = sub.norm(x) * sub.scale(t)
        if not sub.inference_mode:
            y = y * (jax.random.bits(sub.rng("scale"), (), "uint8") % 4 + 1).astype(y.dtype)  # the same in every dtype
        return x + sub.count(sub.down(y))
