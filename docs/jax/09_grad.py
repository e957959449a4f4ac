# %% [markdown]
# # Derivatives
#
# `jax.grad` takes a function and gives a function. There is no tape and no `backward()`: the gradient is one more
# traced program, and can be jitted, mapped, or differentiated again.

# %%
import timeit

import jax
import jax.numpy as jnp
import optax

import mlax
from mlax import nn


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


w = {"a": jnp.full((3, 4), 0.1), "b": jnp.full((4,), 0.5)}
x = jnp.arange(6.0).reshape(2, 3)
print(jax.tree.map(jnp.shape, jax.grad(loss)(w, x)))

# %% [markdown]
# `grad` differentiates the first argument and keeps its tree. Others by number: `argnums=1`, or both with `(0, 1)`.
#
# ## Value, gradient, and more
#
# A step needs the value too, and usually something beside it: new state, accuracy. `value_and_grad` gives the first;
# `has_aux` lets the loss return the second, untouched by differentiation. Do not call `loss` and then `grad`: that is
# the forward pass twice.

# %%
model = mlax.Series(up=nn.Linear(8), norm=nn.BatchNorm(), head=nn.Linear(3))
images, labels = jax.random.normal(jax.random.key(0), (16, 5)), jnp.arange(16) % 3
trainables, non_trainables = model.init(jax.random.key(1), images)


def objective(trainables, non_trainables):
    logits, non_trainables = model.fwd(images, trainables, non_trainables)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return value, (
        non_trainables,
        (logits.argmax(-1) == labels).mean(),
    )  # the first is differentiated, the rest comes along


(value, (non_trainables, accuracy)), grads = jax.value_and_grad(objective, has_aux=True)(trainables, non_trainables)
print(f"loss {value:.3f}  accuracy {accuracy:.3f}  gradients of {mlax.paths(grads)}")

# %% [markdown]
# That is why mlax keeps trainables and state apart: one is what `grad` is taken of, the other is what comes along.
#
# ## Stopping a gradient
#
# `lax.stop_gradient` lets a value through and its derivative not: a target network, a teacher, a statistic.

# %%
print(jax.grad(lambda x: x * x)(3.0), jax.grad(lambda x: x * jax.lax.stop_gradient(x))(3.0))

# %% [markdown]
# ## Two modes
#
# `grad` is *reverse* mode: it costs a few times the function, however many inputs there are, and keeps what the forward
# pass computed until the way back. *Forward* mode, `jax.jvp`, pushes one direction through along with the value, and
# keeps nothing.
#
# | | cost | memory | for |
# |---|---|---|---|
# | `jax.grad`, `jax.vjp`, `jax.jacrev` | one pass for each **output** | all intermediates | a loss of many weights |
# | `jax.jvp`, `jax.jacfwd` | one pass for each **input** | little more than the function | one direction; few inputs |

# %% tags=["measured"]
tall = jax.random.normal(jax.random.key(2), (400, 4))
function = lambda x: jnp.tanh(jnp.tanh(tall @ x) @ jnp.ones((400, 400)) / 400)  # 4 numbers in, 400 out


def milliseconds(call, number=5):
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


point = jnp.ones(4)
by_column, by_row = jax.jit(jax.jacfwd(function)), jax.jit(jax.jacrev(function))
assert jnp.allclose(by_column(point), by_row(point), atol=1e-5)
forward, reverse = milliseconds(lambda: by_column(point)), milliseconds(lambda: by_row(point))
print(f"the same Jacobian of 400 x 4: forward {forward:.2f} ms, reverse {reverse:.2f} ms")
assert forward < reverse

# %% [markdown]
# ## Second derivatives, without the Hessian
#
# A Hessian has a row for each weight. It is rarely what you need; its product with a vector usually is, for curvature,
# for Newton steps, for influence. That product is the derivative of the gradient in one direction, forward over
# reverse, and costs about as much as two gradients:


# %%
def hessian_product(f, w, v):
    return jax.jvp(jax.grad(f), (w,), (v,))[1]


def valley(w):
    return jnp.sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2)


w, v = jnp.full(5, 0.5), jnp.arange(5.0)
print(hessian_product(valley, w, v))
print(jax.hessian(valley)(w) @ v, "by the full Hessian")

# %% tags=["measured"]
sizes, full_ms, product_ms = (16, 64, 256, 1024), [], []
for n in sizes:
    w, v = jnp.full(n, 0.5), jnp.ones(n)
    full, product = (
        jax.jit(lambda w, v: jax.hessian(valley)(w) @ v),
        jax.jit(lambda w, v: hessian_product(valley, w, v)),
    )
    full_ms.append(milliseconds(lambda: full(w, v)))
    product_ms.append(milliseconds(lambda: product(w, v)))
full, product = full_ms[-1], product_ms[-1]
print(f"{sizes[-1]:,} weights: the Hessian times a vector {full:.2f} ms, the product alone {product:.3f} ms")
assert product_ms[-1] < full_ms[-1] / 10

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.8))
axes.loglog(sizes, full_ms, "o-", label="Hessian, then the product: n² numbers")
axes.loglog(sizes, product_ms, "s-", label="product alone: n numbers")
axes.set(xlabel="weights", ylabel="milliseconds", xticks=sizes, xticklabels=[f"{n:,}" for n in sizes])
axes.minorticks_off()
axes.set_title("Curvature in one direction", fontsize=10)
axes.legend(frameon=False)

# %% [markdown]
# ## Derivatives of your own
#
# JAX differentiates what you wrote. Sometimes that is not what you meant, and you know better. Three cases, in the
# order in which they come up.
#
# **1. The formula overflows.** `log(1 + exp(x))` at 100 is `inf` in float32, and its derivative `inf / inf`. Writing it
# another way saves the value, but not the slope everywhere: at 0 JAX takes 1 for the slope of `abs` and 1/2 for that of
# `maximum`, which together give 0 instead of 1/2. `custom_jvp` says what the derivative is, once, for both modes.


# %%
def rewritten(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


softplus = jax.custom_jvp(rewritten)


@softplus.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return softplus(x), jax.nn.sigmoid(x) * dx


naive = lambda x: jnp.log(1 + jnp.exp(x))
for name, f in (("naive", naive), ("rewritten", rewritten), ("with a rule", softplus)):
    print(f"{name:11}", *(f"  at {x:5}: value {f(x):5.1f}, slope {jax.grad(f)(x):.1f}" for x in (0.0, 100.0)))
print("and twice:", jax.grad(jax.grad(softplus))(0.0), "since the rule is itself differentiable")

# %% [markdown]
# **2. You want another backward pass on purpose**: a straight-through estimator, a clipped gradient, a faster formula.
# `custom_vjp` gives the way back as a function, and decides what to keep for it. It has no forward mode.


# %%
@jax.custom_vjp
def quantise(x):
    return jnp.round(x * 4) / 4


quantise.defvjp(lambda x: (quantise(x), None), lambda kept, g: (g,))  # backward, as if it were the identity

x = jnp.array([0.1, 0.3, 0.9])
print(
    "by itself:",
    jax.grad(lambda x: (jnp.round(x * 4) / 4).sum())(x),
    "  straight through:",
    jax.grad(lambda x: quantise(x).sum())(x),
)

# %% [markdown]
# **3. The result is the end of an iteration.** Differentiating through two hundred rounds keeps all two hundred. At a
# fixed point the implicit function theorem needs the last one only.


# %%
def rounds(a, n=200):
    """The x with x = cos(a x), by going round until it stays."""
    return jax.lax.scan(lambda x, _: (jnp.cos(a * x), None), a * 0 + 1, length=n)[0]


@jax.custom_vjp
def fixed(a):
    return rounds(a)


def fixed_forward(a):
    x = rounds(a)
    return x, (a, x)


def fixed_backward(kept, g):
    a, x = kept
    slope = -jnp.sin(a * x)  # of cos, at the fixed point: dx = slope * (a dx + x da)
    return (g * slope * x / (1 - slope * a),)


fixed.defvjp(fixed_forward, fixed_backward)
print(f"through 200 rounds {jax.grad(rounds)(0.8):.3f}, by the theorem {jax.grad(fixed)(0.8):.3f}")

# %% [markdown]
# Check a rule of your own against numbers, always:

# %%
from jax.test_util import check_grads

check_grads(softplus, (jnp.array([-2.0, 0.5, 3.0]),), order=2, eps=1e-2, atol=1e-2, rtol=1e-2)

# %% [markdown]
# ## Memory for time: `jax.checkpoint`
#
# Reverse mode keeps every intermediate. `jax.checkpoint` (mlax: `Remat`, or a mode of `Repeat`) forgets them and
# computes them again on the way back.


# %%
def deep(x, block):
    for _ in range(16):
        x = block(x)
    return x.sum()


def block(x):
    for _ in range(8):
        x = jnp.sin(x)
    return x


x = jnp.ones(10**5)
for name, each in (("kept", block), ("computed again", jax.checkpoint(block))):
    kept = jax.vjp(lambda x: deep(x, each), x)[1]
    arrays = [leaf for leaf in jax.tree.leaves(kept) if leaf.size == x.size]
    print(
        f"{name:14} {sum(leaf.nbytes for leaf in arrays) / 1e6:5.1f} MB wait for the way back, in {len(arrays)} arrays"
    )

# %% [markdown]
# ## What I would have wished to know
#
# - `jax.grad` of a jitted function is compiled, but jit the outside: `jit(grad(f))`, not `grad(jit(f))` (page 3).
# - The gradients of `max` at a tie and of `abs` at 0 are conventions. They rarely bite, but they did above.
# - Compile time of a gradient is about that of the function two or three times. Long unrolled loops (page 5) hurt
#   twice.
