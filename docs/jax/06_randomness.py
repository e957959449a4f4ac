# %% [markdown]
# # Randomness
#
# Randomness in JAX comes from explicit *keys*. NumPy's generator has a hidden state that every call advances; a traced
# function has no hidden state, so JAX takes the key as an argument. The same key always gives the same values, on every
# device.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn

key = jax.random.key(0)
print(jax.random.normal(key, (3,)))
print(jax.random.normal(key, (3,)), "the same values again")

# %% [markdown]
# **So use each key only once.** Key reuse is the most common mistake with JAX's random numbers, and by default nothing
# warns you: noise and dropout sampled with the same key are not independent.

# %%
a, b = jax.random.normal(key, (1000,)), jax.random.normal(key, (1000,))
left, right = jax.random.split(key)
c, d = jax.random.normal(left, (1000,)), jax.random.normal(right, (1000,))
print(f"correlation with one key: {jnp.corrcoef(a, b)[0, 1]:.2f}; with two: {jnp.corrcoef(c, d)[0, 1]:.2f}")

# %% [markdown]
# `jax.debug_key_reuse(True)` turns reuse into an error. It is meant for debugging, not for every run:

# %% tags=["raises-exception", "version"]
with jax.debug_key_reuse(True):  # or jax.config.update("jax_debug_key_reuse", True)
    fresh = jax.random.key(1)
    jax.random.normal(fresh, (3,))
    jax.random.uniform(fresh, (3,))

# %% [markdown]
# ## `split` and `fold_in`
#
# `split(key, n)` returns n new keys. `fold_in(key, i)` returns the key for the integer i. Both are pure functions;
# neither changes `key`.
#
# With the usual chain, `key, subkey = split(key)`, each key depends on how many splits came before it. With `fold_in`
# it does not: the key for step 1000 takes one call and no carried state, which is what you want after a restart.

# %%
chain = key
for _ in range(1000):
    chain, _ = jax.random.split(chain)  # a thousand calls to get to step 1000
step_key = jax.random.fold_in(key, 1000)  # or one
print(jax.random.key_data(step_key), "is the key for step 1000, a function of the seed and the step alone")

# %% [markdown]
# mlax's `train.step` does this: its state contains one key that never changes, and step n uses `fold_in(state.rng, n)`.
# A run that was killed at step 700 continues with exactly the keys that it would have used.
#
# ## Named keys
#
# Named keys make the initial weights of a layer depend on its name instead of its position. With `split(key, n)` they
# depend on the position, and on n:

# %%
three = jax.random.split(key, 3)
four = jax.random.split(key, 4)
print("the first of three keys equals the first of four:", bool((three[0] == four[0]).all()))


def by_position(names):
    """One key per name, in order: the usual way."""
    return dict(zip(names, jax.random.split(key, len(names)), strict=True))


before, after = by_position(["embed", "up", "head"]), by_position(["embed", "norm", "up", "head"])
print("unchanged, by position:", [name for name in before if (before[name] == after[name]).all()])

# %% [markdown]
# The first key is unchanged only because the current generator fills its counters in order; JAX does not promise it.
# The others change: insert one layer, and every layer after it gets different initial weights. Two runs that should
# differ in one layer differ in all of them.
#
# mlax derives the key of each part from its *name*:

# %%
by_name = {name: mlax.named_key(key, name) for name in ("embed", "norm", "up", "head")}
assert (by_name["up"] == mlax.named_key(key, "up")).all()  # regardless of the other parts

x = jnp.ones((2, 8))
small = mlax.Series(up=nn.Linear(16), head=nn.Linear(4))
large = mlax.Series(up=nn.Linear(16), norm=nn.LayerNorm(), gelu=jax.nn.gelu, head=nn.Linear(4))
one, _ = small.init(key, x)
two, _ = large.init(key, x)
same = [path for path in mlax.paths(one) if (mlax.get(one, path) == mlax.get(two, path)).all()]
print("equal weights in both models:", same)

# %% [markdown]
# ## Keys under jit, vmap and scan
#
# Keys are arrays with their own dtype. A key can be an argument, be mapped over, or be part of a carry.

# %%
keys = jax.random.split(key, 4)
print(keys.shape, keys.dtype)
print(jax.vmap(lambda key: jax.random.uniform(key))(keys))

# %% [markdown]
# A key that is *not* an argument of a jitted function is a compile-time constant. The first dropout below drops the
# same elements on every call:


# %%
@jax.jit
def constant_mask(x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)  # `key` is captured from outside


@jax.jit
def fresh_mask(x, key):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


for step in range(3):
    masked = fresh_mask(jnp.ones(8), jax.random.fold_in(key, step))
    print("captured key:", constant_mask(jnp.ones(8)).astype(int), "  key as an argument:", masked.astype(int))

# %% [markdown]
# ## Sharded random arrays
#
# A sharded random array has the same values as one generated on a single device: each element is a function of the key
# and its own index, and each device generates only its own shard. With NumPy generators each device, or process, would
# need its own seed, and the values would depend on the number of devices.

# %%
# With one device this is a mesh of size 1; page 11 simulates eight.
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((jax.device_count(),), ("data",))
sharded_normal = jax.jit(
    lambda key: jax.random.normal(key, (16,)), out_shardings=NamedSharding(mesh, PartitionSpec("data"))
)
np.testing.assert_array_equal(sharded_normal(key), jax.random.normal(key, (16,)))

# %% [markdown]
# For the same reason a shorter array is a prefix of a longer one:

# %%
print(jax.random.normal(key, (3,)), jax.random.normal(key, (5,))[:3])

# %% [markdown]
# Inside `shard_map` (page 11) every device runs the *same* program with the same key, so all of them generate the same
# values. For different values on each device, fold in its index: `fold_in(key, lax.axis_index("data"))`.

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.9))
axes.set(xlim=(0, 10), ylim=(0, 5))
axes.axis("off")


def chip(x, y, words, color):
    style = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "#555555"}
    axes.text(x, y, words, ha="center", va="center", fontsize=8.5, bbox=style)


def arrow(start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#777777", "shrinkA": 14, "shrinkB": 14})


chip(5, 4.6, "seed", "#DDDDDD")
chip(2.2, 3.3, "key for weights", "#BBCCEE")
chip(7.6, 3.3, "key for steps", "#CCDDAA")
for x, name in ((0.7, '"up"'), (2.2, '"norm"'), (3.7, '"head"')):
    chip(x, 1.8, name, "#BBCCEE")
    arrow((2.2, 3.3), (x, 1.8))
for x, name in ((6.1, "step 0"), (7.6, "step 1"), (9.1, "step 2")):
    chip(x, 1.8, name, "#CCDDAA")
    arrow((7.6, 3.3), (x, 1.8))
for x, name in ((6.6, '"drop1"'), (8.6, '"drop2"')):
    chip(x, 0.4, name, "#FFCCCC")
    arrow((7.6, 1.8), (x, 0.4))
arrow((5, 4.6), (2.4, 3.4))
arrow((5, 4.6), (7.4, 3.4))
axes.text(0, 0.4, "each arrow is one split or fold_in:\na tree, not a chain", fontsize=9)

# %% [markdown]
# ## Good to know
#
# - Create keys with `jax.random.key(seed)`. The older `PRNGKey` returns a plain array of two integers, which can be
#   added or averaged by mistake.
# - Organize keys as a tree, as in the figure: from the seed to a purpose, to a step, to a layer. Then adding a key
#   changes no other key.
# - In mlax a layer that needs randomness asks for it: `fwd` without `rng` is an error for a Dropout in training mode,
#   and fine with `inference_mode=True`.
