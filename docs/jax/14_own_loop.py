# %% [markdown]
# # A custom training loop
#
# A custom training loop that uses everything on the previous pages: one jitted function, static shapes, a scan, named
# keys, explicit state, donation, no reads of values along the way, and a restart that is bitwise exact. It uses layers,
# an optimizer and checkpoints from mlax, but neither `train.step` nor `train.fit`, and nothing from Optax.
#
# The task: the 1,797 handwritten digits that come with scikit-learn.

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
# The model holds no arrays. All state is in one named tuple, a pytree that every transformation accepts as one argument
# (page 7).

# %%
EPOCHS, BATCH = 30, 64
STEPS = len(data[1]) // BATCH  # per epoch; the three images left over differ each time

model = mlax.Series(
    flat=nn.Flatten(),
    up=nn.Linear(256),
    norm=nn.BatchNorm(),
    relu=jax.nn.relu,
    drop=nn.Dropout(0.2),
    mid=nn.Linear(256),
    norm2=nn.BatchNorm(),
    relu2=jax.nn.relu,
    drop2=nn.Dropout(0.2),
    head=nn.Linear(10),
)
optimizer = optim.AdamW(optim.WarmupCosine(4e-3, warmup=2 * STEPS, total=EPOCHS * STEPS), decay=0.05)


class State(NamedTuple):
    """Everything that training changes, and the key, which it does not."""

    step: jax.Array  # () int32
    trainables: Any
    non_trainables: Any  # the running statistics of the norms
    optimizer: Any
    average: Any  # exponential moving average of the weights, over about a hundred steps; used for evaluation
    key: jax.Array


def init_state(key):
    trainables, non_trainables = model.init(mlax.named_key(key, "weights"), data[0][:1])
    average = jax.tree.map(jnp.copy, trainables)
    return State(jnp.int32(0), trainables, non_trainables, optimizer.init(trainables), average, key)


# %% [markdown]
# ## The training step
#
# The training step is a pure function of the state and a batch. Its keys are derived from the step number and from
# names (page 6), so adding another source of randomness changes none of the existing ones.


# %%
def random_shift(image, key):
    """Shift one image by up to one pixel in each direction; `vmap` maps this over a batch (page 10)."""
    corner = jax.random.randint(key, (2,), 0, 3)
    return lax.dynamic_slice(jnp.pad(image, 1), (corner[0], corner[1]), (8, 8))


def cross_entropy(logits, label):
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]


def step(state, batch):
    image, label = batch
    key = jax.random.fold_in(state.key, state.step)
    image = jax.vmap(random_shift)(image, jax.random.split(mlax.named_key(key, "shift"), len(image)))

    def loss(trainables):
        logits, non_trainables = model.fwd(image, trainables, state.non_trainables, rng=mlax.named_key(key, "model"))
        return cross_entropy(logits, label).mean(), non_trainables

    (value, non_trainables), grads = jax.value_and_grad(loss, has_aux=True)(state.trainables)
    trainables, slots = optimizer.update(grads, state.optimizer, state.trainables)
    average = jax.tree.map(lambda a, w: a + 0.01 * (w - a), state.average, trainables)
    return State(state.step + 1, trainables, non_trainables, slots, average, state.key), value


# %% [markdown]
# ## One epoch per call
#
# One call per epoch is enough here: the data is small, so it stays on the device, and the whole epoch is one program
# that shuffles, splits the data into batches of one shape, scans over them and evaluates. Control returns to Python
# once per epoch, with two scalars to fetch. Nothing is captured: training and test data are arguments.


# %%
def accuracy(state, test):
    logits, _ = model.fwd(test[0], state.average, state.non_trainables, inference_mode=True)
    return jnp.mean(logits.argmax(-1) == test[1])


traces = 0


def epoch(state, data, test):
    global traces
    traces += 1  # Python, so it counts traces and not calls (page 4)
    key = mlax.named_key(jax.random.fold_in(state.key, state.step), "order")
    indices = jax.random.permutation(key, len(data[1]))[: STEPS * BATCH].reshape(STEPS, BATCH)
    batches = jax.tree.map(lambda array: array[indices], data)  # (steps, batch, ...)
    state, losses = lax.scan(step, state, batches)
    return state, {"loss": losses.mean(), "accuracy": accuracy(state, test)}


run = jax.jit(epoch, donate_argnums=0)

# %% [markdown]
# ## The loop
#
# The loop in Python only calls, collects metrics and saves a checkpoint from time to time. The metrics are not read
# until the end, so that Python stays ahead of the device (page 13).

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


state, history = fit(init_state(jax.random.key(0)), EPOCHS, save=(10,))
print(f"{int(state.step)} steps in {len(history)} calls, traced {traces} time(s)")
assert history[-1]["accuracy"] > 0.97

# %% tags=["measured"]
for number in (0, 4, 9, 19, EPOCHS - 1):
    print(f"epoch {number + 1:2}: loss {history[number]['loss']:.3f}, test accuracy {history[number]['accuracy']:.1%}")

# %% [markdown]
# At first the accuracy lags far behind the loss. It is evaluated with the average of the weights, which for a few
# hundred steps is dominated by their initial values. Do not judge an average early.
#
# ## Resuming from a checkpoint
#
# Resuming must reproduce the uninterrupted run. The run above saved a checkpoint at epoch 10; suppose the machine
# failed there. A new process creates a state of the same structure, restores the checkpoint into it and continues.
# Since the shuffles and keys are functions of the seed and the step, it ends with the same weights: not approximately,
# but bitwise.

# %%
restored = checkpoints.restore(init_state(jax.random.key(0))).tree
print("resumes at step", int(restored.step))
again, _ = fit(restored, EPOCHS)
same = jax.tree.map(lambda a, b: bool((a == b).all()), state.trainables, again.trainables)
print("all weights bitwise equal:", all(jax.tree.leaves(same)))
assert all(jax.tree.leaves(same))

# %% [markdown]
# ## Several seeds at once
#
# A single accuracy is one sample. `epoch` is a pure function of the state, so `vmap` over states trains four seeds in
# one program without changing a line of it, and shows how much the result varies.

# %%
several = jax.jit(jax.vmap(epoch, in_axes=(0, None, None)), donate_argnums=0)
states = jax.jit(jax.vmap(init_state))(jax.random.split(jax.random.key(1), 4))
curves = []
for _ in range(EPOCHS):
    states, metrics = several(states, data, test)
    curves.append(metrics)
curves = {name: np.stack([np.asarray(each[name]) for each in curves]) for name in ("loss", "accuracy")}  # (epochs, 4)
assert curves["accuracy"][-1].min() > 0.97

# %% tags=["measured"]
print("test accuracy of four seeds:", *(f"{value:.1%}" for value in curves["accuracy"][-1]))

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3))
left.semilogy(curves["loss"], color="#4477AA", alpha=0.8)
left.set(title="training loss", xlabel="epoch")
right.plot(100 * (1 - curves["accuracy"]), color="#EE6677", alpha=0.8)
right.set(title="test error, %", xlabel="epoch", yscale="log")
right.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])

# %% [markdown]
# Which images are still misclassified? Many are ambiguous even to a human.

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
# ## One call per step or per epoch
#
# One call per step dispatches more often than one call per epoch. The same steps, timed both ways:

# %% tags=["measured"]
single = jax.jit(step, donate_argnums=0)
batch = data[0][:BATCH], data[1][:BATCH]


def seconds(call, state):
    state, value = call(state)
    jax.block_until_ready(value)
    start = time.perf_counter()
    state, value = call(state)
    jax.block_until_ready(value)
    return time.perf_counter() - start


def steps(state):
    for _ in range(STEPS):
        state, value = single(state, batch)
    return state, value


by_step, by_epoch = [], []
for _ in range(6):  # interleaved, so that a change in load affects both
    by_step.append(seconds(steps, init_state(jax.random.key(2))))
    by_epoch.append(seconds(lambda state: run(state, data, test), init_state(jax.random.key(2))))
calls, one_call = 1e3 * min(by_step), 1e3 * min(by_epoch)
print(f"{STEPS} calls of one step: {calls:.0f} ms; one call per epoch, including evaluation: {one_call:.0f} ms")

# %% [markdown]
# On a CPU, steps of this size are long enough that the dispatch overhead hardly matters (page 3 has some that are not).
# On a GPU it would be most of the time, and one call per epoch would be much faster.
#
# ## Where to go from here
#
# - Data that does not fit on the device: `train.Feed` prefetches it in fixed shapes.
# - NaN guards, gradient accumulation, loss scaling, a progress bar, plots, resuming after `kill -9`: `train.step` and
#   `train.fit`, built from the same pieces as this page.
# - More devices: shard the data and the state (page 11). `step` stays as it is.
