# %% [markdown]
# # JAX is not a faster NumPy
#
# `jax.numpy` has NumPy's API, so the first thing people do is change the import and wait for the speed-up. On a CPU the
# program usually gets slower. This page shows why, and what to do instead: compile it with `jax.jit`.

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np


def milliseconds(call, number=10):
    """The best of five repeats: other processes can only make a repeat slower."""
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


# %% [markdown]
# Here is a function of about a dozen array operations: the loss of a small robust regression. It takes the NumPy module
# as an argument, so that it is written once.


# %%
def loss(np, x, y, w):
    r = np.tanh(x * w) - y
    smooth = np.where(np.abs(r) < 1, 0.5 * r**2, np.abs(r) - 0.5)
    return np.mean(smooth * np.exp(-0.1 * r**2) + 0.01 * np.sqrt(1 + w**2))


def eager(x, y, w):
    return loss(jnp, x, y, w)


jitted = jax.jit(eager)

# %% [markdown]
# The three versions agree.

# %%
rng = np.random.default_rng(0)
x, y, w = (rng.normal(size=1000).astype(np.float32) for _ in range(3))
print(f"NumPy {loss(np, x, y, w):.5f}   JAX {eager(x, y, w):.5f}   JAX jitted {jitted(x, y, w):.5f}")

# %% [markdown]
# ## Benchmark: NumPy, eager JAX and jit
#
# The same comparison for arrays of ten to four million elements. Without `jit`, JAX runs *eagerly*: each operation is
# dispatched and executed separately.

# %% tags=["measured"]
sizes = [10**k for k in range(1, 7)] + [4 * 10**6]
times = {name: [float("inf")] * len(sizes) for name in ("NumPy", "JAX, eager", "JAX, jit")}
for _ in range(3):  # three rounds, so that a busy moment of the machine cannot ruin a point
    for i, size in enumerate(sizes):
        x, y, w = (rng.normal(size=size).astype(np.float32) for _ in range(3))
        on_device = jnp.asarray(x), jnp.asarray(y), jnp.asarray(w)
        number = 20 if size < 10**5 else 1
        calls = (lambda: loss(np, x, y, w)), (lambda: eager(*on_device)), (lambda: jitted(*on_device))
        for column, call in zip(times.values(), calls, strict=True):
            column[i] = min(column[i], milliseconds(call, number))

print("elements  " + "".join(f"{name:>16}" for name in times))
for i, size in enumerate(sizes):
    print(f"{size:9,}" + "".join(f"{column[i]:13.3f} ms" for column in times.values()))
numpy_ms, eager_ms, jit_ms = times.values()
assert eager_ms[0] > 2 * numpy_ms[0]  # small arrays: eager JAX is slower than NumPy
assert jit_ms[0] < eager_ms[0] / 5  # the same arrays under jit
assert jit_ms[-1] < numpy_ms[-1] and jit_ms[-1] < eager_ms[-1]  # large ones

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots()
for (name, column), marker in zip(times.items(), "so^", strict=True):
    axes.loglog(sizes, column, marker=marker, label=name)
axes.set(xlabel="elements per array", ylabel="milliseconds per call", title="One function, executed three ways")
axes.legend(frameon=False)

# %% [markdown]
# The figure shows two separate effects.
#
# **Small arrays, on the left, are dominated by dispatch overhead.** Each `jnp` operation goes through Python, looks up
# a compiled kernel for its shapes, allocates its result and launches the kernel. That is several times what NumPy
# needs, for every operation. Under `jit` the overhead is paid once per call.
#
# **Large arrays, on the right, are dominated by memory bandwidth.** NumPy and eager JAX write every intermediate result
# to memory and read it back: `x * w`, then its `tanh`, then the difference. Under `jit` XLA sees the whole function and
# *fuses* it into one or two passes, in which a value stays in a register from the first operation to the last. XLA also
# uses both cores, which NumPy's elementwise functions do not.
#
# How many operations does eager mode execute? One for each equation of the function's jaxpr, which page 2 explains.

# %% tags=["version"]
operations = jax.make_jaxpr(eager)(x, y, w).jaxpr.eqns
print(len(operations), "operations, executed one by one:", *(equation.primitive.name for equation in operations))

# %% [markdown]
# ## Operations outside jit
#
# The lesson is not "add `@jax.jit` somewhere". It is that **everything in your inner loop belongs inside `jit`**. These
# operations are easily left outside; each looks free and is not.

# %% tags=["measured"]
state = {"w": jnp.ones(1000), "step": jnp.zeros((), jnp.int32)}


@jax.jit
def step(state):
    return {"w": state["w"] * 0.99, "step": state["step"] + 1}


def leaky(state):
    state = step(state)
    rate = 0.1 / (1 + state["step"])  # two operations, dispatched one by one
    return {"w": jnp.clip(state["w"] - rate * 1e-3, -1, 1), "step": state["step"]}  # and three or more here


@jax.jit
def tight(state):
    return leaky(state)


leak, whole = milliseconds(lambda: leaky(state), 50), milliseconds(lambda: tight(state), 50)
print(f"update partly outside jit: {1e3 * leak:.0f} microseconds; all of it inside: {1e3 * whole:.0f}")
assert leak > 3 * whole

# %% [markdown]
# ## Good to know
#
# - Use JAX without `jit` to inspect values, not to compute.
# - On a GPU the left half of the figure extends much further to the right: a kernel launch costs about the same, but
#   the kernel finishes sooner. A hundred thousand elements are a *small* array there.
# - `jit` is not a decorator for a few hot functions, as in Numba. It is how JAX is meant to be run. Write the whole
#   training step as one function; page 3 measures the cost of anything less.
