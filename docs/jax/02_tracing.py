# %% [markdown]
# # Tracing
#
# Tracing is how `jax.jit` reads your function: it calls the function once with abstract values, *tracers*, in place of
# arrays, records every operation applied to them, and compiles that record. It never looks at your Python code. The
# later pages all build on this.

# %%
import re

import jax
import jax.numpy as jnp


def standardize(x):
    print("Python runs; x is", type(x).__name__, x.shape)
    x = x - x.mean()
    return jnp.tanh(x / jnp.sqrt((x**2).mean() + 1e-6))


fast = jax.jit(standardize)
x = jnp.arange(8.0)
for _ in range(3):
    y = fast(x)
print([f"{value:.2f}" for value in y])

# %% [markdown]
# Three calls, one print. The first call *traced* the function: Python ran, and `x` was a tracer, which has a shape and
# a dtype but no values. The second and third calls found the compiled program in the cache by the shape and dtype of
# `x`, and the function's Python code did not run at all.
#
# ## Stage one: the jaxpr
#
# Tracing produces a jaxpr, a small functional program without any Python in it: no objects, no loops over lists, no
# `if`. Read each line, an *equation*, as *name : type = primitive[parameters] inputs*.

# %% tags=["version"]
jaxpr = jax.make_jaxpr(standardize)(x)
print(jaxpr)

# %% [markdown]
# Note what is gone. `mean` became a sum and a division by 8.0: the length of `x` was known while tracing, so it is now
# a constant. `1e-6` is a constant too, rounded to float32. The `print` is not in the jaxpr. It was not even called this
# time, since JAX had already traced `standardize` for this shape and cached the result.
#
# A jaxpr is an ordinary Python object that you can traverse. Page 12 does so.

# %%
[equation.primitive.name for equation in jaxpr.jaxpr.eqns]

# %% [markdown]
# ## Stage two: StableHLO
#
# `lower` translates the jaxpr, equation by equation, into StableHLO, the compiler's input language. Nothing is
# optimized yet.

# %%
lowered = jax.jit(standardize).lower(x)
text = lowered.as_text()
print(len(re.findall(r"stablehlo\.(?!constant)", text)), "operations, not counting constants. The last lines:")
print("\n".join(text.splitlines()[-6:]))

# %% [markdown]
# ## Stage three: optimized HLO
#
# `compile` has XLA optimize the program; it takes most of the time, and the speed comes from here. The optimized HLO is
# long, but two things in it are easy to read: the *entry computation*, which lists what actually runs, and the
# *fusions*, each of which is one loop over memory.

# %%
compiled = lowered.compile()


def fusions(compiled):
    """The fusions of a compiled program in execution order, each as the list of its operations."""
    blocks = re.findall(r"^(?:ENTRY )?%([\w.-]+) .*?\{\n(.*?)^\}", compiled.as_text(), re.S | re.M)
    bodies = dict(blocks)
    entry = blocks[-1][1]
    found = []
    for name in re.findall(r" fusion\(.*?calls=%([\w.-]+)", entry):
        inside = re.findall(r"= \S+ ([a-z]+)\(", bodies[name])
        found.append([op for op in inside if op not in ("parameter", "constant", "broadcast", "bitcast")])
    return found


for number, inside in enumerate(fusions(compiled), 1):
    print(f"pass {number}:", " ".join(inside))

# %% [markdown]
# Ten equations have become three passes over `x`. The first sums `x`. The second subtracts the mean, squares, sums, and
# takes the square root. The third subtracts the mean *again*, scales and applies `tanh`.
#
# Two details may be surprising:
#
# - `subtract` appears twice. XLA recomputes it in the third pass rather than write the difference to memory and read it
#   back. Arithmetic is cheap, memory traffic is not.
# - The divisions are gone. `x / sqrt(v)` became a multiplication by `rsqrt(v)`, and `/ 8` a multiplication by 0.125. So
#   do not expect a jitted result to be bitwise equal to the eager one.

# %%
assert len(fusions(compiled)) == 3
assert sum(inside.count("subtract") for inside in fusions(compiled)) == 2
assert not any("divide" in inside for inside in fusions(compiled))

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 3.2))
axes.set(xlim=(0, 10), ylim=(0, 6.2))
axes.axis("off")
colors = ["#BBCCEE", "#CCDDAA", "#FFCCCC"]


def box(x, y, words, color):
    style = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "#555555"}
    axes.text(x, y, words, ha="center", va="center", fontsize=8, bbox=style)


def arrow(start, end, words=""):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.15, words, ha="center", fontsize=8)


axes.text(0, 5.9, "jaxpr: ten operations", weight="bold")
for i, equation in enumerate(jaxpr.jaxpr.eqns):
    box(0.5 + i, 4.9, equation.primitive.name.replace("_", "\n"), colors[(i > 1) + (i > 7)])
axes.text(0, 3.6, "optimized HLO: three passes", weight="bold")
centers = (0.8, 4.4, 8.4)
for i, inside in enumerate(fusions(compiled)):
    middle = len(inside) // 2 if len(inside) > 3 else len(inside)
    box(centers[i], 2.5, " ".join(inside[:middle]) + "\n" + " ".join(inside[middle:]), colors[i])
    arrow((centers[i], 0.9), (centers[i], 1.9))
arrow((1.4, 2.5), (2.9, 2.5), "sum")
arrow((5.9, 2.5), (7.2, 2.5), "sum, 1 / std")
arrow((8.4, 3.1), (8.4, 3.8), "")
axes.text(8.6, 3.4, "y, to memory", fontsize=8)
axes.barh(0.5, 10, height=0.7, color="#EEEEEE", edgecolor="#999999")
axes.text(5, 0.5, "x, in memory: read once by each pass", ha="center", va="center", fontsize=9)

# %% [markdown]
# ## Tracing a training step
#
# A training step traced as one function, forward pass, backward pass and update, is a single jaxpr: the gradient is
# just more equations, and XLA sees all of them. Here is a small mlax network: count the operations that were traced,
# then those that run.

# %% tags=["version"]
import mlax
from mlax import nn

model = mlax.Series(up=nn.Linear(128), gelu=jax.nn.gelu, down=nn.Linear(1))
batch = jnp.ones((32, 64))
trainables, _ = model.init(jax.random.key(0), batch)


def loss(trainables, batch):
    return jnp.mean(model.fwd(batch, trainables)[0] ** 2)


def count(jaxpr):
    """The number of equations in a jaxpr, including nested jaxprs."""
    inner = [value for equation in jaxpr.eqns for value in equation.params.values() if hasattr(value, "eqns")]
    return len(jaxpr.eqns) + sum(count(getattr(each, "jaxpr", each)) for each in inner)


step = jax.jit(jax.value_and_grad(loss))
operations = count(step.trace(trainables, batch).jaxpr.jaxpr)
compiled = step.lower(trainables, batch).compile()
text = compiled.as_text().split("ENTRY")[1]
runs = len(re.findall(r" fusion\(", text)) + len(re.findall(r" dot\(", text))
print(f"{operations} operations were traced; {runs} loops and matrix products run")
assert runs < operations / 2

# %% [markdown]
# ## Good to know
#
# - *Tracing* takes Python time, which grows with the number of operations. *Compiling* usually takes longer. Later
#   calls skip both. `jax.jit(f).trace(x)`, `.lower()` and `.compile()` run the stages one at a time, so that each can
#   be timed.
# - Shapes and dtypes are Python values while tracing: `x.shape[0]` is an int, `if x.ndim == 2` is fine. Only the
#   *values* of arrays are unknown.
# - `jax.eval_shape(f, x)` stops after tracing. It returns shapes and dtypes and allocates nothing, which is how mlax
#   infers the input shapes of your layers.

# %%
jax.eval_shape(standardize, jax.ShapeDtypeStruct((10**9,), jnp.float32))
