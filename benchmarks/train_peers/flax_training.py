"""Flax NNX: modules that hold their weights, `nnx.Optimizer`, `nnx.jit` with donation, `nnx.cached_partial`."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from train_peers.rotary import apply_rotary


def linear(weights, path):
    kernel = weights[f"{path}/kernel"]
    layer = nnx.Linear(*kernel.shape, use_bias=f"{path}/bias" in weights, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jnp.asarray(kernel))
    if layer.bias is not None:
        layer.bias = nnx.Param(jnp.asarray(weights[f"{path}/bias"]))
    return layer


def norm(weights, path):
    scale = weights[f"{path}/scale"]
    layer = nnx.RMSNorm(*scale.shape, epsilon=1e-6, rngs=nnx.Rngs(0))
    layer.scale = nnx.Param(jnp.asarray(scale))
    return layer


def conv(weights, path):
    kernel = weights[f"{path}/kernel"].transpose(1, 2, 3, 0)  # OHWI as HWIO
    layer = nnx.Conv(*kernel.shape[2:], kernel.shape[:2], rngs=nnx.Rngs(0))
    layer.kernel, layer.bias = nnx.Param(jnp.asarray(kernel)), nnx.Param(jnp.asarray(weights[f"{path}/bias"]))
    return layer


class Block(nnx.Module):
    def __init__(self, weights, heads):
        self.heads = heads
        self.norm1, self.norm2 = norm(weights, "norm1"), norm(weights, "norm2")
        self.query, self.key = linear(weights, "attend/query"), linear(weights, "attend/key")
        self.value, self.out = linear(weights, "attend/value"), linear(weights, "attend/out")
        self.query_norm, self.key_norm = norm(weights, "attend/query_norm"), norm(weights, "attend/key_norm")
        self.up, self.down = linear(weights, "think/linear_0"), linear(weights, "think/linear_1")

    def __call__(self, x):
        y = self.norm1(x)
        q, k, v = (layer(y).reshape(*y.shape[:2], self.heads, -1) for layer in (self.query, self.key, self.value))
        q, k = apply_rotary(self.query_norm(q)), apply_rotary(self.key_norm(k))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class LanguageModel(nnx.Module):
    def __init__(self, weights, blocks, heads):
        self.embed = nnx.Embed(*weights["embed/table"].shape, rngs=nnx.Rngs(0))
        self.embed.embedding = nnx.Param(jnp.asarray(weights["embed/table"]))
        self.blocks = nnx.List([Block(block, heads) for block in blocks])
        self.norm, self.head = norm(weights, "norm"), linear(weights, "head")

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cnn(weights):
    return nnx.Sequential(
        conv(weights, "edges"),
        nnx.relu,
        conv(weights, "corners"),
        nnx.relu,
        partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2)),
        conv(weights, "strokes"),
        nnx.relu,
        lambda x: x.reshape(len(x), -1),
        linear(weights, "head"),
    )


def build(model, rate, decay):
    """step(x, y) -> loss."""
    optimizer = nnx.Optimizer(model, optax.adamw(rate, weight_decay=decay), wrt=nnx.Param)

    @partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return nnx.cached_partial(step, model, optimizer)
