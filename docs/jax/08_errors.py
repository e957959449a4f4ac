# %% [markdown]
# # Common errors
#
# These are the errors that beginners in JAX meet most often, each with its message, its cause and its fix. Most follow
# from page 2: while tracing, arrays have no values.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn

# %% [markdown]
# ## TracerBoolConversionError: `if` on a value


# %% tags=["raises-exception", "version"]
@jax.jit
def shrink(x):
    if jnp.abs(x).max() > 1:
        return x / jnp.abs(x).max()
    return x


shrink(jnp.array([1.0, 4.0]))

# %% [markdown]
# **Cause.** `if` needs True or False, and a tracer has no value. The same happens in `and`, `or`, `not`, `assert`,
# `max(a, b)`, `while` and `x in (...)`.
#
# **Fix.** `jnp.where` for elements, `lax.cond` for branches, `&`, `|`, `~` for logic, `jnp.maximum` for `max`.


# %%
@jax.jit
def shrink(x):
    size = jnp.abs(x).max()
    return jnp.where(size > 1, x / jnp.maximum(size, 1), x)


shrink(jnp.array([1.0, 4.0]))

# %% [markdown]
# ## ConcretizationTypeError: `float` of a tracer


# %% tags=["raises-exception", "version"]
@jax.jit
def blur(x, width):
    return x / float(width)


blur(jnp.ones(3), 2)

# %% [markdown]
# **Cause.** `float`, `int`, `.item()` and `.tolist()` need a concrete value. **Fix.** Keep the value an array: `x /
# width` works, `width.astype(jnp.float32)` converts. Two related errors have the same cause:
# `TracerIntegerConversionError` (a tracer as a list index, or in `range`) and `TracerArrayConversionError` (a NumPy
# function called on a tracer: `np.sin(x)` instead of `jnp.sin(x)`).
#
# ## Data-dependent shapes


# %% tags=["raises-exception", "version"]
@jax.jit
def pad(x, n):
    return jnp.concatenate([x, jnp.zeros(n)])


pad(jnp.ones(3), 2)

# %% [markdown]
# **Cause.** Every shape must be known while tracing, and `n` is a tracer. **Fix.** If `n` takes few values, make it
# static, and accept one compilation for each. If it takes many, pad to a fixed size and carry a mask (page 4).

# %%
jax.jit(pad.__wrapped__, static_argnames="n")(jnp.ones(3), n=2)

# %% [markdown]
# ## NonConcreteBooleanIndexError: boolean mask indexing


# %% tags=["raises-exception", "version"]
@jax.jit
def mean_of_positive(x):
    return x[x > 0].mean()


mean_of_positive(jnp.array([1.0, -2.0, 5.0]))

# %% [markdown]
# **Cause.** The shape of `x[x > 0]` depends on how many elements are positive, which is a value. **Fix.** Keep the
# shape, and use the mask.


# %%
@jax.jit
def mean_of_positive(x):
    return jnp.mean(x, where=x > 0)


mean_of_positive(jnp.array([1.0, -2.0, 5.0]))

# %% [markdown]
# ## UnexpectedTracerError: a leaked tracer

# %% tags=["raises-exception", "version"]
saved = {}


@jax.jit
def layer(x):
    saved["hidden"] = jnp.tanh(x)  # to inspect later
    return saved["hidden"].sum()


layer(jnp.ones(3))
saved["hidden"] + 1

# %% [markdown]
# **Cause.** A tracer was stored outside the function, in a global, on `self` or in a cache, and used after tracing had
# finished. **Fix.** Return it. `jax.checking_leaks()` finds where a tracer was leaked.


# %%
@jax.jit
def layer(x):
    hidden = jnp.tanh(x)
    return hidden.sum(), hidden


layer(jnp.ones(3))[1]

# %% [markdown]
# ## Unhashable static arguments

# %% tags=["raises-exception", "version"]
network = jax.jit(lambda x, widths: x * len(widths), static_argnames="widths")
network(jnp.ones(2), widths=[64, 64])

# %% [markdown]
# **Cause.** A static argument is part of the cache key, so it must be hashable. Lists, dicts and arrays are not.
# **Fix.** Use a tuple or a frozen dataclass. mlax layers check this at construction, and name the field:

# %% tags=["raises-exception"]
nn.MLP([64, 64])

# %% [markdown]
# Without `static_argnames` the error is:

# %% tags=["raises-exception", "version"]
jax.jit(lambda x, mode: x)(jnp.ones(2), mode="train")

# %% [markdown]
# ## Incompatible shapes

# %% tags=["raises-exception", "version"]
jnp.ones((8, 3)) @ jnp.ones((8, 4))

# %% [markdown]
# **Cause.** A wrong layer width or a missing transpose. JAX reports the shapes but not the layer. mlax adds its path:

# %% tags=["raises-exception"]
model = mlax.Series(up=nn.Linear(4), head=nn.Linear(2))
trainables, _ = model.init(jax.random.key(0), jnp.ones((8, 3)))
model.fwd(jnp.ones((8, 5)), trainables)

# %% [markdown]
# **A worse mistake raises no error.** `(8, 1)` and `(8,)` broadcast to `(8, 8)`, and the loss is a mean over 64 wrong
# differences. Check the shapes whenever a model trains badly for no apparent reason.

# %%
prediction, target = jnp.arange(8.0)[:, None], jnp.arange(8.0)
print("should be 0:", jnp.mean((prediction - target) ** 2), "of shape", (prediction - target).shape)

# %% [markdown]
# ## Using a donated array

# %% tags=["raises-exception", "version"]
update = jax.jit(lambda state: state * 0.9, donate_argnums=0)
state = jnp.ones(3)
update(state)  # the result is discarded, and the old state is deleted
state + 1

# %% [markdown]
# **Cause.** `state` was donated, and its buffer now holds the result. **Fix.** `state = update(state)`. To keep an old
# state, `jnp.copy` it first.
#
# ## Gradients of non-scalars and integers

# %% tags=["raises-exception", "version"]
jax.grad(lambda w: (w * 2) ** 2)(jnp.ones(3))

# %% [markdown]
# **Fix.** Return a scalar loss: `.mean()`. For a function with many outputs use `jax.jacobian`, or `vmap` over `grad`
# (page 10).

# %% tags=["raises-exception", "version"]
jax.grad(lambda w: w**2)(3)

# %% [markdown]
# **Fix.** Pass `3.0`. `grad` needs floating-point inputs.
#
# ## A scan carry that changes its type

# %% tags=["raises-exception", "version"]
jax.lax.scan(lambda total, x: (total + x, None), jnp.zeros((), jnp.int32), jnp.ones(4))

# %% [markdown]
# **Cause.** The carry went in as an integer and came out as a float. **Fix.** Start with the dtype of the result,
# float32 here. (A plain Python `0` would have been promoted to a float, since it is weakly typed.)
#
# ## Assigning to an array

# %% tags=["raises-exception", "version"]
x = jnp.zeros(3)
x[0] = 1.0

# %% [markdown]
# The message contains the fix.
#
# ## Debugging NaNs
#
# NaNs raise no error. They propagate until the loss is NaN, a thousand operations later. `jax.debug_nans` checks the
# outputs of every compiled function and, if it finds a NaN, runs the function again eagerly to raise an error at the
# operation that produced it. That is slow, so use it only for debugging.


# %% tags=["raises-exception", "version"]
def entropy(p):
    return -(p * jnp.log(p)).sum()  # 0 * log(0)


p = jnp.array([0.0, 0.5, 0.5])
print("silently:", jax.jit(entropy)(p))
with jax.debug_nans(True):
    jax.jit(entropy)(p)

# %% [markdown]
# Often the value is fine and the *gradient* is not. A `where` after the operation does not help (page 4):


# %%
def late(p):
    return -jnp.where(p > 0, p * jnp.log(p), 0).sum()


def early(p):
    return -(p * jnp.log(jnp.where(p > 0, p, 1))).sum()


for function in (late, early):
    print(f"{function.__name__:6} value {function(p):.4f}  gradient {jax.grad(function)(p)}")

# %% [markdown]
# The usual sources: `log(0)`, `0 / 0`, `sqrt` at 0 (its slope is infinite; the norm of a zero vector contains one),
# `exp` of large values, and overflow of float16 beyond 65,504. Page 12 writes a tool that finds the first NaN and its
# line. In training, `train.step` guards against NaNs: a step whose loss or gradient is not finite is skipped and
# counted.
#
# ## Reading a JAX traceback
#
# - Read the last line, then look for *your* file: JAX hides its internal frames. `JAX_TRACEBACK_FILTERING=off` shows
#   them.
# - "while tracing the function f at file:line for jit" names the function, and "depends on the value of the argument x"
#   the argument responsible.
# - If nothing else helps, disable `jit`: `with jax.disable_jit():` runs everything eagerly, with values that you can
#   print.

# %%
with jax.disable_jit():
    print(jax.jit(lambda x: float(x.sum()) + 1)(np.ones(3)))
