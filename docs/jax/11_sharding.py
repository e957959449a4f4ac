# %% [markdown]
# # Where the pieces lie: sharding
#
# An array of JAX may lie on many devices, in pieces or in copies, and programs run where their data is. No cluster is
# needed to learn it: eight simulated devices on a CPU behave alike, only not faster.

# %%
import re

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before anything else is done with JAX

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, optim, train

print(jax.devices()[:2], "and", jax.device_count() - 2, "more")

# %% [markdown]
# ## A mesh and a spec
#
# A *mesh* arranges devices in a grid and names its axes. A *spec* says, for each axis of an array, over which axis of
# the mesh it is cut. What the spec leaves out is copied.

# %%
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
x = jnp.arange(64.0).reshape(8, 8)
cut = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
jax.debug.visualize_array_sharding(cut)
print(cut.addressable_shards[3].device, "holds")
print(cut.addressable_shards[3].data)

# %% [markdown]
# Five ways to lay out the same array. Each tile is one piece, with the numbers of the devices that hold it.

# %% tags=["drawing"]
from matplotlib import pyplot as plt


def draw(axes, spec, shape=(8, 8)):
    pieces = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        corner = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        pieces.setdefault(corner, []).append(device.id)
    colours = plt.get_cmap("Set3").colors
    for ((top, bottom), (left, right)), held in pieces.items():
        axes.add_patch(
            plt.Rectangle((left, top), right - left, bottom - top, facecolor=colours[held[0]], edgecolor="white", lw=2)
        )
        words = " ".join(map(str, held)) if len(held) < 5 else "0 1 2 3\n4 5 6 7"
        axes.text((left + right) / 2, (top + bottom) / 2, words, ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, 8), ylim=(8, 0), aspect="equal")
    axes.axis("off")
    axes.set_title(str(spec).replace("PartitionSpec", "P"), fontsize=8)


figure, panels = plt.subplots(1, 5, figsize=(7.2, 1.7))
for axes, spec in zip(
    panels, (P("data", "model"), P("data"), P(None, "model"), P(("data", "model")), P()), strict=True
):
    draw(axes, spec)

# %% [markdown]
# ## Programs follow the data
#
# Nothing has to be said about how to compute. `jit` looks where its arguments lie, splits the work the same way, and
# puts in whatever exchange is needed. The exchanges can be read off the compiled program. Here are the classic layouts
# of a product of activations and weights.


# %%
def exchanges(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", text) or ["none"]


def placed(shape, spec):
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))


for name, left, right in (
    ("batch cut, weights copied", P("data"), P()),
    ("weights cut by column", P("data"), P(None, "model")),
    ("weights cut by row", P("data", "model"), P("model")),
    ("weights cut by row, inputs not", P("data"), P("model")),
):
    a, b = placed((8, 64), left), placed((64, 32), right)
    result = jax.jit(jnp.matmul)(a, b)
    print(f"{name:31} exchange: {' '.join(exchanges(jnp.matmul, a, b)):11} result cut as {result.sharding.spec}")

# %% [markdown]
# The first is data parallelism: forward, there is nothing to exchange. By column and then by row is tensor parallelism,
# with one all-reduce at the end. The numbers are the same in all cases, up to the order of additions.
#
# ## A training step over eight devices
#
# Cut the batch, copy the weights, and the ordinary step is data parallel: the gradients are summed over the devices,
# and nobody wrote that.

# %%
model = mlax.Series(hidden=nn.Linear(64), relu=mlax.F(jax.nn.relu), head=nn.Linear(1))
rng = np.random.default_rng(0)
source = {"x": rng.normal(size=(512, 8)).astype(np.float32)}
source["y"] = np.sin(source["x"].sum(1, keepdims=True))


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    y, non_trainables = model.fwd(batch["x"], trainables, non_trainables)
    return (y - batch["y"])[:, 0] ** 2, non_trainables


w, _ = jax.device_put(model.init(jax.random.key(0), source["x"]), NamedSharding(mesh, P()))
batch = placed((64, 8), P("data"))
print("exchanges: forward", set(exchanges(lambda w, x: model.fwd(x, w)[0], w, batch)), end="; ")
print("gradient", set(exchanges(jax.grad(lambda w, x: jnp.mean(model.fwd(x, w)[0] ** 2)), w, batch)))


def losses(devices):
    """Of twenty steps over so many devices."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    feed = train.Feed(source, batch=64, seed=0, sharding=NamedSharding(mesh, P("data")))
    step = train.step(objective, optim.AdamW(1e-2))
    variables = jax.device_put(model.init(jax.random.key(0), feed.example["x"]), NamedSharding(mesh, P()))
    state, found = step.init(jax.random.key(1), *variables), []
    for batch in feed.stream(stop=20):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


alone, together = losses(1), losses(8)
print(f"loss after 20 steps: on one device {alone[-1]:.4f}, on eight {together[-1]:.4f}")
np.testing.assert_allclose(alone, together, rtol=1e-3)

# %% [markdown]
# ## Saying it in types
#
# The mesh above has axes of the kind *Auto*: XLA chooses layouts in between, and you find out by looking. Axes of the
# kind *Explicit*, which is what `make_mesh` gives if it is not told otherwise, make the layout a part of the type, so
# that you see it while tracing.

# %%
typed = jax.make_mesh((4, 2), ("data", "model"))
with jax.set_mesh(typed):
    a = jax.device_put(jnp.ones((8, 64)), P("data"))
    b = jax.device_put(jnp.ones((64, 32)), P(None, "model"))
    print(jax.typeof(a), "@", jax.typeof(b), "=", jax.typeof(a @ b))

# %% [markdown]
# And where two layouts would need an exchange that nobody asked for, it is an error:

# %% tags=["raises-exception", "version"]
with jax.set_mesh(typed):
    jax.device_put(jnp.ones((8, 64)), P("data", "model")) @ jax.device_put(jnp.ones((64, 32)), P("model"))

# %% [markdown]
# Ask for it, and it goes: `jnp.matmul(a, b, out_sharding=P("data"))`, or move the array first with
# `jax.sharding.reshard`.
#
# ## shard_map: the program of one device
#
# Sometimes you want to write what each device does, and which exchanges there are. Inside of `shard_map` arrays are
# *pieces*, and the axes of the mesh have names to exchange over.

# %%
ring = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def each(x):
    """What one device does with its piece, (2,) of (16,)."""
    here = lax.axis_index("d")
    from_left = lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)])
    return x.sum()[None], lax.psum(x.sum(), "d"), from_left, here[None]


mapped = jax.shard_map(each, mesh=ring, in_specs=P("d"), out_specs=(P("d"), P(), P("d"), P("d")))
sums, total, shifted, places = mapped(jnp.arange(16.0))
print("device       ", places)
print("own sum      ", sums)
print("sum of all   ", total)
print("from the left", shifted)

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 2.2))
axes.set(xlim=(-0.3, 8.2), ylim=(-0.4, 3.4))
axes.axis("off")
colours = plt.get_cmap("Set3").colors
for i in range(8):
    for y, words in ((2.2, f"{2 * i} {2 * i + 1}"), (0, f"{(2 * i - 2) % 16} {(2 * i - 1) % 16}")):
        owner = i if y else (i - 1) % 8
        axes.add_patch(plt.Rectangle((i, y), 0.8, 0.8, facecolor=colours[owner], edgecolor="#666666"))
        axes.text(i + 0.4, y + 0.4, words, ha="center", va="center")
    axes.text(i + 0.4, 3.15, f"device {i}", ha="center", fontsize=8)
    target = (i + 1) % 8
    axes.annotate("", (target + 0.4, 0.85), (i + 0.4, 2.15), arrowprops={"arrowstyle": "-|>", "color": "#777777"})
axes.text(-0.25, -0.35, "ppermute: every piece goes one device to the right, all at once", fontsize=9)

# %% [markdown]
# Keys are the trap here. Every device runs the same program, and a key that was copied to all of them is the same key.
# Fold in the place:

# %%
key = jax.random.key(0)
same = jax.shard_map(lambda k: jax.random.uniform(k, (1,)), mesh=ring, in_specs=P(), out_specs=P("d"))
own = jax.shard_map(
    lambda k: jax.random.uniform(jax.random.fold_in(k, lax.axis_index("d")), (1,)),
    mesh=ring,
    in_specs=P(),
    out_specs=P("d"),
)
print(
    "different numbers drawn by eight devices: copied key",
    len(set(same(key).tolist())),
    " own key",
    len(set(own(key).tolist())),
)

# %% [markdown]
# A gradient taken inside of `shard_map` is the gradient on one device's piece of the batch. The mean over devices is
# yours to take; this is the all-reduce of data parallelism, by hand:

# %%
w, x = jnp.arange(3.0), jax.random.normal(key, (16, 3))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def piece(w, x):
    mine = lax.pcast(w, "d", to="varying")  # a copy for each device, so that each gradient is its own
    return lax.pmean(jax.grad(loss)(mine, x), "d")


by_hand = jax.shard_map(piece, mesh=ring, in_specs=(P(), P("d")), out_specs=P())(w, x)
np.testing.assert_allclose(by_hand, jax.grad(loss)(w, x), rtol=1e-5)

# %% [markdown]
# Without the `pcast` the gradient would be summed over the devices already: JAX knows that `w` is the same on all of
# them, and that the derivative of a copy is a sum.

# %%
doubled = jax.shard_map(lambda w, x: jax.grad(loss)(w, x), mesh=ring, in_specs=(P(), P("d")), out_specs=P())(w, x)
print("eight times the mean:", np.allclose(doubled, 8 * by_hand, rtol=1e-4))

# %% [markdown]
# ## What I would have wished to know
#
# - Sharding changes where, never what. Write the program for one device, test it there, then place the data.
# - Every shape that is cut has to be divisible by the number of pieces. A `train.Feed` with a `sharding` checks its
#   batch for that.
# - Simulated devices share your cores: use them to see layouts, exchanges and bytes, not to measure speed.
# - `device_put` inside of `jit` to some other single device is ignored; `lax.with_sharding_constraint` is what moves
#   things there.
