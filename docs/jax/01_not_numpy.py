# %% [markdown]
# # JAX is not a faster NumPy
#
# `jax.numpy` looks like NumPy, so the first thing people do is to change the import and wait for the speed. On a CPU
# the program gets slower. This page shows why, and what to do instead.

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np


def milliseconds(call, number=10):
    """The best of five rounds: other programs only ever make a round slower."""
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


# %% [markdown]
# Here is a function with a dozen operations on arrays: the loss of a small robust regression. It is written once, over
# whichever NumPy it is given.


# %%
def loss(np, x, y, w):
    r = np.tanh(x * w) - y
    smooth = np.where(np.abs(r) < 1, 0.5 * r**2, np.abs(r) - 0.5)
    return np.mean(smooth * np.exp(-0.1 * r**2) + 0.01 * np.sqrt(1 + w**2))


def eager(x, y, w):
    return loss(jnp, x, y, w)


jitted = jax.jit(eager)

# %% [markdown]
# The three ways to run it agree.

# %%
rng = np.random.default_rng(0)
x, y, w = (rng.normal(size=1000).astype(np.float32) for _ in range(3))
print(f"NumPy {loss(np, x, y, w):.5f}   JAX {eager(x, y, w):.5f}   JAX jitted {jitted(x, y, w):.5f}")

# %% [markdown]
# ## Measured
#
# Now the same for arrays of ten numbers up to four million.

# %% tags=["measured"]
sizes = [10**k for k in range(1, 7)] + [4 * 10**6]
times = {name: [float("inf")] * len(sizes) for name in ("NumPy", "JAX, op by op", "JAX, one jit")}
for _ in range(3):  # three times around, so that a busy moment of the machine spoils no point for good
    for i, size in enumerate(sizes):
        x, y, w = (rng.normal(size=size).astype(np.float32) for _ in range(3))
        on_device = jnp.asarray(x), jnp.asarray(y), jnp.asarray(w)
        number = 20 if size < 10**5 else 1
        calls = (lambda: loss(np, x, y, w)), (lambda: eager(*on_device)), (lambda: jitted(*on_device))
        for column, call in zip(times.values(), calls, strict=True):
            column[i] = min(column[i], milliseconds(call, number))

print("numbers   " + "".join(f"{name:>16}" for name in times))
for i, size in enumerate(sizes):
    print(f"{size:9,}" + "".join(f"{column[i]:13.3f} ms" for column in times.values()))
numpy_ms, eager_ms, jit_ms = times.values()
assert eager_ms[0] > 2 * numpy_ms[0]  # small arrays: JAX op by op loses to NumPy
assert jit_ms[0] < eager_ms[0] / 5  # the same arrays under one jit
assert jit_ms[-1] < numpy_ms[-1] and jit_ms[-1] < eager_ms[-1]  # large ones

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots()
for (name, column), marker in zip(times.items(), "so^", strict=True):
    axes.loglog(sizes, column, marker=marker, label=name)
axes.set(xlabel="numbers in each array", ylabel="milliseconds a call", title="One function, three ways to run it")
axes.legend(frameon=False)

# %% [markdown]
# Two different things are to be seen.
#
# **On the left, where arrays are small, the cost of a call is what counts.** Each `jnp` operation goes through Python,
# looks up a compiled kernel for its shapes, allocates a result and launches the kernel. That is several times what
# NumPy needs, for each operation. Under one `jit` all of it is paid once for the whole function.
#
# **On the right, where arrays are large, memory is what counts.** NumPy and JAX op by op both write every intermediate
# result to memory and read it back: `x * w`, then its `tanh`, then the difference. Under `jit` XLA sees the whole
# function, and computes it in one or two passes, in which a number stays in a register from the first
# operation to the last. It also uses both cores, which NumPy's elementwise functions do not.
#
# How many operations does each way run? Op by op it is one for each line of the function's jaxpr, which page 2
# explains.

# %% tags=["version"]
operations = jax.make_jaxpr(eager)(x, y, w).jaxpr.eqns
print(len(operations), "operations, one after another:", *(equation.primitive.name for equation in operations))

# %% [markdown]
# ## Where op by op hides
#
# The lesson is not "add `@jax.jit` somewhere". It is that **nothing in your inner loop may stand outside of `jit`**.
# These are the usual leaks; each looks free and is not.

# %% tags=["measured"]
state = {"w": jnp.ones(1000), "step": jnp.zeros((), jnp.int32)}


@jax.jit
def step(state):
    return {"w": state["w"] * 0.99, "step": state["step"] + 1}


def leaky(state):
    state = step(state)
    rate = 0.1 / (1 + state["step"])  # two operations on the device, one by one
    return {"w": jnp.clip(state["w"] - rate * 1e-3, -1, 1), "step": state["step"]}  # and three or more here


@jax.jit
def tight(state):
    return leaky(state)


leak, whole = milliseconds(lambda: leaky(state), 50), milliseconds(lambda: tight(state), 50)
print(f"update half outside of jit: {1e3 * leak:.0f} microseconds; all of it inside: {1e3 * whole:.0f}")
assert leak > 3 * whole

# %% [markdown]
# ## What I would have wished to know
#
# - JAX without `jit` is for looking at values, not for computing.
# - On a GPU the left half of the figure reaches much further to the right: launching a kernel costs about the same,
#   and the kernel itself is done sooner. A hundred thousand numbers are a *small* array there.
# - `jit` is not a small decoration for a few hot functions, as `numba` is. It is how JAX is meant to be run. Write the
#   whole step as one function; page 3 measures what is lost otherwise.
