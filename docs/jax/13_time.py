# %% [markdown]
# # What takes the time
#
# JAX hands work to the device and comes back at once. That is why it is fast, and why most first measurements of it are
# wrong. This page measures rightly, then asks the compiler and the profiler.

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
# A jitted call returns an array that may not be there yet. Python goes on; whoever looks at the values waits.

# %% tags=["measured"]
matrix = jax.random.normal(jax.random.key(0), (800, 800)) / 28


@jax.jit
def work(x):
    for _ in range(8):
        x = jnp.tanh(x @ x)
    return x


work(matrix).block_until_ready()  # compiled now
began = time.perf_counter()
result = work(matrix)
returned = time.perf_counter()
result.block_until_ready()
done = time.perf_counter()
print(f"the call came back after {1e3 * (returned - began):.2f} ms, the result after {1e3 * (done - began):.0f} ms")
assert returned - began < (done - began) / 3

# %% [markdown]
# Three ways to time it, of which one is right:


# %% tags=["measured"]
def seconds(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


fresh = jax.jit(lambda x: work(x) + 1)
with_compilation = seconds(lambda: fresh(matrix).block_until_ready())
no_wait = min(seconds(lambda: fresh(matrix)) for _ in range(5))
jax.block_until_ready(fresh(matrix))
right = min(timeit.repeat(lambda: fresh(matrix).block_until_ready(), number=1, repeat=5))
print(f"first call, compilation and all: {1e3 * with_compilation:.0f} ms")
print(f"without waiting:                 {1e3 * no_wait:.2f} ms")
print(f"warmed up, waited for, best of five: {1e3 * right:.0f} ms")
assert with_compilation > right > no_wait

# %% [markdown]
# So: call once before measuring, end with `jax.block_until_ready` on everything that came out, take the best or the
# median of several rounds, and compare two things in the same run rather than with a number from yesterday.
#
# ## What waits without being asked
#
# In a training loop any look at a value makes Python wait for the device: `float(loss)`, `print(loss)`,
# `np.asarray(loss)`, `if loss < best`. While Python waits, it prepares nothing; when it goes on, the device has nothing
# to do.

# %% tags=["measured"]
model = mlax.Series(up=nn.Linear(512), relu=mlax.F(jax.nn.relu), mid=nn.Linear(512), head=nn.Linear(10))
optimizer = optim.AdamW(1e-3)
images, labels = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32), np.arange(256) % 10


def step(trainables, state, x, y):
    def loss(trainables):
        return optax.softmax_cross_entropy_with_integer_labels(model.fwd(x, trainables)[0], y).mean()

    value, grads = jax.value_and_grad(loss)(trainables)
    return *optimizer.update(grads, state, trainables), value


def epoch(look, step=jax.jit(step, donate_argnums=(0, 1)), steps=40):
    trainables, _ = model.init(jax.random.key(0), images)
    state = optimizer.init(trainables)
    *carried, value = step(trainables, state, images, labels)
    jax.block_until_ready(value)
    began = time.perf_counter()
    for _ in range(steps):
        prepared = np.tanh(images) * 0.5 + np.sort(images, axis=0)  # the host has work too: here, the next batch
        *carried, value = step(*carried, prepared, labels)
        if look:
            float(value)
    jax.block_until_ready(carried)
    return 1e3 * (time.perf_counter() - began) / steps


looking, not_looking = (min(epoch(look) for _ in range(4)) for look in (True, False))
print(f"a look at the loss in each step: {looking:.2f} ms a step; none: {not_looking:.2f} ms")
assert not_looking < looking * 1.05

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, rows = plt.subplots(2, 1, figsize=(7.2, 2.6), sharex=True)
host, device = 1.0, 1.6
for axes, wait, title in zip(rows, (True, False), ("a look in each step", "no look"), strict=True):
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
rows[1].set_xlabel("time: a drawing of why, not a measurement")

# %% [markdown]
# A step of mlax gives `Metrics`, which stay on the device in one array until `numbers()` is asked for. Ask every
# hundred steps.
#
# On a CPU host and "device" share the same two cores, and the difference depends on what else they do. On a GPU it is
# often a factor.
#
# ## Ask the compiler: cost and memory
#
# A compiled program knows what it needs before it runs.

# %%
trainables, _ = model.init(jax.random.key(0), images)
state = optimizer.init(trainables)
plain = jax.jit(step).lower(trainables, state, images, labels).compile()
donated = jax.jit(step, donate_argnums=(0, 1)).lower(trainables, state, images, labels).compile()
megabytes = 4 * mlax.count(trainables) / 1e6
print(f"weights {megabytes:.2f} MB, with the two slots of the optimizer {3 * megabytes:.2f} MB")
for name, compiled in (("plain", plain), ("donated", donated)):
    memory = compiled.memory_analysis()
    in_out = (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes) / 1e6
    in_place = memory.alias_size_in_bytes / 1e6
    print(f"{name:8} arguments and results {in_out:.2f} MB, of which written in place {in_place:.2f} MB")

# %% [markdown]
# Without donation the old state and the new one are both there. With it there is one. On a device that is full of
# weights, this decides whether a model fits. `temp_size_in_bytes` is the third part: what the program needs while it
# runs, mostly activations that wait for the backward pass.

# %% tags=["measured"]
cost = plain.cost_analysis()
took = 1e-3 * min(epoch(False) for _ in range(3))
print(f"{cost['flops'] / 1e6:.0f} MFLOP and {cost['bytes accessed'] / 1e6:.0f} MB read or written a step")
intensity = cost["flops"] / cost["bytes accessed"]
print(f"so about {cost['flops'] / took / 1e9:.0f} GFLOP/s; {intensity:.1f} FLOP for each byte")
assert cost["flops"] > 5 * 256 * (64 * 512 + 512 * 512)

# %% [markdown]
# FLOP for each byte tells what limits you. A processor can do some tens of operations in the time in which memory
# brings one byte. Below that number more arithmetic is free, and fewer passes over memory are what helps. Two warnings:
# the body of a scan is counted once (page 12), and bytes are estimated.
#
# ## Ask the profiler
#
# `jax.profiler.trace` writes down what happened when. View it with TensorBoard's profile plugin or at ui.perfetto.dev;
# or read it here, since it is JSON.

# %% tags=["measured"]
carried = (trainables, state)
with jax.profiler.trace("profile"):
    for number in range(5):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            *carried, value = plain(*carried, images, labels)
    jax.block_until_ready(value)

[path] = glob.glob("profile/**/*.trace.json.gz", recursive=True)
with gzip.open(path) as file:
    events = json.load(file)["traceEvents"]
spent = Counter()
for event in events:
    if event.get("args", {}).get("hlo_op"):  # what XLA ran, rather than what Python did
        spent[event["name"]] += event["dur"] / 1e3
print(f"{os.path.getsize(path) / 1e3:.0f} kB, {len(events):,} events. Most of the time went to")
for name, each in spent.most_common(5):
    print(f"{each:8.2f} ms  {name}")
assert spent

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 2.6))
ran = [event for event in events if event.get("args", {}).get("hlo_op")]
first = min(event["ts"] for event in ran)
threads = {thread: row for row, thread in enumerate(sorted({event["tid"] for event in ran if event["dur"] > 1}))}
ran = [event for event in ran if event["tid"] in threads]
dot = [event for event in ran if "dot" in event["name"] or "ynn" in event["name"]]
for group, colour, label in ((ran, "#4477AA", "fused loops"), (dot, "#EE6677", "matrix products")):
    for event in group:
        start = (event["ts"] - first) / 1e3
        axes.broken_barh([(start, max(event["dur"] / 1e3, 0.01))], (threads[event["tid"]] - 0.4, 0.8), facecolor=colour)
    axes.plot([], [], color=colour, linewidth=6, label=label)
axes.set(
    xlabel="milliseconds", yticks=list(threads.values()), yticklabels=[f"thread {row}" for row in threads.values()]
)
axes.set_title("Five steps, as the profiler saw them", fontsize=10, loc="left")
axes.grid(visible=False, axis="y")
axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))

# %% [markdown]
# What to look at, in this order:
#
# 1. **Gaps** between steps on the device. The host is late: reading data, looking at values, or too many small calls.
# 2. **Compilation** in the middle of training: a shape changed (page 4).
# 3. **The few operations that take most of the time.** Are they the products that they should be? If they are loops
#    over memory, look at what was not fused, and at transposes and copies.
# 4. **Copies** between host and device in each step.
#
# ## What I would have wished to know
#
# - `block_until_ready` on one output waits for the whole program it came from, but not for others still in the queue.
# - An error in a running program comes out where the result is *looked at*, not where the call was.
# - NumPy arrays given to a jitted function are copied to the device in each call. What stays the same, put there once.
# - The first call after a change is slow in every process. `jax.config.update("jax_compilation_cache_dir", folder)`
#   keeps compiled programs from one run to the next.
