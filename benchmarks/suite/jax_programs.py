"""Plain JAX and Optax: functions of a dict of weights, as a careful user writes them without a library of layers."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from benchmarks.suite import B1, B2, DECAY, EPS, RATE
from benchmarks.suite.inputs import make_batch, make_decoder_weights, make_prompts, make_weights
from benchmarks.suite.jax_device import peak_memory, wait

__all__ = ["adamw", "decode", "gpt2", "lstm", "mlp", "peak_memory", "start", "wait"]
ADAMW = optax.adamw(RATE, B1, B2, EPS, weight_decay=DECAY)


def attention(dtype, odd=False):
    """The `implementation` of jax.nn.dot_product_attention that is fastest; cuDNN takes no odd lengths."""
    return "cudnn" if jax.default_backend() == "gpu" and dtype == "bfloat16" and not odd else None


def gpt2(size, dtype):
    return training(partial(gpt2_loss, size=size, dtype=dtype), make_weights(size), make_batch(size))


start = gpt2  # without a library to initialize them, its weights are NumPy's


def gpt2_loss(weights, tokens, labels, *, size, dtype):
    weights = {name.removeprefix("transformer."): each.astype(dtype) for name, each in weights.items()}
    x = weights["wte.weight"][tokens] + weights["wpe.weight"]
    for i in range(size.depth):
        x = gpt2_block(x, {name.removeprefix(f"h.{i}."): each for name, each in weights.items()}, size.heads, dtype)
    logits = (layer_norm(x, weights, "ln_f") @ weights["wte.weight"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gpt2_block(x, weights, heads, dtype):
    b, t, d = x.shape
    y = linear(layer_norm(x, weights, "ln_1"), weights, "attn.c_attn")
    q, k, v = (each.reshape(b, t, heads, -1) for each in jnp.split(y, 3, axis=-1))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention(dtype))
    x = x + linear(y.reshape(b, t, d), weights, "attn.c_proj")
    y = jax.nn.gelu(linear(layer_norm(x, weights, "ln_2"), weights, "mlp.c_fc"))
    return x + linear(y, weights, "mlp.c_proj")


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def layer_norm(x, weights, name):
    wide = x.astype(jnp.float32)
    mean, var = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    y = (wide - mean) * jax.lax.rsqrt(var + 1e-5)
    return (y * weights[f"{name}.weight"] + weights[f"{name}.bias"]).astype(x.dtype)


def lstm(size, dtype):
    def loss(weights, x, wanted):
        weights, y = jax.tree.map(lambda each: each.astype(dtype), weights), x.astype(dtype)
        for i in range(size.depth):
            y = lstm_layer(y, {name.removesuffix(f"_l{i}"): each for name, each in weights.items()})
        return jnp.mean((y.astype(jnp.float32) - wanted) ** 2)

    return training(loss, make_weights(size), make_batch(size))


def lstm_layer(x, weights):
    def step(carry, gates):
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ weights["rnn.weight_hh"].T, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    gates = x.swapaxes(0, 1) @ weights["rnn.weight_ih"].T + weights["rnn.bias_ih"] + weights["rnn.bias_hh"]
    zeros = jnp.zeros((x.shape[0], gates.shape[-1] // 4), x.dtype)
    return jax.lax.scan(step, (zeros, zeros), gates, unroll=8)[1].swapaxes(0, 1)


def mlp(size, dtype):
    def loss(weights, x, labels):
        last = len(size.widths) - 2
        for i in range(last + 1):
            x = x @ weights[f"{2 * i}.weight"].T + weights[f"{2 * i}.bias"]
            x = jax.nn.relu(x) if i < last else x
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    return training(loss, make_weights(size), make_batch(size), size.steps)


def adamw(size, dtype):
    weights = jax.tree.map(jnp.asarray, make_weights(size))
    state, grads = ADAMW.init(weights), jax.tree.map(lambda each: each * 0.1, weights)

    @partial(jax.jit, donate_argnums=(1, 2))
    def update(grads, state, weights):
        updates, state = ADAMW.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    def call():
        nonlocal weights, state
        weights, state = update(grads, state, weights)
        return weights["transformer.ln_f.bias"][0]

    return call


def training(loss, weights, batch, steps=1):
    """A call of the training step, or of a scan over several."""

    def step(state, batch):
        weights, slots = state
        value, grads = jax.value_and_grad(loss)(weights, *batch)
        updates, slots = ADAMW.update(grads, slots, weights)
        return (optax.apply_updates(weights, updates), slots), value

    run = jax.jit(partial(jax.lax.scan, step) if steps > 1 else step, donate_argnums=0)
    weights, batch = jax.tree.map(jnp.asarray, (weights, batch))
    state = weights, ADAMW.init(weights)

    def call():
        nonlocal state
        state, value = run(state, batch)
        return value

    return call


def decode(size, dtype):
    weights = {
        name.removeprefix("transformer."): jnp.asarray(each, dtype) for name, each in make_decoder_weights(size).items()
    }
    return partial(decode_greedily, weights, jnp.asarray(make_prompts(size)), size)


@partial(jax.jit, static_argnums=2)
def decode_greedily(weights, prompts, size):
    """The whole loop in one program, with a cache for each layer in the carry of a scan over the tokens."""
    b, t = prompts.shape
    slots = -(-(t + size.tokens) // 64) * 64
    empty = jnp.zeros((b, size.heads, slots, size.width // size.heads), weights["wte.weight"].dtype)

    def forward(tokens, start, caches):  # (b, t)
        places = start + jnp.arange(tokens.shape[1])
        x = weights["wte.weight"][tokens] + weights["wpe.weight"][places]
        visible, new = places[:, None] >= jnp.arange(slots), []
        for i, cache in enumerate(caches):
            block = {name.removeprefix(f"h.{i}."): each for name, each in weights.items()}
            x, cache = decode_block(x, block, cache, start, visible, size.heads)
            new.append(cache)
        x = layer_norm(x[:, -1], weights, "ln_f")
        return jnp.argmax(x @ weights["wte.weight"].T, axis=-1).astype(jnp.int32), new

    def step(carry, _):
        token, place, caches = carry
        following, caches = forward(token[:, None], place, caches)
        return (following, place + 1, caches), following

    first, caches = forward(prompts, 0, [(empty, empty)] * size.depth)
    _, others = jax.lax.scan(step, (first, jnp.int32(t), caches), length=size.tokens - 1)
    return jnp.concatenate([first[:, None], others.T], axis=1)


def decode_block(x, weights, cache, start, visible, heads):
    b, t, d = x.shape
    y = linear(layer_norm(x, weights, "ln_1"), weights, "attn.c_attn")
    q, *kv = (each.reshape(b, t, heads, -1).swapaxes(1, 2) for each in jnp.split(y, 3, axis=-1))  # (b, h, t, k)
    update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=2)
    keys, values = (update(old, new) for old, new in zip(cache, kv, strict=True))  # (b, h, s, k)
    scores = jnp.einsum("bhtk,bhsk->bhts", q, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(x.dtype)
    y = jnp.einsum("bhts,bhsk->bthk", shares, values).reshape(b, t, d)
    x = x + linear(y, weights, "attn.c_proj")
    y = jax.nn.gelu(linear(layer_norm(x, weights, "ln_2"), weights, "mlp.c_fc"))
    return x + linear(y, weights, "mlp.c_proj"), (keys, values)
