# %% [markdown]
# # Recompilation and static shapes
#
# Recompilation happens whenever `jit` is called with a new cache key: the tree structure of the arguments, and the
# shape and dtype of each array. This page makes recompilation visible, then prevents it.

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np

traces = []


@jax.jit
def score(x, scale=1.0):
    traces.append(f"x {jax.typeof(x)}, scale {jax.typeof(scale)}")
    return jnp.tanh(x @ jnp.ones((x.shape[-1], 64))).sum() * scale


# %% [markdown]
# Python code in the body runs only while tracing (page 2), so appending to a list counts the traces.


# %% tags=["version"]
def report(*args):
    """Call `score`, and print the traced types, or "cached" if nothing was traced."""
    before = len(traces)
    score(*args)
    print(traces[-1] if len(traces) > before else "cached")


report(jnp.ones((8, 16)), 1.0)
report(jnp.zeros((8, 16)), 0.5)  # other values
report(jnp.ones((7, 16)), 0.5)  # another shape
report(jnp.ones((8, 16), jnp.bfloat16), 0.5)  # another dtype
report(jnp.ones((8, 16)), jnp.float32(0.5))  # an array instead of a Python scalar
report(jnp.ones((8, 16)))  # an argument omitted
assert len(traces) == 5

# %% [markdown]
# The last two surprise everybody once.
#
# A Python `0.5` is *weakly typed*, printed with a `~`: it adopts the dtype of what it is combined with, whereas
# `jnp.float32(0.5)` keeps its own. The two behave differently, so they are different programs. If a learning rate is
# sometimes a Python scalar from the config and sometimes an array, the step is compiled twice.
#
# And omitting an argument is not the same as passing its default value: the default becomes a constant of the program,
# a value passed becomes one of its inputs.
#
# ## The cost of recompilation
#
# Recompilation for a smaller last batch, or for sentences of every length, makes training loops slow without raising
# any error.

# %% tags=["measured"]
lengths = np.random.default_rng(0).integers(3, 60, size=25)
kernel = jnp.ones((32, 32))


@jax.jit
def encode(x):
    for _ in range(4):
        x = jax.nn.gelu(x @ kernel)
    return x.sum()


def seconds(call):
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


unpadded = [seconds(lambda: encode(jnp.zeros((n, 32)))) for n in lengths]
encode.clear_cache()
padded = [seconds(lambda: encode(jnp.zeros((64, 32)))) for n in lengths]
print(f"25 sentences of {len(set(lengths))} lengths: {sum(unpadded):.2f} s; all padded to 64: {sum(padded):.2f} s")
assert sum(unpadded) > 3 * sum(padded)

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.8))
for name, times, marker in (("not padded", unpadded, "o"), ("padded to 64", padded, "s")):
    axes.semilogy([1e3 * each for each in times], marker, markersize=4, label=name)
axes.set(xlabel="call", ylabel="milliseconds")
axes.set_title("A new length compiles; a length seen before only runs", fontsize=10)
axes.legend(frameon=False, loc="center right")

# %% [markdown]
# ## Padding and masks
#
# Padding gives every batch the same shape. Padded rows must not count, so they come with a mask: an array of the same
# length that is True where there is data. Two rules:
#
# 1. A mean over padded data is `sum(mask * values) / sum(mask)`.
# 2. Mask bad values *before* the operation that fails on them, not after. `nan * 0` is `nan`, and a gradient flows
#    through both branches of a `where`.


# %%
def masked_mean(values, mask):
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask)


x, mask = jnp.array([1.0, 4.0, 0.0, 0.0]), jnp.array([True, True, False, False])


def after(x):  # the slope of sqrt is infinite at 0, and 0 * inf is nan
    return masked_mean(jnp.sqrt(x), mask)


def before(x):
    return masked_mean(jnp.sqrt(jnp.where(mask, x, 1.0)), mask)


print("the same value:", after(x), before(x))
print("the gradient, masked after:", jax.grad(after)(x), " masked before:", jax.grad(before)(x))

# %% [markdown]
# ## Fixed-shape batches with `train.Feed`
#
# `train.Feed` yields batches of one shape. The last batch of an epoch is padded with examples that its mask excludes.

# %%
from mlax import nn, optim, train

feed = train.Feed({"x": np.arange(10, dtype=np.float32)[:, None]}, batch=4)
for number in range(feed.steps):
    batch = feed.batch_at(number)
    print(batch["x"].ravel(), batch["mask"])

# %% [markdown]
# mlax's `train.step` averages the per-example losses with that mask, so padding has no weight. It raises an error for
# any other shape, where `jit` would silently recompile.

# %% tags=["raises-exception"]
model = nn.Linear(1)


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    y, non_trainables = model.fwd(batch["x"], trainables, non_trainables)
    return (y[:, 0] - 1) ** 2, non_trainables  # a loss for each example


step = train.step(objective, optim.SGD(0.01))
state = step.init(jax.random.key(0), *model.init(jax.random.key(1), feed.example["x"]))
for batch in feed.epoch():
    state, metrics = step(state, batch)
step(state, {"x": jnp.ones((3, 1)), "mask": jnp.ones(3, bool)})

# %% [markdown]
# ## Bucketing
#
# Bucketing pads each sequence to the smallest of a few fixed lengths that holds it, the *buckets*. Padding everything
# to the longest sentence wastes arithmetic; with buckets a step compiles once per bucket, and never again.

# %%
rng = np.random.default_rng(0)
sentences = [rng.integers(1, 100, size=n) for n in np.clip(rng.lognormal(3, 0.6, size=2000), 2, 128).astype(int)]
tokens = sum(map(len, sentences))


def entries(lengths):
    """The number of entries computed in one epoch, padding included."""
    feed = train.Buckets(sentences, lengths=lengths, batch=32, seed=0)
    return sum(feed.batch_at(step)["tokens"].size for step in range(feed.steps))


choices = [(128,), (64, 128), (16, 32, 64, 128), (8, 16, 24, 32, 48, 64, 96, 128)]
waste = [entries(lengths) / tokens for lengths in choices]
for lengths, ratio in zip(choices, waste, strict=True):
    print(f"{len(lengths)} compilations: {ratio:.2f} entries computed per token; lengths {lengths}")
assert waste == sorted(waste, reverse=True)

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 2.8))
axes.hist([len(sentence) for sentence in sentences], bins=range(0, 130, 2), color="#4477AA")
for length in choices[2]:
    axes.axvline(length, color="#EE6677")
axes.set(xlabel="sentence length", ylabel="sentences", xlim=(0, 132))
axes.set_title("Sentence lengths, and the four buckets (red)", fontsize=10)

# %% [markdown]
# Four buckets remove most of the waste. Tell the step how many compilations to expect: `train.step(objective,
# optimizer, compilations=4)`.
#
# ## Static arguments
#
# Static arguments, named in `static_argnames`, are Python values that are part of the cache key. They must be hashable,
# and each new value compiles. Right for `True` and `False`; wrong for anything that changes from step to step.

# %%
traces.clear()


@jax.jit
def dynamic_rate(x, rate):
    traces.append("rate as an array")
    return x * rate


def static_rate(x, rate):
    traces.append("rate as a static argument")
    return x * rate


for rate in (0.1, 0.2, 0.3):
    dynamic_rate(jnp.ones(3), rate)
    jax.jit(static_rate, static_argnames="rate")(jnp.ones(3), rate=rate)
print({trace: traces.count(trace) for trace in traces})

# %% [markdown]
# ## Good to know
#
# - `jax.jit(f)._cache_size()` is private; the counter in the body is enough, and `jax.config.update("jax_log_compiles",
#   True)` logs each compilation by name.
# - Do not write `jax.jit(lambda x: ...)` inside a loop. Each lambda is a new function with an empty cache.
# - Static shapes are also what lets XLA plan memory before anything runs.
