# %% [markdown]
# # Shapes are the key
#
# A compiled program is found again by a key: the structure of the arguments, and the shape and dtype of each array. Any
# change of it compiles a new program. This page makes recompilation visible, then makes it stop.

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
# A line of Python in the body runs only while tracing (page 2), so a list in it is an honest counter.


# %% tags=["version"]
def told(*args):
    """Call, and say whether that traced anew."""
    before = len(traces)
    score(*args)
    print(traces[-1] if len(traces) > before else "known")


told(jnp.ones((8, 16)), 1.0)
told(jnp.zeros((8, 16)), 0.5)  # other values
told(jnp.ones((7, 16)), 0.5)  # another shape
told(jnp.ones((8, 16), jnp.bfloat16), 0.5)  # another dtype
told(jnp.ones((8, 16)), jnp.float32(0.5))  # an array where a Python number was
told(jnp.ones((8, 16)))  # an argument left out
assert len(traces) == 5

# %% [markdown]
# The last two surprise everybody once.
#
# A Python `0.5` has a *weak* type, printed with a `~`: it takes on the dtype of what it meets. `jnp.float32(0.5)`
# insists on its own. The two behave differently, so they are different programs. If a rate is sometimes a number of the
# config and sometimes an array, the step is compiled twice.
#
# And an argument that is left out is not the same as its default value given: the default becomes a constant of the
# program, the value given becomes an input of it.
#
# ## What a recompilation costs
#
# A ragged last batch, sentences of all lengths: this is how training loops become slow without any error.

# %% tags=["measured"]
lengths = np.random.default_rng(0).integers(3, 60, size=25)
kernel = jnp.ones((32, 32))


@jax.jit
def encode(x):
    for _ in range(4):
        x = jax.nn.gelu(x @ kernel)
    return x.sum()


def seconds(call):
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


as_they_come = [seconds(lambda: encode(jnp.zeros((n, 32)))) for n in lengths]
encode.clear_cache()
padded = [seconds(lambda: encode(jnp.zeros((64, 32)))) for n in lengths]
print(f"25 sentences of {len(set(lengths))} lengths: {sum(as_they_come):.2f} s; all padded to 64: {sum(padded):.2f} s")
assert sum(as_they_come) > 3 * sum(padded)

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.8))
for name, times, marker in (("lengths as they come", as_they_come, "o"), ("padded to 64", padded, "s")):
    axes.semilogy([1e3 * each for each in times], marker, markersize=4, label=name)
axes.set(xlabel="call", ylabel="milliseconds")
axes.set_title("A call with a new length compiles; one with a known length only runs", fontsize=10)
axes.legend(frameon=False, loc="center right")

# %% [markdown]
# ## Padding and masks
#
# So pad. But a padded row must not count, and the way to say so is a mask: an array of the same length that is True
# where there is data. Two rules:
#
# 1. A mean over padded data is `sum(mask * values) / sum(mask)`.
# 2. Kill bad values *before* they are made, not after. `nan * 0` is `nan`, and a gradient flows through both branches
#    of a `where`.


# %%
def masked_mean(values, mask):
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask)


x, mask = jnp.array([1.0, 4.0, 0.0, 0.0]), jnp.array([True, True, False, False])


def after(x):  # the root of 0 has an infinite slope, and 0 * inf is nan
    return masked_mean(jnp.sqrt(x), mask)


def before(x):
    return masked_mean(jnp.sqrt(jnp.where(mask, x, 1.0)), mask)


print("the same value:", after(x), before(x))
print("the gradient, masked after:", jax.grad(after)(x), " masked before:", jax.grad(before)(x))

# %% [markdown]
# ## What mlax does: `train.Feed`
#
# A `Feed` gives batches of one shape. The last one of an epoch is filled up with examples that the mask leaves out.

# %%
from mlax import nn, optim, train

feed = train.Feed({"x": np.arange(10, dtype=np.float32)[:, None]}, batch=4)
for number in range(feed.steps):
    batch = feed.batch_at(number)
    print(batch["x"].ravel(), batch["mask"])

# %% [markdown]
# A step of mlax averages the losses of the examples by that mask, so filled-up rows weigh nothing; and it refuses any
# other shape, where `jit` would compile without a word.

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
# ## Buckets
#
# Padding everything to the longest sentence wastes arithmetic. A few lengths, *buckets*, are the compromise: each
# sentence is padded to the least one that holds it. A step compiles once for each bucket, and never again.

# %%
rng = np.random.default_rng(0)
sentences = [rng.integers(1, 100, size=n) for n in np.clip(rng.lognormal(3, 0.6, size=2000), 2, 128).astype(int)]
tokens = sum(map(len, sentences))


def entries(lengths):
    """What is computed: every entry of every batch of an epoch."""
    feed = train.Buckets(sentences, lengths=lengths, batch=32, seed=0)
    return sum(feed.batch_at(step)["tokens"].size for step in range(feed.steps))


choices = [(128,), (64, 128), (16, 32, 64, 128), (8, 16, 24, 32, 48, 64, 96, 128)]
waste = [entries(lengths) / tokens for lengths in choices]
for lengths, times in zip(choices, waste, strict=True):
    print(f"{len(lengths)} compilations: {times:.2f} entries computed for each token; lengths {lengths}")
assert waste == sorted(waste, reverse=True)

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 2.8))
axes.hist([len(sentence) for sentence in sentences], bins=range(0, 130, 2), color="#4477AA")
for length in choices[2]:
    axes.axvline(length, color="#EE6677")
axes.set(xlabel="length of a sentence", ylabel="sentences", xlim=(0, 132))
axes.set_title("Sentences, and the four lengths (red) that they are padded to", fontsize=10)

# %% [markdown]
# Four buckets do most of it. Tell the step how many to expect: `train.step(objective, optimizer, compilations=4)`.
#
# ## Static arguments
#
# `static_argnames` makes a Python value part of the key. It must be hashable, and each new value compiles. Right for
# `True` and `False`; wrong for anything that changes from step to step.

# %%
traces.clear()


@jax.jit
def warm(x, rate):
    traces.append("rate as an array")
    return x * rate


def cold(x, rate):
    traces.append("rate as a static argument")
    return x * rate


for rate in (0.1, 0.2, 0.3):
    warm(jnp.ones(3), rate)
    jax.jit(cold, static_argnames="rate")(jnp.ones(3), rate=rate)
print({trace: traces.count(trace) for trace in traces})

# %% [markdown]
# ## What I would have wished to know
#
# - `jax.jit(f)._cache_size()` is private; the counter in the body is enough, and `jax.config.update("jax_log_compiles",
#   True)` logs each compilation with its name.
# - Do not write `jax.jit(lambda x: ...)` inside of a loop. Each lambda is a new function with an empty cache.
# - A fixed shape is also what the device wants: known sizes are what lets XLA plan memory before anything runs.
