# %% [markdown]
# # All of it together: a training loop of one's own
#
# A loop with everything that the pages before were about: one jitted region, fixed shapes, a scan, named keys, state in
# and out, donation, no look at values on the way, and a restart that is exact to the bit. It uses layers and an
# optimizer of mlax, and nothing of its training room but checkpoints. Of Optax it uses nothing.
#
# The task: 1,797 handwritten digits that come with scikit-learn.

# %%
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from sklearn.datasets import load_digits

import mlax
from mlax import nn, optim, train

pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
images = jnp.asarray(pixels[order].reshape(-1, 8, 8) / 16, jnp.float32)
labels = jnp.asarray(digits[order], jnp.int32)
test, data = (images[:450], labels[:450]), (images[450:], labels[450:])
print(data[0].shape, test[0].shape)

# %% [markdown]
# ## The model and the state
#
# A model is a description. All that changes is in one named tuple: a pytree, so that every transformation takes it
# whole (page 7).

# %%
EPOCHS, BATCH = 30, 64
STEPS = len(data[1]) // BATCH  # of an epoch; the three images left over are others each time

model = mlax.Series(
    flat=nn.Flatten(),
    up=nn.Linear(256),
    norm=nn.BatchNorm(),
    relu=mlax.F(jax.nn.relu),
    drop=nn.Dropout(0.2),
    mid=nn.Linear(256),
    norm2=nn.BatchNorm(),
    relu2=mlax.F(jax.nn.relu),
    drop2=nn.Dropout(0.2),
    head=nn.Linear(10),
)
optimizer = optim.AdamW(optim.WarmupCosine(4e-3, warmup=2 * STEPS, total=EPOCHS * STEPS), decay=0.05)


class State(NamedTuple):
    """Everything that training changes, and the key, which does not."""

    step: jax.Array  # () int32
    trainables: Any
    non_trainables: Any  # the running means of the norms
    optimizer: Any
    average: Any  # of the weights, over the last hundred steps or so: what is tested
    key: jax.Array


def begin(key):
    trainables, non_trainables = model.init(mlax.named_key(key, "weights"), data[0][:1])
    average = jax.tree.map(jnp.copy, trainables)
    return State(jnp.int32(0), trainables, non_trainables, optimizer.init(trainables), average, key)


# %% [markdown]
# ## One step
#
# A pure function of the state and a batch. Its keys come from the number of the step, and from names (page 6): another
# source of randomness added tomorrow changes none of those that are there.


# %%
def shifted(image, key):
    """One image, moved by up to one pixel each way. Written for one; `vmap` makes it many (page 10)."""
    corner = jax.random.randint(key, (2,), 0, 3)
    return lax.dynamic_slice(jnp.pad(image, 1), (corner[0], corner[1]), (8, 8))


def cross_entropy(logits, label):
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]


def step(state, batch):
    image, label = batch
    key = jax.random.fold_in(state.key, state.step)
    image = jax.vmap(shifted)(image, jax.random.split(mlax.named_key(key, "shift"), len(image)))

    def loss(trainables):
        logits, non_trainables = model.fwd(image, trainables, state.non_trainables, rng=mlax.named_key(key, "model"))
        return cross_entropy(logits, label).mean(), non_trainables

    (value, non_trainables), grads = jax.value_and_grad(loss, has_aux=True)(state.trainables)
    trainables, slots = optimizer.update(grads, state.optimizer, state.trainables)
    average = jax.tree.map(lambda a, w: a + 0.01 * (w - a), state.average, trainables)
    return State(state.step + 1, trainables, non_trainables, slots, average, state.key), value


# %% [markdown]
# ## One epoch, one call
#
# The data is small, so it lives on the device, and the whole epoch is one program: shuffle, cut into batches of one
# shape, scan. A test is part of it. Python comes back once an epoch, with two numbers to fetch. Nothing is captured:
# data and test are arguments.


# %%
def accuracy(state, test):
    logits, _ = model.fwd(test[0], state.average, state.non_trainables, inference_mode=True)
    return jnp.mean(logits.argmax(-1) == test[1])


traces = 0


def epoch(state, data, test):
    global traces
    traces += 1  # Python, so it counts tracings and not calls (page 4)
    key = mlax.named_key(jax.random.fold_in(state.key, state.step), "order")
    chosen = jax.random.permutation(key, len(data[1]))[: STEPS * BATCH].reshape(STEPS, BATCH)
    batches = jax.tree.map(lambda array: array[chosen], data)  # (steps, batch, ...)
    state, losses = lax.scan(step, state, batches)
    return state, {"loss": losses.mean(), "accuracy": accuracy(state, test)}


run = jax.jit(epoch, donate_argnums=0)

# %% [markdown]
# ## The loop
#
# What is left for Python: call, collect, save now and then. The metrics are collected as they are, unread; only at the
# end are they looked at, so that Python is always ahead of the device (page 13).

# %%
checkpoints = train.Checkpoints("checkpoints")


def fit(state, until, save=()):
    history = []
    for number in range(int(state.step) // STEPS, until):
        state, metrics = run(state, data, test)
        history.append(metrics)
        if number + 1 in save:
            checkpoints.save(int(state.step), state)
    checkpoints.wait()
    return state, jax.device_get(history)


state, history = fit(begin(jax.random.key(0)), EPOCHS, save=(10,))
print(f"{int(state.step)} steps in {len(history)} calls, which traced {traces} time(s)")
assert history[-1]["accuracy"] > 0.97

# %% tags=["measured"]
for number in (0, 4, 9, 19, EPOCHS - 1):
    print(f"epoch {number + 1:2}: loss {history[number]['loss']:.3f}, test accuracy {history[number]['accuracy']:.1%}")

# %% [markdown]
# At first the accuracy is far behind the loss. What is tested is the average of the weights, which for a few hundred
# steps still holds much of where it began. Do not judge an average early.
#
# ## Killed, and begun again
#
# The run above left a checkpoint at epoch 10. Suppose the machine died there. A new process makes a state of the right
# form, fills it, and goes on; since orders and keys are functions of the seed and the step, it must end with the same
# weights. Not nearly: the same.

# %%
restored = checkpoints.restore(begin(jax.random.key(0))).tree
print("goes on at step", int(restored.step))
again, _ = fit(restored, EPOCHS)
same = jax.tree.map(lambda a, b: bool((a == b).all()), state.trainables, again.trainables)
print("every weight the same, to the bit:", all(jax.tree.leaves(same)))
assert all(jax.tree.leaves(same))

# %% [markdown]
# ## Four runs at once
#
# One accuracy is one draw. `epoch` is a pure function of a state, so `vmap` over states trains four seeds in one
# program, and no line of it has to change. How sure are we of the result?

# %%
several = jax.jit(jax.vmap(epoch, in_axes=(0, None, None)), donate_argnums=0)
states = jax.jit(jax.vmap(begin))(jax.random.split(jax.random.key(1), 4))
curves = []
for _ in range(EPOCHS):
    states, metrics = several(states, data, test)
    curves.append(metrics)
curves = {name: np.stack([np.asarray(each[name]) for each in curves]) for name in ("loss", "accuracy")}  # (epochs, 4)
assert curves["accuracy"][-1].min() > 0.97

# %% tags=["measured"]
print("accuracies of four seeds:", *(f"{value:.1%}" for value in curves["accuracy"][-1]))

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3))
left.semilogy(curves["loss"], color="#4477AA", alpha=0.8)
left.set(title="loss in training", xlabel="epoch")
right.plot(100 * (1 - curves["accuracy"]), color="#EE6677", alpha=0.8)
right.set(title="test images read wrongly, %", xlabel="epoch", yscale="log")
right.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])

# %% [markdown]
# Which ones are still read wrongly? Often one would not blame it.

# %% tags=["measured"]
logits, _ = jax.jit(model.fwd, static_argnames="inference_mode")(
    test[0], state.average, state.non_trainables, inference_mode=True
)
wrong = np.flatnonzero(np.asarray(logits.argmax(-1) != test[1]))
print(len(wrong), "of 450")

# %% tags=["drawing"]
figure, panels = plt.subplots(1, 8, figsize=(7.2, 1.4))
for axes, i in zip(panels, wrong, strict=False):
    axes.imshow(test[0][i], cmap="gray_r")
    axes.set_title(f"{int(logits[i].argmax())}, is {int(test[1][i])}", fontsize=8)
for axes in panels:
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)

# %% [markdown]
# ## What it costs
#
# The same steps, one call each, against one call an epoch:

# %% tags=["measured"]
single = jax.jit(step, donate_argnums=0)
batch = data[0][:BATCH], data[1][:BATCH]


def seconds(call, state):
    state, value = call(state)
    jax.block_until_ready(value)
    began = time.perf_counter()
    state, value = call(state)
    jax.block_until_ready(value)
    return time.perf_counter() - began


def steps(state):
    for _ in range(STEPS):
        state, value = single(state, batch)
    return state, value


by_step, by_epoch = [], []
for _ in range(6):  # in turn, so that both see the same machine
    by_step.append(seconds(steps, begin(jax.random.key(2))))
    by_epoch.append(seconds(lambda state: run(state, data, test), begin(jax.random.key(2))))
calls, one_call = 1e3 * min(by_step), 1e3 * min(by_epoch)
print(f"{STEPS} calls of a step: {calls:.0f} ms; one call of an epoch, its test included: {one_call:.0f} ms")

# %% [markdown]
# Steps of this size are long enough on a CPU that calls hardly count (page 3 has some that are not). On a GPU they
# would be most of the time, and one call an epoch the difference.
#
# ## Where to go from here
#
# - Data that does not fit on the device: `train.Feed` brings it in fixed shapes, ahead of time.
# - A guard against NaN, accumulation, loss scaling, a progress bar, curves, resumption after `kill -9`: `train.step`
#   and `train.fit`. They are built from what this page is built from.
# - More devices: place data and state (page 11). `step` stays as it is.
