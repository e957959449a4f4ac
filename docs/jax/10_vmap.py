# %% [markdown]
# # vmap: write it for one
#
# `jax.vmap` takes a function of one example and gives the function of many. It is no loop: every operation in it gets
# one more axis. This page uses it for two things that are hard without it: the gradient of each example, and many
# models trained at once.

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
print(jax.vmap(distance, in_axes=(0, None))(x, y[0]), "each of x with one y")
all_pairs = jax.vmap(jax.vmap(distance, in_axes=(None, 0)), in_axes=(0, None))
print(all_pairs(x, y).shape, "each with each")

# %% [markdown]
# `in_axes` says which axis of each argument is mapped over; `None` leaves one whole. The jaxpr shows that nothing is
# repeated: the same operations, on larger arrays. A product of a matrix and a vector becomes one product of matrices.

# %%
kernel, rows = jnp.ones((4, 4)), jnp.ones((10, 4))
for name, function in (("one", lambda x: kernel @ x), ("ten", jax.vmap(lambda x: kernel @ x))):
    jaxpr = jax.make_jaxpr(function)(rows[0] if name == "one" else rows)
    product = next(equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "dot_general")
    print(name, [variable.aval.shape for variable in product.invars], "->", product.outvars[0].aval.shape)

# %% [markdown]
# ## The gradient of each example
#
# A batch gives one gradient, the mean. With `vmap` over `grad` each example has its own: for clipping in differential
# privacy, for measuring noise, and, as here, for finding what is wrong with the data.
#
# We take 1,797 handwritten digits and change 40 of the labels.

# %%
pixels, digits = load_digits(return_X_y=True)
images = jnp.asarray(pixels / 16, jnp.float32)
spoiled = np.random.default_rng(0).choice(len(digits), size=40, replace=False)
labels = digits.copy()
labels[spoiled] = (labels[spoiled] + np.random.default_rng(1).integers(1, 10, size=40)) % 10
labels = jnp.asarray(labels)

model = mlax.Series(hidden=nn.Linear(32), relu=mlax.F(jax.nn.relu), head=nn.Linear(10))
optimizer = optim.AdamW(3e-3)


def loss(trainables, image, label):
    """Of one image: (64,) and (), or of many."""
    logits, _ = model.fwd(image, trainables)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


@jax.jit
def step(carried, _=None):
    trainables, state = carried
    grads = jax.grad(loss)(trainables, images, labels)
    return optimizer.update(grads, state, trainables), None


trainables, _ = model.init(jax.random.key(0), images)
(trainables, _), _ = jax.lax.scan(step, (trainables, optimizer.init(trainables)), length=150)

# %% [markdown]
# The loss was written for one image, so `vmap(grad(loss))` is all there is to it. The weights stay whole, images and
# labels are mapped.


# %%
@jax.jit
def sizes(trainables, images, labels):
    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(trainables, images, labels)
    return jax.vmap(optax.tree.norm)(grads)  # (b,)


surprise = np.asarray(sizes(trainables, images, labels))
worst = np.argsort(-surprise)[:60]
found = np.isin(worst, spoiled).sum()
print(f"among the 60 largest gradients are {found} of the 40 changed labels")
assert found > 30

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, panels = plt.subplots(2, 8, figsize=(7.2, 2.3))
for axes, i in zip(panels.flat, worst, strict=False):
    axes.imshow(pixels[i].reshape(8, 8), cmap="gray_r")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"labelled {labels[i]}", fontsize=8, color="#CC3311" if i in spoiled else "black")
figure.suptitle("The 16 largest gradients; in red, labels that were changed", fontsize=10)


# %% tags=["measured"]
def milliseconds(call, number=3):
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


one = jax.jit(jax.grad(loss))
mapped = milliseconds(lambda: sizes(trainables, images[:256], labels[:256]))
looped = milliseconds(lambda: [one(trainables, images[i], labels[i]) for i in range(256)], number=1)
mean = milliseconds(lambda: one(trainables, images[:256], labels[:256]))
print(f"256 gradients: vmap {mapped:.1f} ms, a loop over a jitted one {looped:.0f} ms; their mean alone {mean:.1f} ms")
assert mapped < looped / 3
memory = sizes.lower(trainables, images[:256], labels[:256]).compile().memory_analysis().temp_size_in_bytes
print(f"256 gradients are {256 * 4 * mlax.count(trainables) / 1e6:.2f} MB; the program needs {memory / 1e6:.2f} MB")
assert memory > 128 * 4 * mlax.count(trainables)

# %% [markdown]
# Memory is the price: each of the 256 is as large as the weights, and the program holds most of them at once. For large
# models map over a few at a time: `jax.lax.map(function, examples, batch_size=16)` is a scan over `vmap`s.
#
# ## Many models at once
#
# Weights are arguments, so they can be mapped over as well. An ensemble is `vmap` over the keys of `init`, and then
# over the step.

# %%
x = jnp.concatenate([jnp.linspace(-3, -1, 30), jnp.linspace(0.5, 2, 20)])[:, None]
y = jnp.sin(2 * x) + 0.1 * jax.random.normal(jax.random.key(0), x.shape)
curve = mlax.Series(
    up=nn.Linear(32), tanh=mlax.F(jnp.tanh), mid=nn.Linear(32), tanh2=mlax.F(jnp.tanh), out=nn.Linear(1)
)
adam = optim.AdamW(1e-2, decay=1e-3)


def init(key):
    trainables, _ = curve.init(key, x)
    return trainables, adam.init(trainables)


def train_step(carried, _=None):
    trainables, state = carried
    value, grads = jax.value_and_grad(lambda w: jnp.mean((curve.fwd(x, w)[0] - y) ** 2))(trainables)
    return adam.update(grads, state, trainables), value


def fit(carried):
    return jax.lax.scan(train_step, carried, length=500)


fit_one, fit_many = jax.jit(fit), jax.jit(jax.vmap(fit))
members = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(7), 8))
print(jax.tree.map(jnp.shape, members[0]["mid"]))
(ensemble, _), losses = fit_many(members)
print("losses below 0.02 at the end:", int((losses[:, -1] < 0.02).sum()), "of 8")

# %% tags=["measured"]
single = jax.tree.map(lambda leaf: leaf[0], members)
step_one, step_many = jax.jit(train_step), jax.jit(jax.vmap(train_step))


def calls(step, carried, number=100):
    for _ in range(number):
        carried, value = step(carried)
    return value


rounds = [
    (milliseconds(lambda: calls(step_one, single), 1), milliseconds(lambda: calls(step_many, members), 1))
    for _ in "123"
]
one_ms, eight_ms = map(min, zip(*rounds, strict=True))
print(
    f"100 steps, a call each: one model {one_ms:.0f} ms, eight at once {eight_ms:.0f} ms, in turn {8 * one_ms:.0f} ms"
)
one_ms, eight_ms = milliseconds(lambda: fit_one(single), 1), milliseconds(lambda: fit_many(members), 1)
print(f"500 steps in one scan: one model {one_ms:.0f} ms, eight at once {eight_ms:.0f} ms, in turn {8 * one_ms:.0f} ms")
assert min(eight for _, eight in rounds) < 8 * min(one for one, _ in rounds)

# %% tags=["drawing"]
figure, axes = plt.subplots(figsize=(7.2, 3))
grid = jnp.linspace(-4, 4, 200)[:, None]
curves = jax.vmap(lambda w: curve.fwd(grid, w)[0][:, 0])(ensemble)  # (8, 200)
middle, spread = curves.mean(0), curves.std(0)
axes.fill_between(
    grid[:, 0], middle - 2 * spread, middle + 2 * spread, color="#BBCCEE", label="two deviations of the eight"
)
axes.plot(grid[:, 0], curves.T, color="#4477AA", linewidth=0.6)
axes.plot(x[:, 0], y[:, 0], ".", color="#EE6677", label="data")
axes.set(title="Eight models agree where there is data, and only there", ylim=(-3, 3))
axes.legend(frameon=False, loc="upper center", ncols=2)

# %% [markdown]
# What is gained is what was idle. With a call for each step it is the calls: eight models share one. In a scan there
# are no calls left to share, the arithmetic of eight models is eight times that of one, and two cores have nothing
# idle to do it with. A GPU has: there eight small models often cost hardly more than one, in a scan too.
#
# The same trick sweeps hyperparameters: `rate` and the like can be passed to `update` as arrays, and an array can be
# mapped over.

# %%
rates = jnp.array([1e-4, 1e-3, 1e-2, 1e-1])


def final_loss(rate):
    def at_rate(carried, _):
        trainables, state = carried
        value, grads = jax.value_and_grad(lambda w: jnp.mean((curve.fwd(x, w)[0] - y) ** 2))(trainables)
        return adam.update(grads, state, trainables, rate=rate), value

    return jax.lax.scan(at_rate, single, length=200)[1][-1]


best = rates[jnp.argmin(jax.jit(jax.vmap(final_loss))(rates))]
print(f"of four rates, all trained in one program, the best one is {best:.0e}")

# %% [markdown]
# ## What I would have wished to know
#
# - A function written for a batch can still be mapped: over models, over seeds, over rates. `vmap` adds an axis in
#   front of whatever is there.
# - Under `vmap` a `cond` computes both branches (page 5), and a `while_loop` goes on until the last one is done.
# - BatchNorm, or anything else that mixes examples, means something else under `vmap` over examples: each sees a batch
#   of one.
