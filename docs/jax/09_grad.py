# %% [markdown]
# # Automatic differentiation
#
# Automatic differentiation in JAX is a function transformation: `jax.grad` takes a function and returns its gradient
# function. There is no tape and no `backward()`: the gradient is another traced program, and can be jitted, mapped, or
# differentiated again.

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
# `grad` differentiates with respect to the first argument and returns a pytree of the same structure. `argnums=1`
# selects another argument, `(0, 1)` both.
#
# ## `value_and_grad` and auxiliary outputs
#
# `jax.value_and_grad` returns the loss along with its gradient. With `has_aux=True` the loss also returns auxiliary
# outputs, such as new state or the accuracy, which are not differentiated. Do not call `loss` and then `grad`: that
# runs the forward pass twice.

# %%
model = mlax.Series(up=nn.Linear(8), norm=nn.BatchNorm(), head=nn.Linear(3))
images, labels = jax.random.normal(jax.random.key(0), (16, 5)), jnp.arange(16) % 3
trainables, non_trainables = model.init(jax.random.key(1), images)


def objective(trainables, non_trainables):
    logits, non_trainables = model.fwd(images, trainables, non_trainables)
    value = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = (logits.argmax(-1) == labels).mean()
    return value, (non_trainables, accuracy)  # only the value is differentiated


(value, (non_trainables, accuracy)), grads = jax.value_and_grad(objective, has_aux=True)(trainables, non_trainables)
print(f"loss {value:.3f}  accuracy {accuracy:.3f}  gradients of {mlax.paths(grads)}")

# %% [markdown]
# That is why mlax separates trainables from state: the first are differentiated, the second is an auxiliary output.
#
# ## Stopping gradients
#
# `lax.stop_gradient` passes a value through but blocks its gradient: for a target network, a teacher, a statistic.

# %%
print(jax.grad(lambda x: x * x)(3.0), jax.grad(lambda x: x * jax.lax.stop_gradient(x))(3.0))

# %% [markdown]
# ## Forward and reverse mode
#
# Reverse mode, `jax.grad`, costs a few times the function, however many inputs there are, and stores the intermediates
# of the forward pass for the backward pass. Forward mode, `jax.jvp`, propagates one tangent along with the value, and
# stores nothing.
#
# | | cost | memory | for |
# |---|---|---|---|
# | `jax.grad`, `jax.vjp`, `jax.jacrev` | one pass per **output** | all intermediates | a scalar loss of many weights |
# | `jax.jvp`, `jax.jacfwd` | one pass per **input** | little more than the function | one direction; few inputs |

# %% tags=["measured"]
tall = jax.random.normal(jax.random.key(2), (400, 4))
function = lambda x: jnp.tanh(jnp.tanh(tall @ x) @ jnp.ones((400, 400)) / 400)  # 4 inputs, 400 outputs


def milliseconds(call, number=5):
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


point = jnp.ones(4)
by_column, by_row = jax.jit(jax.jacfwd(function)), jax.jit(jax.jacrev(function))
assert jnp.allclose(by_column(point), by_row(point), atol=1e-5)
forward, reverse = milliseconds(lambda: by_column(point)), milliseconds(lambda: by_row(point))
print(f"the same 400 x 4 Jacobian: forward mode {forward:.2f} ms, reverse mode {reverse:.2f} ms")
assert forward < reverse

# %% [markdown]
# ## Hessian-vector products
#
# A Hessian-vector product is usually what second-order methods need, for curvature, Newton steps or influence
# functions; the full Hessian has a row for every weight. The product is the derivative of the gradient in one
# direction, forward over reverse, and costs about as much as two gradients:


# %%
def hessian_vector_product(f, w, v):
    return jax.jvp(jax.grad(f), (w,), (v,))[1]


def rosenbrock(w):
    return jnp.sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2)


w, v = jnp.full(5, 0.5), jnp.arange(5.0)
print(hessian_vector_product(rosenbrock, w, v))
print(jax.hessian(rosenbrock)(w) @ v, "from the full Hessian")

# %% tags=["measured"]
sizes, full_ms, product_ms = (16, 64, 256, 1024), [], []
for n in sizes:
    w, v = jnp.full(n, 0.5), jnp.ones(n)
    full, product = (
        jax.jit(lambda w, v: jax.hessian(rosenbrock)(w) @ v),
        jax.jit(lambda w, v: hessian_vector_product(rosenbrock, w, v)),
    )
    full_ms.append(milliseconds(lambda: full(w, v)))
    product_ms.append(milliseconds(lambda: product(w, v)))
full, product = full_ms[-1], product_ms[-1]
print(f"{sizes[-1]:,} weights: full Hessian times a vector {full:.2f} ms, Hessian-vector product {product:.3f} ms")
assert product_ms[-1] < full_ms[-1] / 10

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, axes = plt.subplots(figsize=(7.2, 2.8))
axes.loglog(sizes, full_ms, "o-", label="full Hessian times a vector: n² values")
axes.loglog(sizes, product_ms, "s-", label="Hessian-vector product: n values")
axes.set(xlabel="weights", ylabel="milliseconds", xticks=sizes, xticklabels=[f"{n:,}" for n in sizes])
axes.minorticks_off()
axes.set_title("Curvature along one direction", fontsize=10)
axes.legend(frameon=False)

# %% [markdown]
# ## Custom derivatives: `custom_jvp` and `custom_vjp`
#
# Custom derivative rules replace the derivative that JAX would compute. Three cases, in the order in which they usually
# come up.
#
# **1. Numerical stability.** `log(1 + exp(x))` at 100 is `inf` in float32, and its derivative `inf / inf`. A rewritten
# formula fixes the value, but not the slope everywhere: at 0 JAX defines the slope of `abs` as 1 and that of `maximum`
# as 1/2, which together give 0 instead of 1/2. `custom_jvp` defines the derivative once, for both modes.


# %%
def stable(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


softplus = jax.custom_jvp(stable)


@softplus.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return softplus(x), jax.nn.sigmoid(x) * dx


naive = lambda x: jnp.log(1 + jnp.exp(x))
for name, f in (("naive", naive), ("rewritten", stable), ("custom rule", softplus)):
    print(f"{name:11}", *(f"  at {x:5}: value {f(x):5.1f}, slope {jax.grad(f)(x):.1f}" for x in (0.0, 100.0)))
print("second derivative:", jax.grad(jax.grad(softplus))(0.0), "since the rule is itself differentiable")

# %% [markdown]
# **2. A different backward pass on purpose**: a straight-through estimator, a clipped gradient, a faster formula.
# `custom_vjp` defines the backward pass, and which residuals to store for it. It does not support forward mode.


# %%
@jax.custom_vjp
def quantize(x):
    return jnp.round(x * 4) / 4


quantize.defvjp(lambda x: (quantize(x), None), lambda residuals, g: (g,))  # the backward pass of the identity

x = jnp.array([0.1, 0.3, 0.9])
print(
    "without a rule:",
    jax.grad(lambda x: (jnp.round(x * 4) / 4).sum())(x),
    "  straight-through:",
    jax.grad(lambda x: quantize(x).sum())(x),
)

# %% [markdown]
# **3. Implicit differentiation of a fixed point.** Differentiating through two hundred iterations stores all of them.
# By the implicit function theorem only the last one is needed.


# %%
def iterate(a, n=200):
    """Solve x = cos(a x) by fixed-point iteration."""
    return jax.lax.scan(lambda x, _: (jnp.cos(a * x), None), a * 0 + 1, length=n)[0]


@jax.custom_vjp
def fixed_point(a):
    return iterate(a)


def fixed_point_fwd(a):
    x = iterate(a)
    return x, (a, x)


def fixed_point_bwd(residuals, g):
    a, x = residuals
    slope = -jnp.sin(a * x)  # of cos, at the fixed point: dx = slope * (a dx + x da)
    return (g * slope * x / (1 - slope * a),)


fixed_point.defvjp(fixed_point_fwd, fixed_point_bwd)
print(f"through 200 iterations {jax.grad(iterate)(0.8):.3f}, implicitly {jax.grad(fixed_point)(0.8):.3f}")

# %% [markdown]
# Always check a custom rule against finite differences:

# %%
from jax.test_util import check_grads

check_grads(softplus, (jnp.array([-2.0, 0.5, 3.0]),), order=2, eps=1e-2, atol=1e-2, rtol=1e-2)

# %% [markdown]
# ## Rematerialization: `jax.checkpoint`
#
# Rematerialization trades compute for memory. Reverse mode stores every intermediate; `jax.checkpoint` (in mlax:
# `Remat`, or a mode of `Repeat`) discards them and recomputes them in the backward pass.


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
for name, each in (("stored", block), ("recomputed", jax.checkpoint(block))):
    residuals = jax.vjp(lambda x: deep(x, each), x)[1]
    arrays = [leaf for leaf in jax.tree.leaves(residuals) if leaf.size == x.size]
    print(f"{name:10} {sum(leaf.nbytes for leaf in arrays) / 1e6:5.1f} MB of residuals, in {len(arrays)} arrays")

# %% [markdown]
# ## Good to know
#
# - `jax.grad` of a jitted function is compiled, but put `jit` on the outside: `jit(grad(f))`, not `grad(jit(f))` (page
#   3).
# - The gradients of `max` at a tie and of `abs` at 0 are conventions. They rarely matter, but they did above.
# - Compiling a gradient takes about two or three times as long as compiling the function, so long unrolled loops (page
#   5) hurt twice.
