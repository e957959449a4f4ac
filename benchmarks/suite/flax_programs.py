"""Flax NNX: `nnx.jit` with the model and the optimizer bound by `nnx.cached_partial` and donated."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.suite.inputs import make_batch, make_weights
from benchmarks.suite.jax_device import peak_memory, wait
from benchmarks.suite.jax_programs import ADAMW, attention

__all__ = ["gpt2", "lstm", "mlp", "peak_memory", "resnet", "start", "vit", "wait"]
RNGS = nnx.Rngs(0)


def gpt2(size, dtype):
    model = GPT2(size, dtype)
    load_gpt2(model, make_weights(size))
    return training(model, make_batch(size))


def start(size, dtype):
    return training(GPT2(size, dtype), make_batch(size))


def vit(size, dtype):
    model = ViT(size, dtype)
    load_vit(model, make_weights(size))
    return training(model, make_batch(size))


def resnet(size, dtype):
    return training(ResNet(size, dtype, make_weights(size)), make_batch(size))


def mlp(size, dtype):
    layers, weights = [], make_weights(size)
    for i, (d, f) in enumerate(zip(size.widths, size.widths[1:], strict=False)):
        layer = nnx.Linear(d, f, rngs=RNGS)
        set_linear(layer, weights[f"{2 * i}.weight"].T, weights[f"{2 * i}.bias"])
        layers += [layer, nnx.relu]
    return training(nnx.Sequential(*layers[:-1]), make_batch(size))


def lstm(size, dtype):
    layers, weights = [], make_weights(size)
    for i in range(size.depth):
        cell = nnx.OptimizedLSTMCell(size.width, size.width, dtype=dtype, rngs=RNGS)
        bias = weights[f"rnn.bias_ih_l{i}"] + weights[f"rnn.bias_hh_l{i}"]
        cell.dense_i.kernel = nnx.Param(jnp.asarray(weights[f"rnn.weight_ih_l{i}"].T))
        set_linear(cell.dense_h, weights[f"rnn.weight_hh_l{i}"].T, bias)
        layers.append(nnx.RNN(cell, unroll=8))
    return training(nnx.Sequential(*layers), make_batch(size), lambda y, wanted: jnp.mean((y - wanted) ** 2))


class Block(nnx.Module):
    """A pre-norm transformer block, of GPT-2 and of ViT."""

    def __init__(self, width, heads, dtype, attend, eps, gelu):
        self.gelu = gelu
        self.norm1, self.norm2 = (nnx.LayerNorm(width, epsilon=eps, dtype=dtype, rngs=RNGS) for _ in range(2))
        self.attend = nnx.MultiHeadAttention(
            heads, width, dtype=dtype, attention_fn=attend, decode=False, deterministic=True, rngs=RNGS
        )
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=RNGS)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=RNGS)

    def __call__(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


def make_attention(dtype, causal, odd=False):
    """An `attention_fn` of nnx.MultiHeadAttention that calls the fastest kernel."""

    def attend(q, k, v, **_):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=attention(dtype, odd))

    return attend


class GPT2(nnx.Module):
    def __init__(self, size, dtype):
        self.embed = nnx.Embed(size.vocabulary, size.width, dtype=dtype, rngs=RNGS)
        self.positions = nnx.Embed(size.length, size.width, dtype=dtype, rngs=RNGS)
        attend = make_attention(dtype, causal=True)
        blocks = (Block(size.width, size.heads, dtype, attend, 1e-5, nnx.gelu) for _ in range(size.depth))
        self.blocks, self.norm = nnx.List(blocks), nnx.LayerNorm(size.width, epsilon=1e-5, dtype=dtype, rngs=RNGS)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class ViT(nnx.Module):
    def __init__(self, size, dtype):
        patch, tokens = (size.patch, size.patch), (size.image // size.patch) ** 2 + 1
        self.patches = nnx.Conv(3, size.width, patch, patch, padding="VALID", dtype=dtype, rngs=RNGS)
        self.token = nnx.Param(jnp.zeros((1, 1, size.width)))
        self.positions = nnx.Param(jnp.zeros((1, tokens, size.width)))
        attend = make_attention(dtype, causal=False, odd=tokens % 2 == 1)
        gelu = partial(nnx.gelu, approximate=False)
        blocks = (Block(size.width, size.heads, dtype, attend, 1e-6, gelu) for _ in range(size.depth))
        self.blocks, self.norm = nnx.List(blocks), nnx.LayerNorm(size.width, epsilon=1e-6, dtype=dtype, rngs=RNGS)
        self.head = nnx.Linear(size.width, size.classes, dtype=dtype, rngs=RNGS)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...].astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([token, x], axis=1) + self.positions[...].astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ResNet(nnx.Module):
    def __init__(self, size, dtype, weights):
        self.conv, self.norm = make_conv(weights, "conv1", 2, dtype), make_batch_norm(weights, "bn1", dtype)
        names = [(stage, i) for stage, depth in enumerate(size.depths, 1) for i in range(depth)]
        self.blocks = nnx.List(
            Bottleneck(weights, f"layer{stage}.{i}", 2 if stage > 1 and i == 0 else 1, dtype) for stage, i in names
        )
        kernel = weights["fc.weight"].T
        self.head = nnx.Linear(*kernel.shape, dtype=dtype, rngs=RNGS)
        set_linear(self.head, kernel, weights["fc.bias"])

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Bottleneck(nnx.Module):
    def __init__(self, weights, name, strides, dtype):
        convs = (make_conv(weights, f"{name}.conv{i}", strides if i == 2 else 1, dtype) for i in (1, 2, 3))
        self.conv1, self.conv2, self.conv3 = convs
        self.norm1, self.norm2, self.norm3 = (make_batch_norm(weights, f"{name}.bn{i}", dtype) for i in (1, 2, 3))
        self.has_shortcut = f"{name}.downsample.0.weight" in weights
        if self.has_shortcut:
            self.shortcut = make_conv(weights, f"{name}.downsample.0", strides, dtype)
            self.shortcut_norm = make_batch_norm(weights, f"{name}.downsample.1", dtype)

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (self.shortcut_norm(self.shortcut(x)) if self.has_shortcut else x))


def make_conv(weights, name, strides, dtype):
    kernel = weights[f"{name}.weight"].transpose(2, 3, 1, 0)  # OIHW as HWIO
    size, pad = kernel.shape[:2], ((kernel.shape[0] // 2,) * 2,) * 2
    layer = nnx.Conv(*kernel.shape[2:], size, strides, padding=pad, use_bias=False, dtype=dtype, rngs=RNGS)
    layer.kernel = nnx.Param(jnp.asarray(kernel))
    return layer


def make_batch_norm(weights, name, dtype):
    scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
    layer = nnx.BatchNorm(len(scale), momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=RNGS)
    layer.scale, layer.bias = nnx.Param(jnp.asarray(scale)), nnx.Param(jnp.asarray(shift))
    return layer


def set_linear(layer, kernel, bias):
    layer.kernel, layer.bias = nnx.Param(jnp.asarray(kernel)), nnx.Param(jnp.asarray(bias))


def set_norm(layer, weights, name):
    layer.scale = nnx.Param(jnp.asarray(weights[f"{name}.weight"]))
    layer.bias = nnx.Param(jnp.asarray(weights[f"{name}.bias"]))


def set_attention(layer, kernel, bias, out_kernel, out_bias):
    """From one kernel (d, 3 d) for query, key and value."""
    d, heads = kernel.shape[0], layer.num_heads
    for i, part in enumerate((layer.query, layer.key, layer.value)):
        cut = slice(i * d, (i + 1) * d)
        set_linear(part, kernel[:, cut].reshape(d, heads, -1), bias[cut].reshape(heads, -1))
    set_linear(layer.out, out_kernel.reshape(heads, -1, d), out_bias)


def load_gpt2(model, weights):
    weights = {name.removeprefix("transformer."): each for name, each in weights.items()}
    model.embed.embedding = nnx.Param(jnp.asarray(weights["wte.weight"]))
    model.positions.embedding = nnx.Param(jnp.asarray(weights["wpe.weight"]))
    for i, block in enumerate(model.blocks):
        own = {name.removeprefix(f"h.{i}."): each for name, each in weights.items()}
        set_norm(block.norm1, own, "ln_1")
        set_norm(block.norm2, own, "ln_2")
        parts = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias")
        set_attention(block.attend, *(own[part] for part in parts))
        set_linear(block.up, own["mlp.c_fc.weight"], own["mlp.c_fc.bias"])
        set_linear(block.down, own["mlp.c_proj.weight"], own["mlp.c_proj.bias"])
    set_norm(model.norm, weights, "ln_f")


def load_vit(model, weights):
    set_linear(model.patches, weights["conv_proj.weight"].transpose(2, 3, 1, 0), weights["conv_proj.bias"])
    model.token = nnx.Param(jnp.asarray(weights["class_token"]))
    model.positions = nnx.Param(jnp.asarray(weights["encoder.pos_embedding"]))
    for i, block in enumerate(model.blocks):
        prefix = f"encoder.layers.encoder_layer_{i}."
        own = {name.removeprefix(prefix): each for name, each in weights.items()}
        set_norm(block.norm1, own, "ln_1")
        set_norm(block.norm2, own, "ln_2")
        set_attention(
            block.attend,
            own["self_attention.in_proj_weight"].T,
            own["self_attention.in_proj_bias"],
            own["self_attention.out_proj.weight"].T,
            own["self_attention.out_proj.bias"],
        )
        set_linear(block.up, own["mlp.0.weight"].T, own["mlp.0.bias"])
        set_linear(block.down, own["mlp.3.weight"].T, own["mlp.3.bias"])
    set_norm(model.norm, weights, "encoder.ln")
    set_linear(model.head, weights["heads.head.weight"].T, weights["heads.head.bias"])


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def training(model, batch, loss=cross_entropy):
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)

    @partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(lambda model: loss(model(x), y))(model)
        optimizer.update(model, grads)
        return value

    return partial(nnx.cached_partial(step, model, optimizer), *map(jnp.asarray, batch))
