"""Equinox: modules for one example, mapped over the batch; `eqx.filter_jit` that donates all."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.suite.inputs import make_batch, make_weights
from benchmarks.suite.jax_device import peak_memory, wait
from benchmarks.suite.jax_programs import ADAMW, attention

__all__ = ["gpt2", "mlp", "peak_memory", "start", "wait"]
KEY = jax.random.key(0)


def gpt2(size, dtype):
    weights = {name.removeprefix("transformer."): each for name, each in make_weights(size).items()}
    return training(load_gpt2(GPT2(size, dtype), weights), make_batch(size), dtype)


def start(size, dtype):
    return training(GPT2(size, dtype), make_batch(size), dtype)


def mlp(size, dtype):
    first, hidden, *_, last = size.widths
    model, weights = eqx.nn.MLP(first, last, hidden, len(size.widths) - 2, key=KEY), make_weights(size)
    for i in range(len(size.widths) - 1):
        model = set_arrays(model, lambda model, i=i: model.layers[i], weights, f"{2 * i}")
    return training(model, make_batch(size), "float32")


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)
    kernel: str | None = eqx.field(static=True)  # of the attention

    def __init__(self, width, heads, dtype):
        self.heads, self.kernel = heads, attention(dtype)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv, self.out = eqx.nn.Linear(width, 3 * width, key=KEY), eqx.nn.Linear(width, width, key=KEY)
        self.up, self.down = eqx.nn.Linear(width, 4 * width, key=KEY), eqx.nn.Linear(4 * width, width, key=KEY)

    def __call__(self, x):  # (t, d)
        y = jax.vmap(self.qkv)(jax.vmap(self.norm1)(x))
        q, k, v = (each.reshape(len(x), self.heads, -1) for each in jnp.split(y, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.kernel)
        x = x + jax.vmap(self.out)(y.reshape(x.shape))
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.norm2(y)))))(x)


class GPT2(eqx.Module):
    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, size, dtype):
        self.embed = eqx.nn.Embedding(size.vocabulary, size.width, key=KEY)
        self.positions = eqx.nn.Embedding(size.length, size.width, key=KEY)
        self.blocks = [Block(size.width, size.heads, dtype) for _ in range(size.depth)]
        self.norm = eqx.nn.LayerNorm(size.width)

    def __call__(self, tokens):  # (t,)
        x = jax.vmap(self.embed)(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x) @ self.embed.weight.T


def load_gpt2(model, weights):
    tables = [jnp.asarray(weights[name]) for name in ("wte.weight", "wpe.weight")]
    model = eqx.tree_at(lambda model: (model.embed.weight, model.positions.weight), model, tables)
    linears = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    for i in range(len(model.blocks)):
        for name, field in {"ln_1": "norm1", "ln_2": "norm2", **linears}.items():
            own = {f"{name}.bias": weights[f"h.{i}.{name}.bias"], f"{name}.weight": weights[f"h.{i}.{name}.weight"].T}
            model = set_arrays(model, lambda model, i=i, field=field: getattr(model.blocks[i], field), own, name)
    return set_arrays(model, lambda model: model.norm, weights, "ln_f")


def set_arrays(model, layer, weights, name):
    arrays = jnp.asarray(weights[f"{name}.weight"]), jnp.asarray(weights[f"{name}.bias"])
    return eqx.tree_at(lambda model: (layer(model).weight, layer(model).bias), model, arrays)


def training(model, batch, dtype):
    @eqx.filter_jit(donate="all-except-first")  # the batch comes again
    def step(batch, model, slots):
        def loss(model):
            model = jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, model)
            logits = jax.vmap(model)(batch[0]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, slots = ADAMW.update(grads, slots, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), slots, value

    batch, slots = tuple(map(jnp.asarray, batch)), ADAMW.init(eqx.filter(model, eqx.is_array))

    def call():
        nonlocal model, slots
        model, slots, value = step(batch, model, slots)
        return value

    return call
