# %% [markdown]
# # Custom transformations of jaxprs
#
# Custom transformations are programs that read a jaxpr, as `grad` and `vmap` do, and you can write one in a page of
# Python. This page has three: one counts FLOPs, one finds the first NaN, and one changes what is computed. They run on
# every version of JAX that mlax supports.

# %%
import math
from collections import Counter

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.source_info_util import summarize

import mlax
from mlax import inspect, nn

# %% [markdown]
# ## The structure of a jaxpr
#
# A jaxpr is a list of *equations*: each has a primitive, its parameters (`params`), and its input and output variables.
# Some equations have jaxprs among their parameters: those of a jitted function, the body of a loop, the branches of a
# `cond`.

# %%
model = mlax.Series(up=nn.Linear(8), gelu=jax.nn.gelu, norm=nn.LayerNorm(), head=nn.Linear(2))
x = jnp.arange(12.0).reshape(4, 3)
trainables, _ = model.init(jax.random.key(0), x)


def forward(trainables, x):
    return model.fwd(x, trainables)[0]


jaxpr = jax.make_jaxpr(forward)(trainables, x)
product = jaxpr.jaxpr.eqns[0]
print(product.primitive, [v.aval.str_short() for v in product.invars], "->", product.outvars[0].aval.str_short())
print("in layer", product.source_info.name_stack)


# %% [markdown]
# Two helpers hide a difference between versions: in older ones, jaxprs with constants (`ClosedJaxpr`) and without are
# two classes, in newer ones they are one.


# %%
def unpack(jaxpr):
    """The jaxpr itself, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def nested_jaxprs(equation):
    """The jaxprs among the parameters of an equation."""
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [value for value in values if hasattr(unpack(value)[0], "eqns")]


# %% [markdown]
# ## Counting FLOPs
#
# Counting FLOPs needs no computation: the shapes are in the variables. The body of a scan is multiplied by its length.


# %%
def flops(jaxpr, by=None, times=1, layer=""):
    """The floating-point operations of all matrix products, by layer."""
    by = Counter() if by is None else by
    for equation in unpack(jaxpr)[0].eqns:
        name = layer or str(equation.source_info.name_stack)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            by[name] += times * 2 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        for nested in nested_jaxprs(equation):
            flops(nested, by, times * equation.params.get("length", 1), name)
    return by


counts = flops(jaxpr)
print(dict(counts))
assert sum(counts.values()) == inspect.flops(jaxpr)  # mlax's own function agrees

# %% [markdown]
# XLA's count, `compiled.cost_analysis()`, includes the body of a scan once, however often it runs. This one does not:


# %%
def scan_products(x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=10)[0]


square = jnp.eye(64)
by_xla = jax.jit(scan_products).lower(square).compile().cost_analysis()["flops"]
by_us = flops(jax.make_jaxpr(scan_products)(square)).total()
print(f"our count {by_us:,}, which is 10 x 2 x 64³; XLA's count is lower: {by_xla < by_us / 5}")

# %% [markdown]
# ## A jaxpr interpreter
#
# A jaxpr interpreter walks over the equations, stores the value of each variable in a dict, and evaluates each equation
# with `bind`. That is all there is to it. `rule` is the hook: it is called with each equation and its inputs.


# %%
STEP_INTO = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


def run(equation, inputs):
    """Evaluate the equation."""
    results = equation.primitive.bind(*inputs, **equation.params)
    return results if equation.primitive.multiple_results else [results]


def interpret(jaxpr, args, rule=run):
    """Evaluate a jaxpr, equation by equation."""
    jaxpr, consts = unpack(jaxpr)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(variable):
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(variable) for variable in equation.invars]
        if equation.primitive.name in STEP_INTO:
            results = interpret(nested_jaxprs(equation)[0], inputs, rule)
        else:
            results = rule(equation, inputs)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def with_rule(rule, function):
    """`function`, traced when it is called and interpreted with a custom rule."""

    def interpreted(*args):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), interpret(jaxpr, jax.tree.leaves(args), rule))

    return interpreted


y = with_rule(run, forward)(trainables, x)
print("equal to calling it directly:", bool(jnp.allclose(y, forward(trainables, x), atol=1e-6)))


# %% [markdown]
# It steps into jitted functions, and treats loops and branches as one operation each. It also steps into functions with
# custom derivatives, which loses their rules: fine for inspection, but good to know.
#
# A rule that checks the results finds NaNs. It reports the operation, the layer and the line, where the loss is only
# `nan`.


# %%
class FirstNaN(Exception):
    """The first operation that produced a NaN from inputs without one."""


def first_nan(function):
    """`function`, but raising an error at the first NaN."""

    def rule(equation, inputs):
        results = run(equation, inputs)
        bad = [jnp.issubdtype(r.dtype, jnp.inexact) and bool(jnp.isnan(r).any()) for r in results]
        if any(bad):
            what, where = equation.primitive.name, summarize(equation.source_info)
            raise FirstNaN(
                f"{what} of {', '.join(map(str, inputs))}, at {where}, in layer {equation.source_info.name_stack}"
            )
        return results

    return with_rule(rule, function)


def normalize(x):
    with jax.named_scope("normalize"):
        return x / jnp.sqrt(jnp.sum(x**2))


def loss(x):
    scaled = normalize(x)
    with jax.named_scope("entropy"):
        return -jnp.sum(scaled * jnp.log(scaled))


print("a good input:", first_nan(loss)(jnp.array([1.0, 2.0])), " a bad one:", loss(jnp.array([0.0, 3.0])))

# %% tags=["raises-exception", "version"]
first_nan(loss)(jnp.array([0.0, 3.0]))

# %% [markdown]
# The same interpreter, with a rule that only records, shows how a NaN propagates:

# %% tags=["drawing"]
import numpy as np
from matplotlib import pyplot as plt

trace = []


def record(equation, inputs):
    results = run(equation, inputs)
    trace.append((equation.primitive.name, np.asarray(results[0])))
    return results


with_rule(record, loss)(jnp.array([0.0, 3.0]))
figure, axes = plt.subplots(figsize=(7.2, 1.5))
axes.set(xlim=(-0.6, len(trace) - 0.4), ylim=(0, 2))
axes.axis("off")
for i, (name, value) in enumerate(trace):
    bad = bool(np.isnan(value).any())
    style = {"boxstyle": "round,pad=0.4", "facecolor": "#FFCCCC" if bad else "#CCDDAA", "edgecolor": "#555555"}
    axes.text(i, 1.3, name.replace("_", "\n"), ha="center", va="center", fontsize=8, bbox=style)
    elements = "\n".join(f"{element:.2g}" for element in np.atleast_1d(value))
    axes.text(i, 0.3, elements, ha="center", va="center", fontsize=8)

# %% [markdown]
# The function may be anything that JAX can trace, including a gradient:

# %% tags=["raises-exception", "version"]
first_nan(jax.grad(lambda x: jnp.sum(normalize(x))))(jnp.zeros(2))

# %% [markdown]
# ## Changing what is computed
#
# Changing the computation takes a rule that evaluates something other than the equation. This one rounds the inputs of
# every matrix product to bfloat16, wherever it was written, and leaves all other operations unchanged.


# %%
def bfloat16_matmuls(function):
    """`function`, with the inputs of every matrix product rounded to bfloat16."""

    def rule(equation, inputs):
        if equation.primitive.name != "dot_general":
            return run(equation, inputs)
        return run(equation, [value.astype(jnp.bfloat16).astype(value.dtype) for value in inputs])

    return with_rule(rule, function)


exact, rounded = forward(trainables, x), bfloat16_matmuls(forward)(trainables, x)
print(f"largest difference {jnp.abs(exact - rounded).max():.3f}")

# %% [markdown]
# **The interpreter composes with JAX's transformations.** It never inspects values itself, it only passes them to JAX's
# operations, so it can be traced like any other function: `jit`, `grad` and `vmap` work on the result. The dict and the
# loop run while tracing, and are not part of the compiled program.

# %%
fast = jax.jit(bfloat16_matmuls(forward))
assert jnp.allclose(fast(trainables, x), rounded, atol=1e-2)
gradient = jax.jit(jax.grad(lambda trainables: bfloat16_matmuls(forward)(trainables, x).sum()))(trainables)
print(jax.tree.map(jnp.shape, gradient))
after = jax.jit(bfloat16_matmuls(forward)).lower(trainables, x).as_text().count("bf16")
before = jax.jit(forward).lower(trainables, x).as_text().count("bf16")
print(f"the program mentions bfloat16 {after} times; {before} times before")

# %% [markdown]
# `first_nan` cannot be jitted, since its `bool(...)` needs a concrete value. That is the only difference between the
# two.
#
# ## Good to know
#
# - `jax.extend.core` is the public module for these classes. `jax.core` and `jax._src` change from version to version.
# - Names of primitives change too (`pjit` became `jit`, `checkpoint` became `remat2`): where you can, look for jaxprs
#   in the params, not for names.
# - `eqn.source_info.name_stack` holds the layer; mlax puts the path of every part there, and `jax.named_scope` does the
#   same for your code.
# - For everyday use there are `mlax.inspect` and `mlax.dtypes.audit`, which are built like this page.
