# %% [markdown]
# # Jit the whole training step
#
# `jax.jit` should wrap the whole training step: the loss, its gradient, the optimizer update and the metrics, compiled
# as one program. This page measures what it costs to jit less than that.

# %%
import timeit

import jax
import jax.numpy as jnp
import optax

import mlax
from mlax import nn, optim

model = mlax.Series(
    up=nn.Linear(64),
    relu=jax.nn.relu,
    norm=nn.LayerNorm(),
    mix=nn.Linear(64),
    relu2=jax.nn.relu,
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
# The step takes its parts as arguments, so that each can be jitted separately.


# %%
def make_step(gradients, norm, update):
    def step(trainables, state, batch):
        value, grads = gradients(trainables, batch)
        size = norm(grads)
        trainables, state = update(grads, state, trainables)
        return trainables, state, {"loss": value, "norm": size}

    return step


def jit_loss_only(trainables, batch):
    return jax.value_and_grad(jax.jit(loss))(trainables, batch)


plain = make_step(gradients, norm, optimizer.update)
variants = {
    "no jit": plain,
    "jit the loss": make_step(jit_loss_only, norm, optimizer.update),
    "jit each part": make_step(jax.jit(gradients), jax.jit(norm), jax.jit(optimizer.update)),
    "jit the step": jax.jit(plain),
    "and donate": jax.jit(plain, donate_argnums=(0, 1)),
}


# %% [markdown]
# All of them compute the same result.

# %%
for name, step in variants.items():
    copies = jax.tree.map(jnp.copy, (trainables, state))  # the last variant donates its arguments
    *_, metrics = step(*copies, batch)
    print(f"{name:18} loss {metrics['loss']:.4f}  norm {metrics['norm']:.4f}")

# %% [markdown]
# They do not take the same time. The loop passes each result to the next call, as training does.


# %% tags=["measured"]
def milliseconds(step, steps):
    carry = jax.tree.map(jnp.copy, (trainables, state))

    def loop():
        nonlocal carry
        for _ in range(steps):
            *carry, metrics = step(*carry, batch)
        jax.block_until_ready(metrics)

    return 1e3 * min(timeit.repeat(loop, number=1, repeat=3)) / steps


times = dict.fromkeys(variants, float("inf"))
for _ in range(4):  # interleaved, so that a change in load affects all of them
    for name, step in variants.items():
        times[name] = min(times[name], milliseconds(step, 3 if name in ("no jit", "jit the loss") else 50))
for name, time in times.items():
    print(f"{name:18} {time:7.2f} ms per step")
assert times["no jit"] > 5 * times["jit the step"]
assert times["jit the loss"] > 2 * times["jit the step"]
assert times["and donate"] < times["jit each part"]

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.4))
bars = axes.barh(list(times), list(times.values()), color=["#BBBBBB", "#BBBBBB", "#4477AA", "#228833", "#228833"])
axes.bar_label(bars, fmt="%.2f", padding=3)
axes.set(xscale="log", xlabel="milliseconds per step", xlim=(None, 3 * max(times.values())))
axes.invert_yaxis()
axes.grid(visible=False, axis="y")
axes.set_title("The same training step, with more and more of it inside jit", fontsize=10)

# %% [markdown]
# **Jitting only the loss is the classic mistake.** The forward pass is compiled, and so is its gradient, since the
# derivative of a jitted function is jitted. But most of the *operations* of a step belong to the optimizer, a dozen for
# each leaf of the weights, and they are dispatched one by one.
#
# **Jitting each part separately is nearly right.** What it still loses: the gradients are written to memory by one
# program and read back by the next, since XLA cannot fuse across calls, and each call has its own dispatch overhead,
# which grows with the number of arrays passed.
#
# **Jitting the whole step** leaves a single call, and its arguments can be donated (page 7): the new weights and
# optimizer state overwrite the old ones, and nothing new is allocated for them.
#
# ## Several steps per call with `lax.scan`
#
# `lax.scan` runs several training steps in one program. When a step is short, even one call per step is too many:
# Python dispatches each one, and flattens and checks every leaf. The batches get a leading axis, and so do the metrics.


# %%
tiny = mlax.Series(up=nn.Linear(8), relu=jax.nn.relu, mix=nn.Linear(8), out=nn.Linear(1))
first = {"x": jnp.ones((4, 8)), "y": jnp.ones((4, 1))}


def short_step(carry, batch):
    trainables, state = carry
    value, grads = jax.value_and_grad(lambda w: jnp.mean((tiny.fwd(batch["x"], w)[0] - batch["y"]) ** 2))(trainables)
    return optimizer.update(grads, state, trainables), value


def scan_steps(carry, batches):
    return jax.lax.scan(short_step, carry, batches)


# %% tags=["measured"]
def microseconds(step, batch, calls, steps):
    weights, _ = tiny.init(jax.random.key(2), first["x"])
    carry = (weights, optimizer.init(weights))

    def loop():
        nonlocal carry
        for _ in range(calls):
            carry, value = step(carry, batch)
        jax.block_until_ready(value)

    loop()
    return 1e6 * min(timeit.repeat(loop, number=1, repeat=7)) / steps


stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 20), first)
single = microseconds(jax.jit(short_step, donate_argnums=0), first, calls=100, steps=100)
scanned = microseconds(jax.jit(scan_steps, donate_argnums=0), stacked, calls=5, steps=100)
print(f"one step per call: {single:.0f} microseconds per step; twenty per call: {scanned:.0f}")
assert scanned < single

# %% [markdown]
# `train.step(objective, optimizer, steps_per_call=20)` does this, fed by `feed.stream(steps_per_call=20)`. On a GPU,
# where the arithmetic of a small step takes microseconds, it is the difference between a busy device and an idle one.
#
# ## What stays outside jit
#
# - **Input and output**: files, sockets, the clock.
# - **Printing and logging.** Return the metrics and read them only occasionally: reading waits for the device (page
#   13).
# - **Decisions about the program itself**: how many layers, training or inference. They are Python values, known while
#   tracing, and each one gives a different program.
#
# ## Good to know
#
# - `jit` inside `jit` is harmless: the inner function becomes part of the outer program. So jit library functions
#   freely, and the step once more.
# - A method of a class that stores its weights in `self` cannot be jitted directly. That is why weights are arguments
#   and results in mlax: *step(state, batch) -> state, metrics* is a function that `jit` understands.
