# %% [markdown]
# # Sharding
#
# Sharding stores an array on several devices, split into shards or replicated; programs run where their data is. You
# need no cluster to learn it: eight simulated devices on a CPU behave the same, only not faster.

# %%
import re

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before any other use of JAX

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, optim, train

print(jax.devices()[:2], "and", jax.device_count() - 2, "more")

# %% [markdown]
# ## Mesh and PartitionSpec
#
# A *mesh* arranges devices in a grid with named axes. A *PartitionSpec* gives, for each axis of an array, the mesh axis
# that it is sharded over. Over mesh axes that the spec does not mention, the array is replicated.

# %%
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
x = jnp.arange(64.0).reshape(8, 8)
sharded = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
jax.debug.visualize_array_sharding(sharded)
print(sharded.addressable_shards[3].device, "holds")
print(sharded.addressable_shards[3].data)

# %% [markdown]
# Five shardings of the same array. Each tile is one shard, labeled with the devices that hold it.

# %% tags=["drawing"]
from matplotlib import pyplot as plt


def draw(axes, spec, shape=(8, 8)):
    shards = {}
    for device, index in NamedSharding(mesh, spec).devices_indices_map(shape).items():
        corner = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        shards.setdefault(corner, []).append(device.id)
    colors = plt.get_cmap("Set3").colors
    for ((top, bottom), (left, right)), ids in shards.items():
        axes.add_patch(
            plt.Rectangle((left, top), right - left, bottom - top, facecolor=colors[ids[0]], edgecolor="white", lw=2)
        )
        words = " ".join(map(str, ids)) if len(ids) < 5 else "0 1 2 3\n4 5 6 7"
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
# ## Automatic parallelism and collectives
#
# Automatic parallelism means that the shardings of the arguments determine those of the computation: `jit` partitions
# the work accordingly and inserts the collectives that are needed. They can be read in the compiled program. Here are
# the classic shardings of a product of activations and weights.


# %%
def collectives(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", text) or ["none"]


def ones(shape, spec):
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))


for name, left, right in (
    ("batch sharded, weights replicated", P("data"), P()),
    ("weights sharded by column", P("data"), P(None, "model")),
    ("weights sharded by row", P("data", "model"), P("model")),
    ("weights by row, inputs not", P("data"), P("model")),
):
    a, b = ones((8, 64), left), ones((64, 32), right)
    result = jax.jit(jnp.matmul)(a, b)
    print(f"{name:33} {' '.join(collectives(jnp.matmul, a, b)):11} result {result.sharding.spec}")

# %% [markdown]
# The first is data parallelism: the forward pass needs no communication. By column and then by row is tensor
# parallelism, with one all-reduce at the end. The results are the same in all cases, up to the order of summation.
#
# ## Data parallelism
#
# Data parallelism needs no change to the training step: shard the batch, replicate the weights, and XLA inserts the
# all-reduce of the gradients.

# %%
model = mlax.Series(hidden=nn.Linear(64), relu=jax.nn.relu, head=nn.Linear(1))
rng = np.random.default_rng(0)
source = {"x": rng.normal(size=(512, 8)).astype(np.float32)}
source["y"] = np.sin(source["x"].sum(1, keepdims=True))


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    y, non_trainables = model.fwd(batch["x"], trainables, non_trainables)
    return (y - batch["y"])[:, 0] ** 2, non_trainables


w, _ = jax.device_put(model.init(jax.random.key(0), source["x"]), NamedSharding(mesh, P()))
batch = ones((64, 8), P("data"))
print("collectives: forward", set(collectives(lambda w, x: model.fwd(x, w)[0], w, batch)), end="; ")
print("gradient", set(collectives(jax.grad(lambda w, x: jnp.mean(model.fwd(x, w)[0] ** 2)), w, batch)))


def losses(devices):
    """The losses of twenty steps on this many devices."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    feed = train.Feed(source, batch=64, seed=0, sharding=NamedSharding(mesh, P("data")))
    step = train.step(objective, optim.AdamW(1e-2))
    variables = jax.device_put(model.init(jax.random.key(0), feed.example["x"]), NamedSharding(mesh, P()))
    state, values = step.init(jax.random.key(1), *variables), []
    for batch in feed.stream(stop=20):
        state, metrics = step(state, batch)
        values.append(float(metrics["loss"]))
    return values


one, eight = losses(1), losses(8)
print(f"loss after 20 steps: on one device {one[-1]:.4f}, on eight {eight[-1]:.4f}")
np.testing.assert_allclose(one, eight, rtol=1e-3)

# %% [markdown]
# ## Explicit sharding: sharding in types
#
# Explicit sharding makes the sharding part of an array's type, so that you see it while tracing. The mesh above has
# *Auto* axes: XLA chooses the shardings of intermediates, and you can only inspect the result. `make_mesh` creates
# *Explicit* axes by default.

# %%
explicit = jax.make_mesh((4, 2), ("data", "model"))
with jax.set_mesh(explicit):
    a = jax.device_put(jnp.ones((8, 64)), P("data"))
    b = jax.device_put(jnp.ones((64, 32)), P(None, "model"))
    print(jax.typeof(a), "@", jax.typeof(b), "=", jax.typeof(a @ b))

# %% [markdown]
# An operation whose result would need a collective that you did not ask for is an error:

# %% tags=["raises-exception", "version"]
with jax.set_mesh(explicit):
    jax.device_put(jnp.ones((8, 64)), P("data", "model")) @ jax.device_put(jnp.ones((64, 32)), P("model"))

# %% [markdown]
# To allow it, pass `jnp.matmul(a, b, out_sharding=P("data"))`, or move the array first with `jax.sharding.reshard`.
#
# ## Manual parallelism with `shard_map`
#
# `jax.shard_map` runs a function once per device, with explicit collectives. Inside it arrays are *shards*, and
# collectives refer to mesh axes by name.

# %%
ring = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def per_device(x):
    """The program of one device: its shard is (2,) of (16,)."""
    index = lax.axis_index("d")
    from_left = lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)])
    return x.sum()[None], lax.psum(x.sum(), "d"), from_left, index[None]


mapped = jax.shard_map(per_device, mesh=ring, in_specs=P("d"), out_specs=(P("d"), P(), P("d"), P("d")))
sums, total, shifted, indices = mapped(jnp.arange(16.0))
print("device       ", indices)
print("local sum    ", sums)
print("global sum   ", total)
print("from the left", shifted)

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 2.2))
axes.set(xlim=(-0.3, 8.2), ylim=(-0.4, 3.4))
axes.axis("off")
colors = plt.get_cmap("Set3").colors
for i in range(8):
    for y, words in ((2.2, f"{2 * i} {2 * i + 1}"), (0, f"{(2 * i - 2) % 16} {(2 * i - 1) % 16}")):
        owner = i if y else (i - 1) % 8
        axes.add_patch(plt.Rectangle((i, y), 0.8, 0.8, facecolor=colors[owner], edgecolor="#666666"))
        axes.text(i + 0.4, y + 0.4, words, ha="center", va="center")
    axes.text(i + 0.4, 3.15, f"device {i}", ha="center", fontsize=8)
    target = (i + 1) % 8
    axes.annotate("", (target + 0.4, 0.85), (i + 0.4, 2.15), arrowprops={"arrowstyle": "-|>", "color": "#777777"})
axes.text(-0.25, -0.35, "ppermute: every shard moves one device to the right", fontsize=9)

# %% [markdown]
# Keys need care here. Every device runs the same program, and a replicated key is the same key on all of them. Fold in
# the device index:

# %%
key = jax.random.key(0)
same = jax.shard_map(lambda k: jax.random.uniform(k, (1,)), mesh=ring, in_specs=P(), out_specs=P("d"))
different = jax.shard_map(
    lambda k: jax.random.uniform(jax.random.fold_in(k, lax.axis_index("d")), (1,)),
    mesh=ring,
    in_specs=P(),
    out_specs=P("d"),
)
print("distinct values on eight devices: replicated key", len(set(same(key).tolist())), end="; ")
print("index folded in", len(set(different(key).tolist())))

# %% [markdown]
# A gradient taken inside `shard_map` is the gradient on that device's shard of the batch. You average it over the
# devices yourself; this is the all-reduce of data parallelism, written by hand:

# %%
w, x = jnp.arange(3.0), jax.random.normal(key, (16, 3))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def mean_gradient(w, x):
    local = lax.pcast(w, "d", to="varying")  # one copy per device, so that each gradient is local
    return lax.pmean(jax.grad(loss)(local, x), "d")


by_hand = jax.shard_map(mean_gradient, mesh=ring, in_specs=(P(), P("d")), out_specs=P())(w, x)
np.testing.assert_allclose(by_hand, jax.grad(loss)(w, x), rtol=1e-5)

# %% [markdown]
# Without the `pcast` the gradient is already summed over the devices: JAX knows that `w` is replicated, and that the
# transpose of a broadcast is a sum.

# %%
summed = jax.shard_map(lambda w, x: jax.grad(loss)(w, x), mesh=ring, in_specs=(P(), P("d")), out_specs=P())(w, x)
print("eight times the mean:", np.allclose(summed, 8 * by_hand, rtol=1e-4))

# %% [markdown]
# ## Good to know
#
# - Sharding changes where values are computed, never which values. Write the program for one device, test it there,
#   then shard the data.
# - The size of a sharded axis must be divisible by the number of shards. `train.Feed` with a `sharding` checks its
#   batch size.
# - Simulated devices share your cores: use them to study shardings, collectives and bytes, not to measure speed.
# - Inside `jit`, `device_put` to another single device is ignored; use `lax.with_sharding_constraint` instead.
