# %% [markdown]
# # What tracing is
#
# `jit` never sees your Python code. It calls your function once, with stand-ins in place of arrays, writes down every
# operation that the stand-ins meet, and compiles that list. Everything on the later pages follows from this.

# %%
import re

import jax
import jax.numpy as jnp


def standardise(x):
    print("Python runs; x is", type(x).__name__, x.shape)
    x = x - x.mean()
    return jnp.tanh(x / jnp.sqrt((x**2).mean() + 1e-6))


fast = jax.jit(standardise)
x = jnp.arange(8.0)
for _ in range(3):
    y = fast(x)
print([f"{value:.2f}" for value in y])

# %% [markdown]
# Three calls, one print. The first call *traced*: Python ran, `x` was a tracer, which has a shape and a dtype and no
# values. The second and third found the compiled program by the shape and dtype of `x`, and Python did not run at all.
#
# ## Stage one: the jaxpr
#
# What tracing wrote down is called a jaxpr. It is a short program in a language with no Python in it: no objects, no
# loops over lists, no `if`. Read each line as *name : type = operation[settings] inputs*.

# %% tags=["version"]
jaxpr = jax.make_jaxpr(standardise)(x)
print(jaxpr)

# %% [markdown]
# Note what is gone. `mean` became a sum and a division by 8.0: the length of `x` was known while tracing, so it is now
# a constant. `1e-6` is a constant too, in float32, with the digits that float32 has. The `print` left no trace; it was
# not even called, since JAX had traced `standardise` for this shape before, and remembers.
#
# A jaxpr is data, and it is yours to walk over. Page 12 does so.

# %%
[equation.primitive.name for equation in jaxpr.jaxpr.eqns]

# %% [markdown]
# ## Stage two: StableHLO
#
# `lower` translates the jaxpr, line by line, into the language of the compiler. Nothing is optimised yet.

# %%
lowered = jax.jit(standardise).lower(x)
text = lowered.as_text()
print(len(re.findall(r"stablehlo\.(?!constant)", text)), "operations, constants aside. The last lines:")
print("\n".join(text.splitlines()[-6:]))

# %% [markdown]
# ## Stage three: what XLA made of it
#
# `compile` is where time goes and where speed comes from. The compiled text is long, but two things in it are easy
# to read: the *entry*, which lists what really runs, and the *fusions*, each of which is one loop over memory.

# %%
compiled = lowered.compile()


def fusions(compiled):
    """What runs in a compiled program, in order: each fusion with the operations inside it."""
    blocks = re.findall(r"^(?:ENTRY )?%([\w.-]+) .*?\{\n(.*?)^\}", compiled.as_text(), re.S | re.M)
    bodies = dict(blocks)
    entry = blocks[-1][1]
    found = []
    for called in re.findall(r" fusion\(.*?calls=%([\w.-]+)", entry):
        inside = re.findall(r"= \S+ ([a-z]+)\(", bodies[called])
        found.append([name for name in inside if name not in ("parameter", "constant", "broadcast", "bitcast")])
    return found


for number, inside in enumerate(fusions(compiled), 1):
    print(f"pass {number}:", " ".join(inside))

# %% [markdown]
# Ten lines of jaxpr have become three passes over `x`. The first adds `x` up. The second subtracts the mean, squares,
# adds up, and takes the root. The third subtracts the mean *again*, scales and applies `tanh`.
#
# Two surprises are worth a look:
#
# - `subtract` is there twice. XLA computes it anew in the third pass rather than to write the difference to memory and
#   read it back. Arithmetic is cheap, memory is not.
# - The division is gone. `x / sqrt(v)` became a product with `rsqrt(v)`, and `/ 8` a product with 0.125. So do not
#   expect the last bit of a jitted result to be the last bit of the result op by op.

# %%
assert len(fusions(compiled)) == 3
assert sum(inside.count("subtract") for inside in fusions(compiled)) == 2
assert not any("divide" in inside for inside in fusions(compiled))

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 3.2))
axes.set(xlim=(0, 10), ylim=(0, 6.2))
axes.axis("off")
colours = ["#BBCCEE", "#CCDDAA", "#FFCCCC"]


def box(x, y, words, colour):
    style = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#555555"}
    axes.text(x, y, words, ha="center", va="center", fontsize=8, bbox=style)


def arrow(start, end, words=""):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#555555"})
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.15, words, ha="center", fontsize=8)


axes.text(0, 5.9, "traced: ten operations", weight="bold")
for i, equation in enumerate(jaxpr.jaxpr.eqns):
    box(0.5 + i, 4.9, equation.primitive.name.replace("_", "\n"), colours[(i > 1) + (i > 7)])
axes.text(0, 3.6, "run: three passes", weight="bold")
places = (0.8, 4.4, 8.4)
for i, inside in enumerate(fusions(compiled)):
    middle = len(inside) // 2 if len(inside) > 3 else len(inside)
    box(places[i], 2.5, " ".join(inside[:middle]) + "\n" + " ".join(inside[middle:]), colours[i])
    arrow((places[i], 0.9), (places[i], 1.9))
arrow((1.4, 2.5), (2.9, 2.5), "sum")
arrow((5.9, 2.5), (7.2, 2.5), "sum, 1 / deviation")
arrow((8.4, 3.1), (8.4, 3.8), "")
axes.text(8.6, 3.4, "y, to memory", fontsize=8)
axes.barh(0.5, 10, height=0.7, color="#EEEEEE", edgecolor="#999999")
axes.text(5, 0.5, "x, in memory: read once by each pass", ha="center", va="center", fontsize=9)

# %% [markdown]
# ## Why this matters for training
#
# A training step is forward, backward and update. Traced as one function, its gradient is just more lines of the same
# jaxpr, and XLA sees all of it. Here is a small network of mlax: count its operations, then what is left of them.

# %% tags=["version"]
import mlax
from mlax import nn

model = mlax.Series(up=nn.Linear(128), gelu=mlax.F(jax.nn.gelu), down=nn.Linear(1))
batch = jnp.ones((32, 64))
trainables, _ = model.init(jax.random.key(0), batch)


def loss(trainables, batch):
    return jnp.mean(model.fwd(batch, trainables)[0] ** 2)


def count(jaxpr):
    """The operations of a jaxpr, those inside of inner functions too."""
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
# ## What I would have wished to know
#
# - *Tracing* costs Python time, and grows with the number of operations written. *Compiling* costs more. *Running*
#   costs neither. `jax.jit(f).trace(x)`, `.lower()` and `.compile()` are the three, one by one, and each can be timed.
# - Shapes and dtypes are Python values while tracing: `x.shape[0]` is an int, `if x.ndim == 2` is fine. Only the
#   *values* of arrays are missing.
# - `jax.eval_shape(f, x)` stops after the first stage. It gives shapes and dtypes and allocates nothing, which is how
#   mlax finds out the sizes of your layers.

# %%
jax.eval_shape(standardise, jax.ShapeDtypeStruct((10**9,), jnp.float32))
