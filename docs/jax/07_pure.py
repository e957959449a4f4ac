# %% [markdown]
# # Pytrees and pure functions
#
# Pytrees and pure functions are what JAX's transformations work on: nested containers of arrays, and functions whose
# results depend only on their arguments. This page shows how to pass a whole model as one argument, how to update
# immutable arrays, and what happens to values that a function reads from outside.

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
# transformation accepts and returns pytrees. `jax.tree.map` is the one function to know.

# %%
model = mlax.Series(up=nn.Linear(4), relu=jax.nn.relu, head=nn.Linear(2))
trainables, non_trainables = model.init(jax.random.key(0), jnp.ones((1, 3)))
print(jax.tree.map(jnp.shape, trainables))
print(non_trainables)

# %%
shifted = jax.tree.map(lambda w, g: w - 0.1 * g, trainables, trainables)  # leaf by leaf; equal structures
total = jax.tree.reduce(lambda sum, w: sum + w.size, trainables, 0)
leaves, structure = jax.tree.flatten(trainables)
print(total, "elements in", len(leaves), "leaves of", structure)

# %% [markdown]
# Every leaf has a path. mlax writes paths with slashes, and selects leaves by patterns.

# %% tags=["version"]
for path, leaf in jax.tree_util.tree_leaves_with_path(trainables):
    print(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
print("with mlax:", mlax.paths(mlax.select(trainables, "**/kernel")))

# %% [markdown]
# Three surprises, each of which has cost somebody an afternoon:
#
# - **Dicts are sorted by key.** The leaves are not in insertion order.
# - **`None` is an empty pytree, not a leaf.** `tree.map` skips it. That is why an mlax layer without state returns
#   `None`: the compiled program has no argument for it.
# - **An instance of your own class is a single leaf**, and not a valid array, until the class is registered
#   (`jax.tree_util.register_dataclass`). mlax layers are deliberately not registered: they contain no arrays.

# %%
print(jax.tree.leaves({"b": 1, "a": 2}), jax.tree.leaves({"x": None, "y": 3}))

# %% [markdown]
# ## In-place updates and buffer donation
#
# In-place updates do not exist in JAX: arrays are immutable, and `.at[...]` returns an updated copy.

# %%
x = jnp.zeros(5)
y = x.at[2].set(7.0).at[-1].add(1.0)
print(x, y)

# %% [markdown]
# That sounds like a full copy for each update, and eagerly it is. Under `jit`, XLA reuses the memory of an intermediate
# array that is not needed any more, and updates it in place. Buffer donation extends this to arguments: the caller
# promises not to use them again.

# %% tags=["measured"]
table = jnp.zeros((1000, 10000))  # 40 MB


def set_row(table, i):
    return table.at[i].set(1.0)


def milliseconds(call):
    return 1e3 * min(timeit.repeat(call, number=3, repeat=5)) / 3


copying = jax.jit(set_row)
in_place = jax.jit(set_row, donate_argnums=0)
copy_ms = milliseconds(lambda: copying(table, 3).block_until_ready())


def set_donated():
    global table
    table = in_place(table, 3).block_until_ready()


donated_ms = milliseconds(set_donated)
print(f"one row of 1,000: into a copy {copy_ms:.2f} ms, into the donated array {donated_ms:.2f} ms")
assert donated_ms < copy_ms / 5

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 1.9))
axes.set(xlim=(0, 10), ylim=(0, 4.2))
axes.axis("off")


def draw_buffer(x, y, words, color):
    axes.add_patch(plt.Rectangle((x, y), 2.2, 1.2, facecolor=color, edgecolor="#555555"))
    axes.text(x + 1.1, y + 0.6, words, ha="center", va="center", fontsize=9)


for y, title in ((2.6, "not donated: two buffers"), (0.4, "donated: one buffer")):
    axes.text(0, y + 0.6, title, va="center", weight="bold", fontsize=9)
    draw_buffer(3, y, "state", "#BBCCEE")
    axes.annotate("", (7.1, y + 0.6), (5.3, y + 0.6), arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    axes.text(6.2, y + 0.8, "step", ha="center", fontsize=9)
draw_buffer(7.2, 2.6, "new state", "#CCDDAA")
draw_buffer(7.2, 0.4, "new state,\nin the same buffer", "#CCDDAA")
axes.plot([3, 5.2], [0.4, 1.6], color="#CC3311")

# %% [markdown]
# A donated array is deleted; using it again raises an error (page 8). In a training step donate the whole state,
# weights and optimizer state, since the next step uses only the new one. `train.step` does this for you.
#
# ## Captured values (closures and globals)
#
# Values that a function captures from outside, globals or closure variables, are read while it is traced, once.

# %%
rate = 0.1


@jax.jit
def step(w):
    return w - rate


print(step(jnp.float32(1.0)))
rate = 100.0
print(step(jnp.float32(1.0)), "although the rate is now", rate)
print(step(jnp.ones(1)), "since a new shape is traced again")

# %% [markdown]
# The second line is the trap: the compiled program still contains 0.1. The third is worse: a new shape means a new
# trace, and the same function now uses another rate. Nothing warns you. **Whatever may change must be an argument.**
#
# Capturing arrays has a second cost. They become constants of the program: they are compiled into it, and may occupy
# memory a second time for as long as the program lives.

# %%
weights = jnp.ones((64, 64))
as_closure = jax.make_jaxpr(lambda x: x @ weights)(jnp.ones(64))
as_argument = jax.make_jaxpr(lambda x, weights: x @ weights)(jnp.ones(64), weights)
print("constants of the closure: ", [const.shape for const in as_closure.consts])
print("constants of the function:", [const.shape for const in as_argument.consts])

# %% [markdown]
# A captured NumPy array is even written out, element by element, in the StableHLO text that the compiler parses:

# %%
big = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
closure = jax.jit(lambda x: x + (big * x).sum()).lower(1.0)
argument = jax.jit(lambda x, big: x + (big * x).sum()).lower(1.0, big)
captured, passed = len(closure.as_text()), len(argument.as_text())
print(f"StableHLO text: {captured:,} characters with the array captured, {passed:,} with it passed as an argument")
assert captured > 100 * passed

# %% [markdown]
# ## Side effects
#
# Side effects of a jitted function happen while it is traced, once, and not when the compiled program runs.

# %%
history = []


@jax.jit
def append(x):
    history.append(x)  # a tracer, useless afterwards
    return x + 1


for _ in range(3):
    append(jnp.ones(2))
print(len(history), "entry, a", type(history[0]).__name__)

# %% [markdown]
# So state is passed in as an argument and returned as a result. The running statistics of BatchNorm are the standard
# case; in mlax all such state is in `non_trainables`:

# %%
norm = nn.BatchNorm()
x = 5 + jax.random.normal(jax.random.key(0), (256, 3))
trainables, non_trainables = norm.init(jax.random.key(1), x)
fwd = jax.jit(norm.fwd, static_argnames="inference_mode")
for _ in range(500):
    _, non_trainables = fwd(x, trainables, non_trainables)  # the new state replaces the old one
print({name: [f"{value:.1f}" for value in leaf] for name, leaf in non_trainables.items()})

# %% [markdown]
# ## Good to know
#
# - Purity concerns *arrays and traced values*. Python objects that never change, such as an mlax layer, may come from
#   anywhere: closures, globals, `self`.
# - `functools.partial(f, config)` is a fine way to bind Python values; an array bound like this is captured as in any
#   closure.
# - Two leaves of one pytree may be the same array. Donating such a tree fails, since a buffer cannot be donated twice.
