# %% [markdown]
# # A custom training loop
#
# A custom training loop in 40 lines, to copy and change: it evaluates, saves checkpoints, and resumes after a kill with
# bitwise the same result as an uninterrupted run. It uses everything on the previous pages: a jitted step, static
# shapes, explicit state, keys derived from the step number, donation, and no reads of values along the way. From mlax
# it takes layers, an optimizer and checkpoints, but neither `train.step` nor `train.fit`.
#
# `train.fit` is not such a loop. With signals, rollbacks, run folders, loggers and several processes it is about 3,000
# lines, which you extend by its arguments ([guide](../guides/training-loop.md)). Write a loop where those do not fit:
# two models that train each other, say, or steps of different kinds.
#
# The task: the 1,797 handwritten digits that come with scikit-learn.

# %%
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

import mlax
from mlax import nn, optim, train

pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
source = {"image": pixels[order].astype(np.float32) / 16, "label": digits[order].astype(np.int32)}
test, data = ({name: array[part] for name, array in source.items()} for part in (slice(450), slice(450, None)))
print(data["image"].shape, test["image"].shape)

# %% [markdown]
# The model and the optimizer hold no arrays: they are descriptions, which any function may use (page 7).

# %%
EPOCHS, BATCH = 20, 64
PER_EPOCH = len(data["label"]) // BATCH  # steps; the three images left over differ each time

model = mlax.Series(up=nn.Linear(256), norm=nn.BatchNorm(), relu=jax.nn.relu, drop=nn.Dropout(0.3), head=nn.Linear(10))
optimizer = optim.AdamW(optim.WarmupCosine(4e-3, warmup=2 * PER_EPOCH, total=EPOCHS * PER_EPOCH), decay=0.05)

# %% [markdown]
# ## The loop
#
# These are all of its lines.


# %%
class State(NamedTuple):
    step: jax.Array  # () int32
    trainables: Any
    non_trainables: Any  # the running statistics of the norm
    slots: Any  # of the optimizer
    key: jax.Array


def init_state(key):
    trainables, non_trainables = model.init(mlax.named_key(key, "weights"), data["image"][:1])
    return State(jnp.int32(0), trainables, non_trainables, optimizer.init(trainables), key)


def advance(state, batch):
    rng = jax.random.fold_in(state.key, state.step)

    def loss(trainables):
        logits, new = model.fwd(batch["image"], trainables, state.non_trainables, rng=rng)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), new

    (value, non_trainables), grads = jax.value_and_grad(loss, has_aux=True)(state.trainables)
    trainables, slots = optimizer.update(grads, state.slots, state.trainables)
    return State(state.step + 1, trainables, non_trainables, slots, state.key), value


def accuracy(state, batch):
    logits, _ = model.fwd(batch["image"], state.trainables, state.non_trainables, inference_mode=True)
    return jnp.mean(logits.argmax(-1) == batch["label"])


step, evaluate = jax.jit(advance, donate_argnums=0), jax.jit(accuracy)


def batch_at(number):
    epoch, at = divmod(number, PER_EPOCH)
    chosen = np.random.default_rng((0, epoch)).permutation(len(data["label"]))[at * BATCH : (at + 1) * BATCH]
    return {name: array[chosen] for name, array in data.items()}


def fit(folder, steps):
    checkpoints, state, history = train.Checkpoints(folder), init_state(jax.random.key(0)), []
    if checkpoints.steps():
        state = checkpoints.restore(state).tree
    for number in range(int(state.step), steps):
        state, loss = step(state, batch_at(number))
        if (number + 1) % PER_EPOCH == 0 or number + 1 == steps:
            history.append((number + 1, loss, evaluate(state, test)))
            checkpoints.save(number + 1, state)  # a thread writes it while training continues
    checkpoints.wait()
    return state, jax.device_get(history)


# %%
state, history = fit("checkpoints/whole", EPOCHS * PER_EPOCH)
print(f"{int(state.step)} steps, {len(history)} evaluations")
assert history[-1][2] > 0.96

# %% tags=["measured"]
for number, loss, score in history[:: EPOCHS // 4]:
    print(f"step {number:3}: loss {loss:.3f}, test accuracy {score:.1%}")
print(f"step {history[-1][0]:3}: loss {history[-1][1]:.3f}, test accuracy {history[-1][2]:.1%}")

# %% [markdown]
# What each part is for:
#
# - **All state is in one tuple**, a pytree that `jit`, `scan`, `vmap` and `Checkpoints` take as one argument (page 7).
#   Its buffers are donated, so that a step does not need twice the memory (page 13).
# - **Keys and batches are functions of the step number** (page 6). So the step, which is part of the state, is the only
#   position to save.
# - **The loop reads nothing from the device.** The loss and the accuracy stay there until the end, and Python stays
#   ahead of the device (page 13).
#
# ## Resuming from a checkpoint
#
# Resuming must reproduce the uninterrupted run. Here a run is killed in the middle of its ninth epoch, after steps that
# no checkpoint has, and then started again by the same call.


# %%
def batch_or_kill(number):
    if number == 180:
        time.sleep(1)  # until the last checkpoint is written, so that this page prints the same each time
        raise KeyboardInterrupt
    return whole_feed(number)


whole_feed, batch_at = batch_at, batch_or_kill
try:
    fit("checkpoints/killed", EPOCHS * PER_EPOCH)
except KeyboardInterrupt:
    print("killed after step 180; saved:", train.Checkpoints("checkpoints/killed").steps())
batch_at = whole_feed

again, rest = fit("checkpoints/killed", EPOCHS * PER_EPOCH)
same = jax.tree.map(lambda a, b: bool((a == b).all()), state.trainables, again.trainables)
print(f"resumed with step {rest[0][0] - PER_EPOCH + 1}; all weights bitwise equal: {all(jax.tree.leaves(same))}")
assert all(jax.tree.leaves(same)) and rest[-1][2] == history[-1][2]

# %% [markdown]
# ## One epoch per call
#
# The data is small and can stay on the device. Then a whole epoch is one program: it shuffles, splits the data into
# batches of one shape, scans over them and evaluates. `advance` and `accuracy` are those above. Control returns to
# Python once per epoch. Nothing is captured: training and test data are arguments.

# %%
traces = 0


def epoch(state, data, test):
    global traces
    traces += 1  # Python, so it counts traces and not calls (page 4)
    key = mlax.named_key(jax.random.fold_in(state.key, state.step), "order")
    indices = jax.random.permutation(key, len(data["label"]))[: PER_EPOCH * BATCH].reshape(PER_EPOCH, BATCH)
    batches = jax.tree.map(lambda array: array[indices], data)  # (steps, batch, ...)
    state, losses = lax.scan(advance, state, batches)
    return state, {"loss": losses.mean(), "accuracy": accuracy(state, test)}


run = jax.jit(epoch, donate_argnums=0)
on_device = jax.device_put((data, test))
state, history = init_state(jax.random.key(0)), []
for _ in range(EPOCHS):
    state, metrics = run(state, *on_device)
    history.append(metrics)
history = jax.device_get(history)
print(f"{int(state.step)} steps in {len(history)} calls, traced {traces} time(s)")
assert history[-1]["accuracy"] > 0.96

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
    states, metrics = several(states, *on_device)
    curves.append(metrics)
curves = {name: np.stack([np.asarray(each[name]) for each in curves]) for name in ("loss", "accuracy")}  # (epochs, 4)
assert curves["accuracy"][-1].min() > 0.96

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
logits, _ = jax.jit(functools.partial(model.fwd, inference_mode=True))(
    test["image"], state.trainables, state.non_trainables
)
wrong = np.flatnonzero(np.asarray(logits.argmax(-1)) != test["label"])
print(len(wrong), "of 450")

# %% tags=["drawing"]
figure, panels = plt.subplots(1, 8, figsize=(7.2, 1.4))
for axes, i in zip(panels, wrong, strict=False):
    axes.imshow(test["image"][i].reshape(8, 8), cmap="gray_r")
    axes.set_title(f"{int(logits[i].argmax())}, is {int(test['label'][i])}", fontsize=8)
for axes in panels:
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)

# %% [markdown]
# ## One call per step or per epoch
#
# One call per step dispatches more often than one call per epoch. The same steps, timed both ways:

# %% tags=["measured"]
batch = jax.device_put(batch_at(0))


def seconds(call, state):
    state, value = call(state)
    jax.block_until_ready(value)
    start = time.perf_counter()
    state, value = call(state)
    jax.block_until_ready(value)
    return time.perf_counter() - start


def by_steps(state):
    for _ in range(PER_EPOCH):
        state, value = step(state, batch)
    return state, value


by_step, by_epoch = [], []
for _ in range(6):  # interleaved, so that a change in load affects both
    by_step.append(seconds(by_steps, init_state(jax.random.key(2))))
    by_epoch.append(seconds(lambda state: run(state, *on_device), init_state(jax.random.key(2))))
calls, one_call = 1e3 * min(by_step), 1e3 * min(by_epoch)
print(f"{PER_EPOCH} calls of one step: {calls:.0f} ms; one call per epoch, including evaluation: {one_call:.0f} ms")

# %% [markdown]
# On a CPU, steps of this size are long enough that the dispatch overhead hardly matters (page 3 has some that are not).
# On a GPU it would be most of the time, and one call per epoch would be much faster.
#
# ## Where to go from here
#
# - Data that does not fit in memory: `train.Feed` prefetches it in fixed shapes.
# - NaN guards, gradient accumulation, loss scaling, early stopping, a progress bar, loggers, plots, signals:
#   `train.step` and `train.fit`.
# - A loop over `train.step`, in fewer lines: [own_loop.py](../../examples/own_loop.py).
# - More devices: shard the data and the state (page 11). `advance` stays as it is.
