# %% [markdown]
# # A transformation of one's own
#
# `grad` and `vmap` are programs that read jaxprs and write jaxprs. You can write such programs too, in a page of
# Python. This page has three: one that counts, one that finds the first NaN, and one that changes what is computed.
# They run on every version of JAX that mlax runs on.

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
# ## What a jaxpr is made of
#
# Each line is an *equation*: a primitive, its settings (`params`), the variables that go in and those that come out.
# Some equations hold a jaxpr of their own among their settings: a jitted function, the body of a loop, the branches of
# a `cond`.

# %%
model = mlax.Series(up=nn.Linear(8), gelu=mlax.F(jax.nn.gelu), norm=nn.LayerNorm(), head=nn.Linear(2))
x = jnp.arange(12.0).reshape(4, 3)
trainables, _ = model.init(jax.random.key(0), x)


def forward(trainables, x):
    return model.fwd(x, trainables)[0]


jaxpr = jax.make_jaxpr(forward)(trainables, x)
product = jaxpr.jaxpr.eqns[0]
print(product.primitive, [v.aval.str_short() for v in product.invars], "->", product.outvars[0].aval.str_short())
print("in layer", product.source_info.name_stack)


# %% [markdown]
# Two helpers hide what differs between versions: in older ones a jaxpr with its constants ("closed") and one without
# are two classes, in newer ones they are one.


# %%
def opened(jaxpr):
    """The jaxpr itself, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def inner(equation):
    """The jaxprs that an equation holds."""
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [value for value in values if hasattr(opened(value)[0], "eqns")]


# %% [markdown]
# ## One: count without running
#
# To count the arithmetic of a function nothing has to be computed: shapes are in the variables. The body of a scan
# counts as often as it runs.


# %%
def flops(jaxpr, by=None, times=1, layer=""):
    """Multiplications and additions of all matrix products, by layer."""
    by = Counter() if by is None else by
    for equation in opened(jaxpr)[0].eqns:
        here = layer or str(equation.source_info.name_stack)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            by[here] += times * 2 * equation.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
        for each in inner(equation):
            flops(each, by, times * equation.params.get("length", 1), here)
    return by


counted = flops(jaxpr)
print(dict(counted))
assert sum(counted.values()) == inspect.flops(jaxpr)  # mlax's own says the same

# %% [markdown]
# XLA's own count, `compiled.cost_analysis()`, takes the body of a scan once, however often it runs. This one does not:


# %%
def looped(x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=10)[0]


square = jnp.eye(64)
by_xla = jax.jit(looped).lower(square).compile().cost_analysis()["flops"]
by_us = flops(jax.make_jaxpr(looped)(square)).total()
print(f"by us {by_us:,}, which is 10 x 2 x 64³; XLA says less: {by_xla < by_us / 5}")

# %% [markdown]
# ## Two: an interpreter
#
# Now with values. An interpreter walks over the equations, keeps the value of each variable in a dict, and asks `bind`
# to do what the equation says. That is all there is to it. `rule` is where we come in: it sees each equation with its
# inputs.


# %%
STEP_INTO = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


def run(equation, inputs):
    """What the equation says."""
    results = equation.primitive.bind(*inputs, **equation.params)
    return results if equation.primitive.multiple_results else [results]


def interpret(jaxpr, args, rule=run):
    """Evaluate a jaxpr, equation by equation."""
    jaxpr, consts = opened(jaxpr)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(variable):
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(variable) for variable in equation.invars]
        if equation.primitive.name in STEP_INTO:
            results = interpret(inner(equation)[0], inputs, rule)
        else:
            results = rule(equation, inputs)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def with_rule(rule, function):
    """`function`, traced when it is called, and interpreted by a rule of ours."""

    def interpreted(*args):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), interpret(jaxpr, jax.tree.leaves(args), rule))

    return interpreted


y = with_rule(run, forward)(trainables, x)
print("the same as calling it:", bool(jnp.allclose(y, forward(trainables, x), atol=1e-6)))


# %% [markdown]
# It steps into functions that were jitted, and takes loops and branches as one operation each. Custom derivatives are
# stepped into as well, and so are lost: fine for looking, and a thing to know.
#
# A rule that looks at the results is a NaN hunter. It names the operation, the layer and the line, where the loss only
# says `nan`.


# %%
class Found(Exception):
    """The first operation that made a NaN from inputs without one."""


def first_nan(function):
    """`function`, but it stops at the first NaN."""

    def rule(equation, inputs):
        results = run(equation, inputs)
        bad = [jnp.issubdtype(r.dtype, jnp.inexact) and bool(jnp.isnan(r).any()) for r in results]
        if any(bad):
            what, where = equation.primitive.name, summarize(equation.source_info)
            raise Found(
                f"{what} of {', '.join(map(str, inputs))}, at {where}, in layer {equation.source_info.name_stack}"
            )
        return results

    return with_rule(rule, function)


def normalise(x):
    with jax.named_scope("normalise"):
        return x / jnp.sqrt(jnp.sum(x**2))


def loss(x):
    scaled = normalise(x)
    with jax.named_scope("entropy"):
        return -jnp.sum(scaled * jnp.log(scaled))


print("a good input:", first_nan(loss)(jnp.array([1.0, 2.0])), " a bad one:", loss(jnp.array([0.0, 3.0])))

# %% tags=["raises-exception", "version"]
first_nan(loss)(jnp.array([0.0, 3.0]))

# %% [markdown]
# The same interpreter, with a rule that only writes down, shows how a NaN spreads:

# %% tags=["drawing"]
import numpy as np
from matplotlib import pyplot as plt

seen = []


def noted(equation, inputs):
    results = run(equation, inputs)
    seen.append((equation.primitive.name, np.asarray(results[0])))
    return results


with_rule(noted, loss)(jnp.array([0.0, 3.0]))
figure, axes = plt.subplots(figsize=(7.2, 1.5))
axes.set(xlim=(-0.6, len(seen) - 0.4), ylim=(0, 2))
axes.axis("off")
for i, (name, value) in enumerate(seen):
    bad = bool(np.isnan(value).any())
    style = {"boxstyle": "round,pad=0.4", "facecolor": "#FFCCCC" if bad else "#CCDDAA", "edgecolor": "#555555"}
    axes.text(i, 1.3, name.replace("_", "\n"), ha="center", va="center", fontsize=8, bbox=style)
    axes.text(
        i, 0.3, "\n".join(f"{number:.2g}" for number in np.atleast_1d(value)), ha="center", va="center", fontsize=8
    )

# %% [markdown]
# The function that is hunted may be anything that JAX can trace, a gradient too:

# %% tags=["raises-exception", "version"]
first_nan(jax.grad(lambda x: jnp.sum(normalise(x))))(jnp.zeros(2))

# %% [markdown]
# ## Three: change what is computed
#
# The rule may do something else than what the equation says. This one rounds what goes into a matrix product to
# bfloat16, whoever wrote the product, and leaves all other operations alone.


# %%
def narrow_products(function):
    """`function`, with what goes into every matrix product rounded to bfloat16."""

    def rule(equation, inputs):
        if equation.primitive.name != "dot_general":
            return run(equation, inputs)
        return run(equation, [value.astype(jnp.bfloat16).astype(value.dtype) for value in inputs])

    return with_rule(rule, function)


exact, rounded = forward(trainables, x), narrow_products(forward)(trainables, x)
print(f"largest difference {jnp.abs(exact - rounded).max():.3f}")

# %% [markdown]
# **And now the reward.** The interpreter never looks at values itself, it only hands them on to JAX's operations. So it
# can be traced like any other function: `jit`, `grad` and `vmap` work on the result. The dict and the loop run while
# tracing, and are gone in the compiled program.

# %%
fast = jax.jit(narrow_products(forward))
assert jnp.allclose(fast(trainables, x), rounded, atol=1e-2)
gradient = jax.jit(jax.grad(lambda trainables: narrow_products(forward)(trainables, x).sum()))(trainables)
print(jax.tree.map(jnp.shape, gradient))
text = jax.jit(narrow_products(forward)).lower(trainables, x).as_text()
print(
    text.count("bf16"),
    "mentions of bfloat16 in the program;",
    jax.jit(forward).lower(trainables, x).as_text().count("bf16"),
    "before",
)

# %% [markdown]
# `first_nan` cannot be jitted, since its `bool(...)` asks for a value. That is the whole difference between the two.
#
# ## What I would have wished to know
#
# - `jax.extend.core` is the public door to these classes. `jax.core` and `jax._src` move from version to version.
# - Names of primitives change too (`pjit` is now `jit`, `remat2` was `checkpoint`): look for jaxprs in the params, not
#   for names, where you can.
# - `eqn.source_info.name_stack` holds the layer; mlax puts the path of every part there, and `jax.named_scope` does it
#   for your code.
# - For an everyday audit take what is there: `mlax.inspect`, `mlax.dtypes.audit`. They are built like this page.
