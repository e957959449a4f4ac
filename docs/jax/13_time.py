# %% [markdown]
# # Benchmarking and profiling
#
# Benchmarking JAX code takes some care: JAX dispatches work to the device and returns immediately, which is why it is
# fast and why most first measurements of it are wrong. This page shows how to time a program correctly, then how to
# query the compiler and the profiler.

# %%
import glob
import gzip
import json
import os
import time
import timeit
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mlax
from mlax import nn, optim

# %% [markdown]
# ## Asynchronous dispatch
#
# Asynchronous dispatch means that a jitted call returns an array before its value has been computed. Python continues;
# reading the value waits for it.

# %% tags=["measured"]
matrix = jax.random.normal(jax.random.key(0), (800, 800)) / 28


@jax.jit
def work(x):
    for _ in range(8):
        x = jnp.tanh(x @ x)
    return x


work(matrix).block_until_ready()  # compiles
start = time.perf_counter()
result = work(matrix)
returned = time.perf_counter()
result.block_until_ready()
done = time.perf_counter()
print(f"the call returned after {1e3 * (returned - start):.2f} ms, the result after {1e3 * (done - start):.0f} ms")
assert returned - start < (done - start) / 3

# %% [markdown]
# Three ways to time it, only one of which is right:


# %% tags=["measured"]
def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


function = jax.jit(lambda x: work(x) + 1)
with_compilation = seconds(lambda: function(matrix).block_until_ready())
no_wait = min(seconds(lambda: function(matrix)) for _ in range(5))
jax.block_until_ready(function(matrix))
right = min(timeit.repeat(lambda: function(matrix).block_until_ready(), number=1, repeat=5))
print(f"first call, including compilation:          {1e3 * with_compilation:.0f} ms")
print(f"without block_until_ready:                  {1e3 * no_wait:.2f} ms")
print(f"warm, with block_until_ready, best of five: {1e3 * right:.0f} ms")
assert with_compilation > right > no_wait

# %% [markdown]
# So warm up with one call, end with `jax.block_until_ready` on all outputs, take the minimum or median of several
# repeats, and compare two variants within one run rather than with yesterday's number.
#
# ## Implicit synchronization
#
# Implicit synchronization happens whenever a training loop reads a value: `float(loss)`, `print(loss)`,
# `np.asarray(loss)`, `if loss < best`. While Python waits for the device it prepares nothing; when it continues, the
# device is idle.

# %% tags=["measured"]
model = mlax.Series(up=nn.Linear(512), relu=jax.nn.relu, mid=nn.Linear(512), head=nn.Linear(10))
optimizer = optim.AdamW(1e-3)
images, labels = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32), np.arange(256) % 10


def step(trainables, state, x, y):
    def loss(trainables):
        return optax.softmax_cross_entropy_with_integer_labels(model.fwd(x, trainables)[0], y).mean()

    value, grads = jax.value_and_grad(loss)(trainables)
    return *optimizer.update(grads, state, trainables), value


def epoch(read, step=jax.jit(step, donate_argnums=(0, 1)), steps=40):
    trainables, _ = model.init(jax.random.key(0), images)
    state = optimizer.init(trainables)
    *carry, value = step(trainables, state, images, labels)
    jax.block_until_ready(value)
    start = time.perf_counter()
    for _ in range(steps):
        prepared = np.tanh(images) * 0.5 + np.sort(images, axis=0)  # host work, such as preparing the next batch
        *carry, value = step(*carry, prepared, labels)
        if read:
            float(value)
    jax.block_until_ready(carry)
    return 1e3 * (time.perf_counter() - start) / steps


reading, not_reading = (min(epoch(read) for _ in range(4)) for read in (True, False))
print(f"reading the loss in every step: {reading:.2f} ms per step; not reading it: {not_reading:.2f} ms")

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, rows = plt.subplots(2, 1, figsize=(7.2, 2.6), sharex=True)
host, device = 1.0, 1.6
for axes, wait, title in zip(rows, (True, False), ("loss read in every step", "loss not read"), strict=True):
    ready = free = 0.0
    for number in range(4):
        axes.broken_barh([(ready, host)], (1.1, 0.8), facecolor="#BBCCEE", edgecolor="#555555")
        axes.text(ready + host / 2, 1.5, f"batch {number}", ha="center", va="center", fontsize=8)
        start = max(ready + host, free)
        axes.broken_barh([(start, device)], (0.1, 0.8), facecolor="#CCDDAA", edgecolor="#555555")
        axes.text(start + device / 2, 0.5, f"step {number}", ha="center", va="center", fontsize=8)
        free = start + device
        ready = free if wait else ready + host
    axes.set(yticks=(0.5, 1.5), yticklabels=("device", "host"), ylim=(0, 2.1), xticks=[])
    axes.set_title(title, fontsize=9, loc="left")
    axes.grid(visible=False)
rows[1].set_xlabel("time (illustration, not a measurement)")

# %% [markdown]
# mlax's `train.step` returns `Metrics`, which stay on the device in one array until you call `to_numpy()`. Do so every
# hundred steps or so.
#
# On a CPU, host and "device" share the same two cores, and the difference depends on what else they do. On a GPU it is
# often several-fold.
#
# ## Cost and memory analysis
#
# Cost and memory analyses are properties of a compiled program, available before it runs.

# %%
trainables, _ = model.init(jax.random.key(0), images)
state = optimizer.init(trainables)
plain = jax.jit(step).lower(trainables, state, images, labels).compile()
donated = jax.jit(step, donate_argnums=(0, 1)).lower(trainables, state, images, labels).compile()
megabytes = 4 * mlax.count(trainables) / 1e6
print(f"weights {megabytes:.2f} MB, with the two optimizer slots {3 * megabytes:.2f} MB")
for name, compiled in (("plain", plain), ("donated", donated)):
    memory = compiled.memory_analysis()
    in_out = (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes) / 1e6
    in_place = memory.alias_size_in_bytes / 1e6
    print(f"{name:8} arguments and results {in_out:.2f} MB, updated in place {in_place:.2f} MB")

# %% [markdown]
# Without donation the old and the new state are both in memory. With it there is only one. On a device that is full of
# weights, this decides whether a model fits. `temp_size_in_bytes` is the third part: what the program needs while it
# runs, mostly activations that are stored for the backward pass.

# %% tags=["measured"]
cost = plain.cost_analysis()
duration = 1e-3 * min(epoch(False) for _ in range(3))
print(f"{cost['flops'] / 1e6:.0f} MFLOP and {cost['bytes accessed'] / 1e6:.0f} MB accessed per step")
intensity = cost["flops"] / cost["bytes accessed"]
print(f"so about {cost['flops'] / duration / 1e9:.0f} GFLOP/s; {intensity:.1f} FLOP per byte")
assert cost["flops"] > 5 * 256 * (64 * 512 + 512 * 512)

# %% [markdown]
# FLOPs per byte, the *arithmetic intensity*, tells what limits a program. A processor can execute tens of operations in
# the time that memory takes to deliver one byte. Below that ratio extra arithmetic is free, and fewer passes over
# memory are what helps. Two warnings: the body of a scan is counted once (page 12), and the bytes are an estimate.
#
# ## The profiler
#
# The profiler, `jax.profiler.trace`, records what ran when. View the trace with TensorBoard's profile plugin or at
# ui.perfetto.dev; or read it here, since it is JSON.

# %% tags=["measured"]
carry = (trainables, state)
with jax.profiler.trace("profile"):
    for number in range(5):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            *carry, value = plain(*carry, images, labels)
    jax.block_until_ready(value)

[path] = glob.glob("profile/**/*.trace.json.gz", recursive=True)
with gzip.open(path) as file:
    events = json.load(file)["traceEvents"]
durations = Counter()
for event in events:
    if event.get("args", {}).get("hlo_op"):  # XLA operations, not Python calls
        durations[event["name"]] += event["dur"] / 1e3
print(f"{os.path.getsize(path) / 1e3:.0f} kB, {len(events):,} events. The longest operations:")
for name, each in durations.most_common(5):
    print(f"{each:8.2f} ms  {name}")
assert durations

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 2.6))
executed = [event for event in events if event.get("args", {}).get("hlo_op")]
first = min(event["ts"] for event in executed)
threads = {thread: row for row, thread in enumerate(sorted({event["tid"] for event in executed if event["dur"] > 1}))}
executed = [event for event in executed if event["tid"] in threads]
dot = [event for event in executed if "dot" in event["name"] or "ynn" in event["name"]]
for group, color, label in ((executed, "#4477AA", "fused loops"), (dot, "#EE6677", "matrix products")):
    for event in group:
        start = (event["ts"] - first) / 1e3
        axes.broken_barh([(start, max(event["dur"] / 1e3, 0.01))], (threads[event["tid"]] - 0.4, 0.8), facecolor=color)
    axes.plot([], [], color=color, linewidth=6, label=label)
axes.set(
    xlabel="milliseconds", yticks=list(threads.values()), yticklabels=[f"thread {row}" for row in threads.values()]
)
axes.set_title("Profiler trace of five steps", fontsize=10, loc="left")
axes.grid(visible=False, axis="y")
axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))

# %% [markdown]
# What to look for, in this order:
#
# 1. **Gaps** between steps on the device. The host is late: loading data, reading values, or dispatching too many small
#    calls.
# 2. **Compilation** in the middle of training: a shape changed (page 4).
# 3. **The few operations that take most of the time.** They should be the matrix products. If they are loops over
#    memory, look for missed fusions, transposes and copies.
# 4. **Transfers** between host and device in every step.
#
# ## Good to know
#
# - `block_until_ready` on one output waits for the whole program that computes it, but not for others still in the
#   queue.
# - An error in a running program is raised where its result is *read*, not where it was called.
# - NumPy arrays passed to a jitted function are copied to the device on every call. Put constant data there once.
# - The first call is slow again in every new process. `jax.config.update("jax_compilation_cache_dir", folder)` enables
#   the persistent compilation cache, which keeps compiled programs between runs.
