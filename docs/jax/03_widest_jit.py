# %% [markdown]
# # Jit the widest region
#
# A training step has pieces: the loss, its gradient, the update of the optimizer, a few numbers to watch. Where should
# `jit` go? Around all of it, and once. This page measures what each narrower choice costs.

# %%
import timeit

import jax
import jax.numpy as jnp
import optax

import mlax
from mlax import nn, optim

model = mlax.Series(
    up=nn.Linear(64),
    relu=mlax.F(jax.nn.relu),
    norm=nn.LayerNorm(),
    mix=nn.Linear(64),
    relu2=mlax.F(jax.nn.relu),
    head=nn.Linear(10),
)
optimizer = optim.AdamW(1e-3)
batch = {"x": jax.random.normal(jax.random.key(0), (32, 64)), "y": jnp.arange(32) % 10}
trainables, _ = model.init(jax.random.key(1), batch["x"])
state = optimizer.init(trainables)


def loss(trainables, batch):
    logits, _ = model.fwd(batch["x"], trainables)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def gradients(trainables, batch):
    return jax.value_and_grad(loss)(trainables, batch)


def norm(grads):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))


# %% [markdown]
# The step itself takes its pieces as arguments, so that we can put `jit` wherever we like.


# %%
def step_of(gradients, norm, update):
    def step(trainables, state, batch):
        value, grads = gradients(trainables, batch)
        size = norm(grads)
        trainables, state = update(grads, state, trainables)
        return trainables, state, {"loss": value, "norm": size}

    return step


def only_the_loss(trainables, batch):
    return jax.value_and_grad(jax.jit(loss))(trainables, batch)


plain = step_of(gradients, norm, optimizer.update)
ways = {
    "no jit": plain,
    "jit of the loss": step_of(only_the_loss, norm, optimizer.update),
    "jit of each piece": step_of(jax.jit(gradients), jax.jit(norm), jax.jit(optimizer.update)),
    "jit of the step": jax.jit(plain),
    "and donated": jax.jit(plain, donate_argnums=(0, 1)),
}


# %% [markdown]
# All of them compute the same.

# %%
for name, step in ways.items():
    copies = jax.tree.map(jnp.copy, (trainables, state))  # the last one uses up what it is given
    *_, metrics = step(*copies, batch)
    print(f"{name:18} loss {metrics['loss']:.4f}  norm {metrics['norm']:.4f}")

# %% [markdown]
# They do not take the same time. A loop hands each result to the next call, as training does.


# %% tags=["measured"]
def milliseconds(step, steps):
    carried = jax.tree.map(jnp.copy, (trainables, state))

    def loop():
        nonlocal carried
        for _ in range(steps):
            *carried, metrics = step(*carried, batch)
        jax.block_until_ready(metrics)

    return 1e3 * min(timeit.repeat(loop, number=1, repeat=3)) / steps


times = dict.fromkeys(ways, float("inf"))
for _ in range(4):  # all of them in turn, so that they see the same machine
    for name, step in ways.items():
        times[name] = min(times[name], milliseconds(step, 3 if name in ("no jit", "jit of the loss") else 50))
for name, time in times.items():
    print(f"{name:18} {time:7.2f} ms a step")
assert times["no jit"] > 5 * times["jit of the step"]
assert times["jit of the loss"] > 2 * times["jit of the step"]
assert times["and donated"] < times["jit of each piece"]

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.4))
bars = axes.barh(list(times), list(times.values()), color=["#BBBBBB", "#BBBBBB", "#4477AA", "#228833", "#228833"])
axes.bar_label(bars, fmt="%.2f", padding=3)
axes.set(xscale="log", xlabel="milliseconds a step", xlim=(None, 3 * max(times.values())))
axes.invert_yaxis()
axes.grid(visible=False, axis="y")
axes.set_title("The same training step, with jit around more and more of it", fontsize=10)

# %% [markdown]
# **The loss alone is the classic mistake.** The forward pass is compiled, and so is its gradient, since the derivative
# of a jitted function is jitted. But the optimizer is most of the *operations* of a step, a dozen for each leaf of the
# weights, and they run one by one.
#
# **Each piece alone is nearly right.** What is left to lose: the gradients go to memory at the end of one program and
# come back at the start of the next, since XLA cannot fuse across calls, and each call has its own price, a little for
# each array it is handed.
#
# **The whole step** leaves one call, and it can be donated (page 7): the new weights and the new state of the optimizer
# are written over the old ones, and nothing is allocated.
#
# ## Wider still: many steps a call
#
# When a step is short, even one call is a cost: Python has to come back for each step, and flatten and check every
# leaf. `lax.scan` puts many steps into one program. The batches get a leading axis, the metrics come back with one.


# %%
tiny = mlax.Series(up=nn.Linear(8), relu=mlax.F(jax.nn.relu), mix=nn.Linear(8), out=nn.Linear(1))
first = {"x": jnp.ones((4, 8)), "y": jnp.ones((4, 1))}


def short(carried, batch):
    trainables, state = carried
    value, grads = jax.value_and_grad(lambda w: jnp.mean((tiny.fwd(batch["x"], w)[0] - batch["y"]) ** 2))(trainables)
    return optimizer.update(grads, state, trainables), value


def many(carried, batches):
    return jax.lax.scan(short, carried, batches)


# %% tags=["measured"]
def microseconds(step, batch, calls, steps):
    weights, _ = tiny.init(jax.random.key(2), first["x"])
    carried = (weights, optimizer.init(weights))

    def loop():
        nonlocal carried
        for _ in range(calls):
            carried, value = step(carried, batch)
        jax.block_until_ready(value)

    loop()
    return 1e6 * min(timeit.repeat(loop, number=1, repeat=7)) / steps


stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 20), first)
single = microseconds(jax.jit(short, donate_argnums=0), first, calls=100, steps=100)
scanned = microseconds(jax.jit(many, donate_argnums=0), stacked, calls=5, steps=100)
print(f"one step a call: {single:.0f} microseconds a step; twenty a call: {scanned:.0f}")
assert scanned < single

# %% [markdown]
# This is what `train.step(objective, optimizer, many=20)` does, with `feed.stream(stacked=20)` to bring the batches. On
# a GPU, where the arithmetic of a small step takes microseconds, it is the difference between a busy device and an idle
# one.
#
# ## What must stay outside
#
# - **Reading data** and everything else that touches the world: files, sockets, the clock.
# - **Printing and logging.** Return the numbers and read them now and then: reading waits for the device (page 13).
# - **Decisions about the program itself**: how many layers, training or inference. They are Python values, known while
#   tracing, and each one gives another program.
#
# ## What I would have wished to know
#
# - `jit` inside of `jit` is harmless: the inner one becomes part of the outer program. So jit library functions freely,
#   and the step once more.
# - A method of a class that keeps its weights in `self` cannot be jitted whole without tricks. That is why in mlax the
#   weights are arguments and results: *step(state, batch) -> state, metrics* is a function that `jit` understands.
