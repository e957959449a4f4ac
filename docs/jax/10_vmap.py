# %% [markdown]
# # Vectorization with vmap
#
# `jax.vmap` turns a function of one example into a function of a batch. It is not a loop: every operation gets one more
# axis. This page uses it for two things that are hard without it: per-example gradients, and training many models at
# once.

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mlax
from mlax import nn, optim


def distance(x, y):
    return jnp.sqrt(jnp.sum((x - y) ** 2))


x, y = jnp.arange(6.0).reshape(3, 2), jnp.ones((4, 2))
print(jax.vmap(distance, in_axes=(0, None))(x, y[0]), "every x with one y")
all_pairs = jax.vmap(jax.vmap(distance, in_axes=(None, 0)), in_axes=(0, None))
print(all_pairs(x, y).shape, "all pairs")

# %% [markdown]
# `in_axes` gives the axis of each argument to map over; `None` broadcasts the argument. The jaxpr shows that nothing is
# repeated: it has the same operations, on larger arrays. A matrix-vector product becomes a matrix-matrix product.

# %%
kernel, rows = jnp.ones((4, 4)), jnp.ones((10, 4))
for name, function in (("one", lambda x: kernel @ x), ("ten", jax.vmap(lambda x: kernel @ x))):
    jaxpr = jax.make_jaxpr(function)(rows[0] if name == "one" else rows)
    product = next(equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "dot_general")
    print(name, [variable.aval.shape for variable in product.invars], "->", product.outvars[0].aval.shape)

# %% [markdown]
# ## Per-example gradients
#
# Per-example gradients are `vmap` over `grad`, where a batch normally gives only their mean. They are used for clipping
# in differential privacy, for measuring gradient noise, and, as here, for finding mislabeled data.
#
# We take 1,797 handwritten digits and change 40 of the labels.

# %%
pixels, digits = load_digits(return_X_y=True)
images = jnp.asarray(pixels / 16, jnp.float32)
changed = np.random.default_rng(0).choice(len(digits), size=40, replace=False)
labels = digits.copy()
labels[changed] = (labels[changed] + np.random.default_rng(1).integers(1, 10, size=40)) % 10
labels = jnp.asarray(labels)

model = mlax.Series(hidden=nn.Linear(32), relu=jax.nn.relu, head=nn.Linear(10))
optimizer = optim.AdamW(3e-3)


def loss(trainables, image, label):
    """The loss of one image, (64,) and (), or of a batch."""
    logits, _ = model.fwd(image, trainables)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


@jax.jit
def step(carry, _=None):
    trainables, state = carry
    grads = jax.grad(loss)(trainables, images, labels)
    return optimizer.update(grads, state, trainables), None


trainables, _ = model.init(jax.random.key(0), images)
(trainables, _), _ = jax.lax.scan(step, (trainables, optimizer.init(trainables)), length=150)

# %% [markdown]
# The loss works on a single image, so `vmap(grad(loss))` is all it takes. The weights are broadcast; images and labels
# are mapped over.


# %%
@jax.jit
def gradient_norms(trainables, images, labels):
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(trainables, images, labels)
    return jax.vmap(optax.tree.norm)(grads)  # (b,)


norms = np.asarray(gradient_norms(trainables, images, labels))
worst = np.argsort(-norms)[:60]
found = np.isin(worst, changed).sum()
print(f"the 60 largest gradients include {found} of the 40 changed labels")
assert found > 30

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, panels = plt.subplots(2, 8, figsize=(7.2, 2.3))
for axes, i in zip(panels.flat, worst, strict=False):
    axes.imshow(pixels[i].reshape(8, 8), cmap="gray_r")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"labeled {labels[i]}", fontsize=8, color="#CC3311" if i in changed else "black")
figure.suptitle("The 16 largest gradients; changed labels in red", fontsize=10)


# %% tags=["measured"]
def milliseconds(call, number=3):
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


one = jax.jit(jax.grad(loss))
mapped = milliseconds(lambda: gradient_norms(trainables, images[:256], labels[:256]))
looped = milliseconds(lambda: [one(trainables, images[i], labels[i]) for i in range(256)], number=1)
mean = milliseconds(lambda: one(trainables, images[:256], labels[:256]))
print(f"256 gradients: vmap {mapped:.1f} ms, a loop over jitted calls {looped:.0f} ms; only their mean {mean:.1f} ms")
assert mapped < looped / 3
memory = gradient_norms.lower(trainables, images[:256], labels[:256]).compile().memory_analysis().temp_size_in_bytes
print(f"256 gradients are {256 * 4 * mlax.count(trainables) / 1e6:.2f} MB; the program needs {memory / 1e6:.2f} MB")
assert memory > 128 * 4 * mlax.count(trainables)

# %% [markdown]
# The price is memory: each of the 256 gradients is as large as the weights, and the program holds most of them at once.
# For large models map over a few examples at a time: `jax.lax.map(function, examples, batch_size=16)` is a scan over
# `vmap`s.
#
# ## Ensembles
#
# Ensembles are trained by mapping over the weights, which are arguments like any other: `vmap` over the keys of `init`,
# then over the training step.

# %%
x = jnp.concatenate([jnp.linspace(-3, -1, 30), jnp.linspace(0.5, 2, 20)])[:, None]
y = jnp.sin(2 * x) + 0.1 * jax.random.normal(jax.random.key(0), x.shape)
curve = mlax.Series(up=nn.Linear(32), tanh=jnp.tanh, mid=nn.Linear(32), tanh2=jnp.tanh, out=nn.Linear(1))
adam = optim.AdamW(1e-2, decay=1e-3)


def init(key):
    trainables, _ = curve.init(key, x)
    return trainables, adam.init(trainables)


def train_step(carry, _=None):
    trainables, state = carry
    value, grads = jax.value_and_grad(lambda w: jnp.mean((curve.fwd(x, w)[0] - y) ** 2))(trainables)
    return adam.update(grads, state, trainables), value


def fit(carry):
    return jax.lax.scan(train_step, carry, length=500)


fit_one, fit_many = jax.jit(fit), jax.jit(jax.vmap(fit))
members = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(7), 8))
print(jax.tree.map(jnp.shape, members[0]["mid"]))
(ensemble, _), losses = fit_many(members)
print("final losses below 0.02:", int((losses[:, -1] < 0.02).sum()), "of 8")

# %% tags=["measured"]
single = jax.tree.map(lambda leaf: leaf[0], members)
step_one, step_many = jax.jit(train_step), jax.jit(jax.vmap(train_step))


def run_steps(step, carry, number=100):
    for _ in range(number):
        carry, value = step(carry)
    return value


rounds = [
    (milliseconds(lambda: run_steps(step_one, single), 1), milliseconds(lambda: run_steps(step_many, members), 1))
    for _ in "123"
]
one_ms, eight_ms = map(min, zip(*rounds, strict=True))
print(f"100 calls, one step each: {one_ms:.0f} ms for one model, {eight_ms:.0f} ms for eight with vmap")
one_ms, eight_ms = milliseconds(lambda: fit_one(single), 1), milliseconds(lambda: fit_many(members), 1)
print(f"500 steps in one scan: {one_ms:.0f} ms for one model, {eight_ms:.0f} ms for eight with vmap")
assert min(eight for _, eight in rounds) < 8 * min(one for one, _ in rounds)

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 3))
grid = jnp.linspace(-4, 4, 200)[:, None]
curves = jax.vmap(lambda w: curve.fwd(grid, w)[0][:, 0])(ensemble)  # (8, 200)
mean, std = curves.mean(0), curves.std(0)
axes.fill_between(grid[:, 0], mean - 2 * std, mean + 2 * std, color="#BBCCEE", label="mean ± 2 standard deviations")
axes.plot(grid[:, 0], curves.T, color="#4477AA", linewidth=0.6)
axes.plot(x[:, 0], y[:, 0], ".", color="#EE6677", label="data")
axes.set(title="Eight models agree only where there is data", ylim=(-3, 3))
axes.legend(frameon=False, loc="upper center", ncols=2)

# %% [markdown]
# `vmap` gains where there is something to share or something idle. With one call per step, eight models share the
# dispatch overhead. In a scan there is no such overhead left, the arithmetic of eight models is eight times that of
# one, and both cores are already busy. A GPU usually is not: there eight small models often cost hardly more than one,
# in a scan too.
#
# The same technique sweeps hyperparameters: `rate` and the others can be passed to `update` as arrays, and arrays can
# be mapped over.

# %%
rates = jnp.array([1e-4, 1e-3, 1e-2, 1e-1])


def final_loss(rate):
    def step(carry, _):
        trainables, state = carry
        value, grads = jax.value_and_grad(lambda w: jnp.mean((curve.fwd(x, w)[0] - y) ** 2))(trainables)
        return adam.update(grads, state, trainables, rate=rate), value

    return jax.lax.scan(step, single, length=200)[1][-1]


best = rates[jnp.argmin(jax.jit(jax.vmap(final_loss))(rates))]
print(f"best of four learning rates, trained in one program: {best:.0e}")

# %% [markdown]
# ## Good to know
#
# - A function written for a batch can still be mapped: over models, seeds or learning rates. `vmap` adds a leading axis
#   to whatever is there.
# - Under `vmap` a `cond` computes both branches (page 5), and a `while_loop` runs until the last example is done.
# - BatchNorm, and anything else that mixes examples, changes its meaning under `vmap` over examples: each example is a
#   batch of one.
