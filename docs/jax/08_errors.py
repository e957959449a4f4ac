# %% [markdown]
# # Errors that beginners meet
#
# Each one is provoked here, shown as JAX says it, and cured. They all come from page 2: while tracing, arrays have no
# values.

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
# **Cause.** `if` asks for True or False, and the tracer cannot say. Also hidden in `and`, `or`, `not`, `assert`,
# `max(a, b)`, `while`, and in `x in (...)`.
#
# **Cure.** `jnp.where` for elements, `lax.cond` for branches, `&`, `|`, `~` for logic, `jnp.maximum` for `max`.


# %%
@jax.jit
def shrink(x):
    size = jnp.abs(x).max()
    return jnp.where(size > 1, x / jnp.maximum(size, 1), x)


shrink(jnp.array([1.0, 4.0]))

# %% [markdown]
# ## ConcretizationTypeError: a Python number was wanted


# %% tags=["raises-exception", "version"]
@jax.jit
def blur(x, width):
    return x / float(width)


blur(jnp.ones(3), 2)

# %% [markdown]
# **Cause.** `float`, `int`, `.item()` and `.tolist()` want a value. **Cure.** Leave the number an array: `x / width`
# works, `width.astype(jnp.float32)` converts. Its cousins have the same cause: `TracerIntegerConversionError` (a tracer
# as an index of a list, or in `range`) and `TracerArrayConversionError` (NumPy was called on a tracer: `np.sin(x)` for
# `jnp.sin(x)`).
#
# ## Shapes that depend on values


# %% tags=["raises-exception", "version"]
@jax.jit
def padding(x, n):
    return jnp.concatenate([x, jnp.zeros(n)])


padding(jnp.ones(3), 2)

# %% [markdown]
# **Cause.** The shape of every array has to be known while tracing, and `n` is a tracer. **Cure.** If there are few
# values of `n`, make it static, and accept a compilation for each. If there are many, pad to a fixed size and carry a
# mask (page 4).

# %%
jax.jit(padding.__wrapped__, static_argnames="n")(jnp.ones(3), n=2)

# %% [markdown]
# ## NonConcreteBooleanIndexError: choosing elements by a mask


# %% tags=["raises-exception", "version"]
@jax.jit
def mean_of_positive(x):
    return x[x > 0].mean()


mean_of_positive(jnp.array([1.0, -2.0, 5.0]))

# %% [markdown]
# **Cause.** How many elements are positive is a value, so the shape of `x[x > 0]` is one. **Cure.** Keep the shape, and
# use the mask.


# %%
@jax.jit
def mean_of_positive(x):
    return jnp.mean(x, where=x > 0)


mean_of_positive(jnp.array([1.0, -2.0, 5.0]))

# %% [markdown]
# ## UnexpectedTracerError: a leak

# %% tags=["raises-exception", "version"]
kept = {}


@jax.jit
def layer(x):
    kept["hidden"] = jnp.tanh(x)  # for looking at later
    return kept["hidden"].sum()


layer(jnp.ones(3))
kept["hidden"] + 1

# %% [markdown]
# **Cause.** A tracer was stored outside of the function, in a global, on `self`, in a cache, and used when tracing was
# over. **Cure.** Return it. `jax.checking_leaks()` finds where a leak was made.


# %%
@jax.jit
def layer(x):
    hidden = jnp.tanh(x)
    return hidden.sum(), hidden


layer(jnp.ones(3))[1]

# %% [markdown]
# ## Static arguments that cannot be hashed

# %% tags=["raises-exception", "version"]
network = jax.jit(lambda x, widths: x * len(widths), static_argnames="widths")
network(jnp.ones(2), widths=[64, 64])

# %% [markdown]
# **Cause.** A static argument is part of the key of the cache, so it has to be hashable. Lists, dicts and arrays are
# not. **Cure.** A tuple, or a frozen dataclass. A description of mlax checks this at once, and says which field:

# %% tags=["raises-exception"]
nn.MLP([64, 64])

# %% [markdown]
# And if it was not marked as static at all:

# %% tags=["raises-exception", "version"]
jax.jit(lambda x, mode: x)(jnp.ones(2), mode="train")

# %% [markdown]
# ## Shapes that do not fit

# %% tags=["raises-exception", "version"]
jnp.ones((8, 3)) @ jnp.ones((8, 4))

# %% [markdown]
# **Cause.** The usual ones. JAX gives the shapes but not the layer. mlax adds the path:

# %% tags=["raises-exception"]
model = mlax.Series(up=nn.Linear(4), head=nn.Linear(2))
trainables, _ = model.init(jax.random.key(0), jnp.ones((8, 3)))
model.fwd(jnp.ones((8, 5)), trainables)

# %% [markdown]
# **A worse one does not raise.** `(8, 1)` and `(8,)` broadcast to `(8, 8)`, and the loss is a mean over 64 wrong
# differences. Look at shapes whenever a loss is learned badly for no reason.

# %%
prediction, target = jnp.arange(8.0)[:, None], jnp.arange(8.0)
print("should be 0:", jnp.mean((prediction - target) ** 2), "of shape", (prediction - target).shape)

# %% [markdown]
# ## Donated, and used again

# %% tags=["raises-exception", "version"]
update = jax.jit(lambda state: state * 0.9, donate_argnums=0)
state = jnp.ones(3)
update(state)  # the result is dropped, and the old state is gone
state + 1

# %% [markdown]
# **Cause.** `state` was given away, and its memory holds the result now. **Cure.** `state = update(state)`. To keep an
# old one, `jnp.copy` it first.
#
# ## Gradients of the wrong thing

# %% tags=["raises-exception", "version"]
jax.grad(lambda w: (w * 2) ** 2)(jnp.ones(3))

# %% [markdown]
# **Cure.** A loss is one number: `.mean()`. For a function with many outputs use `jax.jacobian`, or `vmap` over `grad`
# (page 10).

# %% tags=["raises-exception", "version"]
jax.grad(lambda w: w**2)(3)

# %% [markdown]
# **Cure.** `3.0`. Integers have no derivative.
#
# ## A carry that changes

# %% tags=["raises-exception", "version"]
jax.lax.scan(lambda total, x: (total + x, None), jnp.zeros((), jnp.int32), jnp.ones(4))

# %% [markdown]
# **Cause.** The carry went in as an integer and came out as a float. **Cure.** Start with what you will end with:
# float32 here. (A plain Python `0` would have been taken for a float, since its type is weak.)
#
# ## Assigning to an array

# %% tags=["raises-exception", "version"]
x = jnp.zeros(3)
x[0] = 1.0

# %% [markdown]
# The message is its own cure.
#
# ## NaN hunting
#
# A NaN raises nothing. It spreads until the loss is NaN, a thousand operations later. `jax.debug_nans` stops at the
# operation that made it, by running the function again op by op. It works on what `jit` returns, so it is slow and for
# hunting only.


# %% tags=["raises-exception", "version"]
def entropy(p):
    return -(p * jnp.log(p)).sum()  # 0 * log(0)


p = jnp.array([0.0, 0.5, 0.5])
print("silently:", jax.jit(entropy)(p))
with jax.debug_nans(True):
    jax.jit(entropy)(p)

# %% [markdown]
# Often the value is fine and the *gradient* is not. `where` does not help after the fact (page 4):


# %%
def late(p):
    return -jnp.where(p > 0, p * jnp.log(p), 0).sum()


def early(p):
    return -(p * jnp.log(jnp.where(p > 0, p, 1))).sum()


for function in (late, early):
    print(f"{function.__name__:6} value {function(p):.4f}  gradient {jax.grad(function)(p)}")

# %% [markdown]
# The usual sources: `log(0)`, `0 / 0`, `sqrt` at 0 (its slope is infinite; the norm of a zero vector has one inside),
# `exp` of large numbers, and float16 that ends at 65,504. Page 12 writes a tool that finds the first NaN with its line.
# In training, `train.step` guards against them: a step with a loss or gradient that is not finite changes no weights,
# and is counted.
#
# ## Reading a JAX traceback
#
# - Read the last line, then look for *your* file: JAX hides its own frames. `JAX_TRACEBACK_FILTERING=off` shows them.
# - "while tracing the function f at file:line for jit" names the function, and "depends on the value of the argument x"
#   the argument to blame.
# - If nothing helps, take `jit` off: `with jax.disable_jit():` runs everything op by op, with values to print.

# %%
with jax.disable_jit():
    print(jax.jit(lambda x: float(x.sum()) + 1)(np.ones(3)))
