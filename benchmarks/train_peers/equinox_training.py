"""Equinox: modules that are pytrees, written for one example and mapped over the batch, `filter_jit` with donation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from train_peers.rotary import apply_rotary

KEY = jax.random.key(0)


def linear(weights, path):
    kernel, bias = weights[f"{path}/kernel"], weights.get(f"{path}/bias")
    layer = eqx.nn.Linear(*kernel.shape, use_bias=bias is not None, key=KEY)
    layer = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(kernel.T))
    return layer if bias is None else eqx.tree_at(lambda layer: layer.bias, layer, jnp.asarray(bias))


def norm(weights, path):
    scale = weights[f"{path}/scale"]
    layer = eqx.nn.RMSNorm(scale.shape, eps=1e-6, use_bias=False)
    return eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(scale))


def conv(weights, path):
    kernel = weights[f"{path}/kernel"].transpose(0, 3, 1, 2)  # OHWI as OIHW
    layer = eqx.nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2:], padding="SAME", key=KEY)
    arrays = jnp.asarray(kernel), jnp.asarray(weights[f"{path}/bias"][:, None, None])
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, arrays)


class Block(eqx.Module):
    norm1: eqx.Module
    norm2: eqx.Module
    query: eqx.Module
    key: eqx.Module
    value: eqx.Module
    out: eqx.Module
    query_norm: eqx.Module
    key_norm: eqx.Module
    up: eqx.Module
    down: eqx.Module
    heads: int = eqx.field(static=True)

    def __init__(self, weights, heads):
        self.heads = heads
        self.norm1, self.norm2 = norm(weights, "norm1"), norm(weights, "norm2")
        self.query, self.key = linear(weights, "attend/query"), linear(weights, "attend/key")
        self.value, self.out = linear(weights, "attend/value"), linear(weights, "attend/out")
        self.query_norm, self.key_norm = norm(weights, "attend/query_norm"), norm(weights, "attend/key_norm")
        self.up, self.down = linear(weights, "think/linear_0"), linear(weights, "think/linear_1")

    def __call__(self, x):  # (t, d)
        y = jax.vmap(self.norm1)(x)
        parts = (self.query, self.key, self.value)
        q, k, v = (jax.vmap(layer)(y).reshape(len(y), self.heads, -1) for layer in parts)
        q, k = (apply_rotary(jax.vmap(jax.vmap(layer))(y)) for layer, y in ((self.query_norm, q), (self.key_norm, k)))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jax.vmap(self.out)(y.reshape(x.shape))
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.norm2(y)))))(x)


class LanguageModel(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.Module
    head: eqx.Module

    def __init__(self, weights, blocks, heads):
        self.embed = eqx.nn.Embedding(weight=jnp.asarray(weights["embed/table"]))
        self.blocks = [Block(block, heads) for block in blocks]
        self.norm, self.head = norm(weights, "norm"), linear(weights, "head")

    def __call__(self, x):  # (t,)
        x = jax.vmap(self.embed)(x)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(lambda y: self.head(self.norm(y)))(x)


def cnn(weights):
    kernel = weights["head/kernel"]
    channels_first = kernel.reshape(4, 4, -1, 10).transpose(2, 0, 1, 3).reshape(kernel.shape)
    return eqx.nn.Sequential(
        [
            eqx.nn.Lambda(lambda x: x.transpose(2, 0, 1)),
            conv(weights, "edges"),
            eqx.nn.Lambda(jax.nn.relu),
            conv(weights, "corners"),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            conv(weights, "strokes"),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            linear({**weights, "head/kernel": np.asarray(channels_first)}, "head"),
        ]
    )


def build(model, rate, decay):
    """step(x, y) -> loss."""
    optimizer = optax.adamw(rate, weight_decay=decay)

    @eqx.filter_jit(donate="all")
    def step(model, state, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    current = [model, optimizer.init(eqx.filter(model, eqx.is_array))]

    def call(x, y):
        current[0], current[1], value = step(current[0], current[1], x, y)
        return value

    return call
