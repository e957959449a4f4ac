# %% [markdown]
# # Pytrees, pure functions, and updates in place that are not
#
# JAX's transformations want functions whose results depend on their arguments alone. This page shows how to hand over a
# whole model as one argument, how to change arrays that cannot be changed, and what happens to everything that a
# function reads without being given it.

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn

# %% [markdown]
# ## Pytrees
#
# A pytree is any nesting of dicts, lists, tuples, named tuples and `None`, with arrays as its leaves. Every
# transformation takes them and gives them back. `jax.tree.map` is the one function to know.

# %%
model = mlax.Series(up=nn.Linear(4), relu=mlax.F(jax.nn.relu), head=nn.Linear(2))
trainables, non_trainables = model.init(jax.random.key(0), jnp.ones((1, 3)))
print(jax.tree.map(jnp.shape, trainables))
print(non_trainables)

# %%
slower = jax.tree.map(lambda w, g: w - 0.1 * g, trainables, trainables)  # two trees of the same form, leaf by leaf
total = jax.tree.reduce(lambda sum, w: sum + w.size, trainables, 0)
leaves, structure = jax.tree.flatten(trainables)
print(total, "numbers in", len(leaves), "leaves of", structure)

# %% [markdown]
# Leaves have addresses. mlax writes them as paths, and takes patterns over them.

# %% tags=["version"]
for path, leaf in jax.tree_util.tree_leaves_with_path(trainables):
    print(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
print("with mlax:", mlax.paths(mlax.select(trainables, "**/kernel")))

# %% [markdown]
# Three surprises, each of which has cost somebody an afternoon:
#
# - **Dicts are sorted by key.** The order in which you put things in is not the order of the leaves.
# - **`None` is an empty tree, not a leaf.** `tree.map` passes over it. That is why a layer of mlax without state has
#   `None` there: a compiled program has no argument for it.
# - **A class of your own is one leaf**, and not an array, until it is registered
#   (`jax.tree_util.register_dataclass`). Descriptions in mlax are not registered on purpose: they hold no arrays.

# %%
print(jax.tree.leaves({"b": 1, "a": 2}), jax.tree.leaves({"x": None, "y": 3}))

# %% [markdown]
# ## Updates in place that are not
#
# A JAX array cannot be changed. `.at[...]` makes a new one in which something is different.

# %%
x = jnp.zeros(5)
y = x.at[2].set(7.0).at[-1].add(1.0)
print(x, y)

# %% [markdown]
# That sounds like a copy for each element. Op by op it is. Under `jit` XLA sees that the old array is not needed any
# more, and writes into it. Donation extends this to the arguments: the caller promises not to use them again.

# %% tags=["measured"]
table = jnp.zeros((1000, 10000))  # 40 MB


def set_row(table, i):
    return table.at[i].set(1.0)


def milliseconds(call):
    return 1e3 * min(timeit.repeat(call, number=3, repeat=5)) / 3


copied = jax.jit(set_row)
in_place = jax.jit(set_row, donate_argnums=0)
copy_ms = milliseconds(lambda: copied(table, 3).block_until_ready())


def donate():
    global table
    table = in_place(table, 3).block_until_ready()


donated_ms = milliseconds(donate)
print(f"one row of 1,000: as a copy {copy_ms:.2f} ms, into the donated array {donated_ms:.2f} ms")
assert donated_ms < copy_ms / 5

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 1.9))
axes.set(xlim=(0, 10), ylim=(0, 4.2))
axes.axis("off")


def buffer(x, y, words, colour):
    axes.add_patch(plt.Rectangle((x, y), 2.2, 1.2, facecolor=colour, edgecolor="#555555"))
    axes.text(x + 1.1, y + 0.6, words, ha="center", va="center", fontsize=9)


for y, title in ((2.6, "plain: two buffers"), (0.4, "donated: one buffer")):
    axes.text(0, y + 0.6, title, va="center", weight="bold", fontsize=9)
    buffer(3, y, "state", "#BBCCEE")
    axes.annotate("", (7.1, y + 0.6), (5.3, y + 0.6), arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    axes.text(6.2, y + 0.8, "step", ha="center", fontsize=9)
buffer(7.2, 2.6, "new state", "#CCDDAA")
buffer(7.2, 0.4, "new state,\nin the same place", "#CCDDAA")
axes.plot([3, 5.2], [0.4, 1.6], color="#CC3311")

# %% [markdown]
# A donated array is gone. JAX says so when it is touched (page 8). In a training step donate the whole state: weights,
# optimizer and all, since the next step uses the new one only. `train.step` does this for you.
#
# ## Hidden arguments
#
# A traced function is read once. What it reads from outside, it reads *then*.

# %%
rate = 0.1


@jax.jit
def step(w):
    return w - rate


print(step(jnp.float32(1.0)))
rate = 100.0
print(step(jnp.float32(1.0)), "though the rate is now", rate)
print(step(jnp.ones(1)), "since a new shape traces again")

# %% [markdown]
# The second line is the trap: the program still holds 0.1. The third one is worse: a new shape, a new trace, and the
# same function now uses another rate. Nothing warns you. **Whatever may change is an argument.**
#
# Arrays from outside have a second price. They become constants of the program: they are compiled into it, and a second
# copy of them may lie in memory as long as the program lives.

# %%
weights = jnp.ones((64, 64))
as_closure = jax.make_jaxpr(lambda x: x @ weights)(jnp.ones(64))
as_argument = jax.make_jaxpr(lambda x, weights: x @ weights)(jnp.ones(64), weights)
print("constants held by the closure: ", [const.shape for const in as_closure.consts])
print("constants held by the function:", [const.shape for const in as_argument.consts])

# %% [markdown]
# A NumPy array from outside is even printed into the text of the program, number by number, for the compiler to read:

# %%
big = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
closed = jax.jit(lambda x: x + (big * x).sum()).lower(1.0)
given = jax.jit(lambda x, big: x + (big * x).sum()).lower(1.0, big)
inside, outside = len(closed.as_text()), len(given.as_text())
print(f"text of the program: {inside:,} characters with the array inside, {outside:,} without")
assert inside > 100 * outside

# %% [markdown]
# ## Effects that vanish
#
# The other direction leaks too. Whatever a function does besides returning, it does while tracing, once.

# %%
history = []


@jax.jit
def logged(x):
    history.append(x)  # a tracer, which is of no use afterwards
    return x + 1


for _ in range(3):
    logged(jnp.ones(2))
print(len(history), "entry, a", type(history[0]).__name__)

# %% [markdown]
# So state comes in as an argument and goes out as a result. A running mean, as BatchNorm keeps one, is the standard
# case; in mlax all such state is `non_trainables`:

# %%
norm = nn.BatchNorm()
x = 5 + jax.random.normal(jax.random.key(0), (256, 3))
trainables, non_trainables = norm.init(jax.random.key(1), x)
fwd = jax.jit(norm.fwd, static_argnames="inference_mode")
for _ in range(500):
    _, non_trainables = fwd(x, trainables, non_trainables)  # the new state replaces the old one
print({name: [f"{value:.1f}" for value in leaf] for name, leaf in non_trainables.items()})

# %% [markdown]
# ## What I would have wished to know
#
# - Purity is about *arrays and traced values*. Python objects that never change, such as a model description, may come
#   from anywhere: closures, globals, `self`.
# - `functools.partial(f, config)` is a fine way to fix Python values; for arrays it is a closure like any other.
# - Two leaves of one tree may be the same array. Donating such a tree fails, since one buffer cannot be given away
#   twice.
