# %% [markdown]
# # Randomness
#
# NumPy keeps a hidden state and moves it along with each call. A traced function has no hidden state, so JAX asks for
# it as an argument: a *key*. The same key gives the same numbers, always, on every device.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn

key = jax.random.key(0)
print(jax.random.normal(key, (3,)))
print(jax.random.normal(key, (3,)), "the same again")

# %% [markdown]
# **So a key is used once.** To use it twice is the commonest fault with randomness in JAX, and by default nothing warns
# you: noise and dropout drawn from one key are not independent.

# %%
a, b = jax.random.normal(key, (1000,)), jax.random.normal(key, (1000,))
left, right = jax.random.split(key)
c, d = jax.random.normal(left, (1000,)), jax.random.normal(right, (1000,))
print(f"correlation with one key: {jnp.corrcoef(a, b)[0, 1]:.2f}; with two: {jnp.corrcoef(c, d)[0, 1]:.2f}")

# %% [markdown]
# `jax.debug_key_reuse(True)` makes the second use an error. It is for looking, not for every run:

# %% tags=["raises-exception", "version"]
with jax.debug_key_reuse(True):  # or jax.config.update("jax_debug_key_reuse", True)
    own = jax.random.key(1)
    jax.random.normal(own, (3,))
    jax.random.uniform(own, (3,))

# %% [markdown]
# ## Two ways to get more keys
#
# `split(key, n)` gives n new ones. `fold_in(key, number)` gives the one that belongs to a number. Both are pure
# functions of their arguments; neither changes `key`.
#
# The usual chain, `key, use = split(key)`, makes each key depend on how many were taken before it. `fold_in` does not:
# the key of step 1000 is one call away, with nothing to carry along. After a restart that is what you want.

# %%
chain = key
for _ in range(1000):
    chain, _ = jax.random.split(chain)  # a thousand calls to get to step 1000
jumped = jax.random.fold_in(key, 1000)  # or one
print(jax.random.key_data(jumped), "is the key of step 1000, from the seed and the step alone")

# %% [markdown]
# This is how mlax's `train.step` does it: the state holds one key, which never changes, and step n uses
# `fold_in(state.rng, n)`. A run that was killed at step 700 goes on with the very numbers it would have had.
#
# ## Why names
#
# Weights are drawn layer by layer. With `split(key, n)` the numbers of a layer depend on its position, and on n:

# %%
three = jax.random.split(key, 3)
four = jax.random.split(key, 4)
print("the first of three and the first of four are the same key:", bool((three[0] == four[0]).all()))


def by_position(names):
    """One key for each name, in order: the usual way."""
    return dict(zip(names, jax.random.split(key, len(names)), strict=True))


before, after = by_position(["embed", "up", "head"]), by_position(["embed", "norm", "up", "head"])
print("kept by position:", [name for name in before if (before[name] == after[name]).all()])

# %% [markdown]
# The first key survives here, since today's generator fills its counters in order; JAX does not promise it. The others
# do not survive: add one layer, and every layer after it starts from other weights. Two runs that should differ by one
# layer differ in all of them.
#
# mlax gives each part the key of its *name*:

# %%
by_name = {name: mlax.named_key(key, name) for name in ("embed", "norm", "up", "head")}
assert (by_name["up"] == mlax.named_key(key, "up")).all()  # whatever else there is

x = jnp.ones((2, 8))
small = mlax.Series(up=nn.Linear(16), head=nn.Linear(4))
large = mlax.Series(up=nn.Linear(16), norm=nn.LayerNorm(), gelu=mlax.F(jax.nn.gelu), head=nn.Linear(4))
one, _ = small.init(key, x)
two, _ = large.init(key, x)
kept = [path for path in mlax.paths(one) if (mlax.get(one, path) == mlax.get(two, path)).all()]
print("the same weights in both models:", kept)

# %% [markdown]
# ## Under jit, vmap and scan
#
# A key is an array, with a dtype of its own. It can be an argument, mapped over, or carried.

# %%
keys = jax.random.split(key, 4)
print(keys.shape, keys.dtype)
print(jax.vmap(lambda key: jax.random.uniform(key))(keys))

# %% [markdown]
# A key that is *not* an argument of a jitted function is a constant of it. This dropout drops the same elements for
# ever:


# %%
@jax.jit
def frozen_noise(x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)  # `key` comes from outside


@jax.jit
def fresh_noise(x, key):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


for step in range(3):
    here = fresh_noise(jnp.ones(8), jax.random.fold_in(key, step))
    print("key from outside:", frozen_noise(jnp.ones(8)).astype(int), "  key as an argument:", here.astype(int))

# %% [markdown]
# ## One key, many devices
#
# With a NumPy generator each device, or process, would need a seed of its own, and another number of devices would give
# other numbers. In JAX each element of a random array is a function of the key and of its own index. So an array drawn
# over eight devices holds the same numbers as one drawn on a single device, and no device draws what another one needs.

# %%
# On a machine with one device this mesh has one place; page 11 simulates eight.
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((jax.device_count(),), ("data",))
over_devices = jax.jit(
    lambda key: jax.random.normal(key, (16,)), out_shardings=NamedSharding(mesh, PartitionSpec("data"))
)
np.testing.assert_array_equal(over_devices(key), jax.random.normal(key, (16,)))

# %% [markdown]
# The same property shows in a smaller way: a shorter array is the beginning of a longer one.

# %%
print(jax.random.normal(key, (3,)), jax.random.normal(key, (5,))[:3])

# %% [markdown]
# Inside of `shard_map` (page 11) it is different: there every device runs the *same* program with the same key, and
# draws the same numbers. If each is to have its own, fold in where you are: `fold_in(key, lax.axis_index("data"))`.

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.9))
axes.set(xlim=(0, 10), ylim=(0, 5))
axes.axis("off")


def chip(x, y, words, colour):
    style = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#555555"}
    axes.text(x, y, words, ha="center", va="center", fontsize=8.5, bbox=style)


def arrow(start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#777777", "shrinkA": 14, "shrinkB": 14})


chip(5, 4.6, "seed", "#DDDDDD")
chip(2.2, 3.3, "key of the weights", "#BBCCEE")
chip(7.6, 3.3, "key of the steps", "#CCDDAA")
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
# ## What I would have wished to know
#
# - Make keys with `jax.random.key(seed)`. The older `PRNGKey` gives a bare array of two numbers, which can be added to
#   or averaged by mistake.
# - Think of keys as a tree, as in the drawing: from the seed to a purpose, to a step, to a layer. Then nothing that you
#   add moves anything else.
# - In mlax a layer that needs randomness says so: `fwd` without `rng` is an error for a Dropout that is training, and
#   is fine with `inference_mode=True`.
