# %% [markdown]
# # Control flow
#
# Control flow written in Python, `if`, `for` and `while`, runs once, while tracing, and decides which program is
# compiled. For control flow inside the compiled program use `lax.cond`, `switch`, `scan`, `fori_loop` or `while_loop`.
# This page shows the difference for prints, conditionals and loops, and measures which loop to use.

# %%
import time
import timeit

import jax
import jax.numpy as jnp
from jax import lax

# %% [markdown]
# ## Printing with `jax.debug.print`
#
# `jax.debug.print` is an operation of the compiled program and prints values on every run. Python's `print` runs while
# tracing and prints tracers.


# %%
@jax.jit
def double(x):
    print("tracing")
    jax.debug.print("running, x = {x}", x=x)
    return 2 * x


for value in (1.0, 2.0, 3.0):
    double(value).block_until_ready()

# %% [markdown]
# ## Conditionals
#
# Conditionals on a shape, a dtype or a Python flag can be plain `if` statements: they select one program at trace time
# and cost nothing when it runs. An `if` on a *value* is an error (page 8 shows it), since there is no value yet. The
# three replacements differ in what they compute:
#
# | | computes | use it for |
# |---|---|---|
# | `jnp.where(p, a, b)` | both, then picks for each element | elementwise choices |
# | `lax.cond(p, f, g, x)` | one of the two, for the whole array | rare, expensive branches |
# | `lax.switch(i, [f, g, h], x)` | one of many | the same, with more branches |


# %%
def expensive(x):
    for _ in range(50):
        x = jnp.sin(x @ x)
    return x


def cheap(x):
    return x


by_where = jax.jit(lambda p, x: jnp.where(p, expensive(x), cheap(x)))
by_cond = jax.jit(lambda p, x: lax.cond(p, expensive, cheap, x))
by_vmap = jax.jit(jax.vmap(by_cond))


def milliseconds(call, number=5):
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


# %% tags=["measured"]
x = jnp.full((128, 128), 0.01)
four = jnp.stack([x] * 4)
where, cond = milliseconds(lambda: by_where(False, x)), milliseconds(lambda: by_cond(False, x))
mapped = milliseconds(lambda: by_vmap(jnp.zeros(4, bool), four)) / 4
print(f"cheap branch chosen: where {where:.2f} ms, cond {cond:.2f} ms, cond under vmap {mapped:.2f} ms per example")
assert cond < where / 5
assert mapped > cond * 5

# %% [markdown]
# The last time may be surprising: **under `vmap` a `cond` becomes a `where`.** Different examples may need different
# branches, so both branches are computed for all of them. The jaxpr shows it:


# %% tags=["version"]
def primitives(function, *args):
    return [equation.primitive.name for equation in jax.make_jaxpr(function)(*args).jaxpr.eqns]


one = lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x)
single, several = primitives(one, True, 1.0), primitives(jax.vmap(one), jnp.array([True, False]), jnp.ones(2))
print("for one example:", *single)
print("for many:       ", *several)
assert "cond" in single and {"sin", "cos", "select_n"} < set(several)

# %% [markdown]
# ## Loops: `for`, `scan`, `fori_loop`, `while_loop`
#
# A Python loop is *unrolled*: the program contains one copy of the body per iteration. The `lax` loops contain it once.
#
# | | number of iterations | gradient | collects results |
# |---|---|---|---|
# | Python `for` | fixed at trace time | yes | yes |
# | `lax.scan` | fixed at trace time | yes | yes, stacked |
# | `lax.fori_loop` | may be an array | forward mode; reverse only if fixed | no |
# | `lax.while_loop` | until a condition fails | forward mode only | no |
#
# As an example, take a recurrent network, one small matrix product per step, over 8 to 128 steps.

# %%
kernel = jax.random.normal(jax.random.key(0), (64, 64)) / 8
inputs = jax.random.normal(jax.random.key(1), (128, 64))


def cell(h, x):
    return jnp.tanh(h @ kernel + x)


def unroll_loop(h, xs):
    for x in xs:
        h = cell(h, x)
    return h


def scan_loop(h, xs, unroll=1):
    return lax.scan(lambda h, x: (cell(h, x), None), h, xs, unroll=unroll)[0]


def fori(h, xs):
    return lax.fori_loop(0, len(xs), lambda i, h: cell(h, xs[i]), h)


def while_loop(h, xs):
    return lax.while_loop(lambda c: c[0] < len(xs), lambda c: (c[0] + 1, cell(c[1], xs[c[0]])), (0, h))[1]


# %% tags=["version"]
h = jnp.zeros((16, 64))
loops = {"Python for": unroll_loop, "scan": scan_loop, "fori_loop": fori, "while_loop": while_loop}
for name, loop in loops.items():
    lines = str(jax.make_jaxpr(loop)(h, inputs)).count("\n")
    assert jnp.allclose(loop(h, inputs), unroll_loop(h, inputs), atol=1e-5)
    print(f"{name:11} {lines:4} lines of jaxpr")

# %% tags=["measured"]
iterations = (8, 32, 128)
loops["scan, unroll=8"] = lambda h, xs: scan_loop(h, xs, unroll=8)
compile_s, run_ms = {}, {}
for name, loop in loops.items():
    compile_s[name], run_ms[name] = [], []
    for n in iterations:
        gradient = jax.jit(jax.grad(lambda h, xs: loop(h, xs).sum())) if name != "while_loop" else jax.jit(loop)
        start = time.perf_counter()
        compiled = gradient.lower(h, inputs[:n]).compile()
        compile_s[name].append(time.perf_counter() - start)
        run_ms[name].append(milliseconds(lambda: compiled(h, inputs[:n])))

print(f"{'n = 128':15} {'compile':>9} {'run':>11}   (gradient of the loop; while_loop: the loop alone)")
for name in loops:
    print(f"{name:15} {compile_s[name][-1]:7.2f} s {run_ms[name][-1]:8.2f} ms")
assert compile_s["Python for"][-1] > 5 * compile_s["scan"][-1]
assert compile_s["scan"][-1] < 5 * compile_s["scan"][0]

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2))
for (name, seconds), marker in zip(compile_s.items(), "osv^D", strict=True):
    left.loglog(iterations, seconds, marker=marker, label=name)
    right.loglog(iterations, run_ms[name], marker=marker, label=name + " (no gradient)" * (name == "while_loop"))
left.set(title="compile time, seconds", xlabel="iterations", xticks=iterations, xticklabels=iterations)
right.set(title="run time, milliseconds", xlabel="iterations", xticks=iterations, xticklabels=iterations)
for axes in (left, right):
    axes.minorticks_off()
    axes.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
right.legend(frameon=False, fontsize=8)

# %% [markdown]
# **The compile time of an unrolled loop grows with the number of iterations; that of a scan does not.** How much faster
# an unrolled loop runs depends on the body and the device: little for matrix products like these, more for short
# bodies, and more on a GPU, where each iteration of a scan launches its kernels again. `unroll=8` puts eight copies of
# the body into one iteration, compiles in between, and may run faster or, as it can on a CPU, slower: measure it.
#
# So use `scan` by default. Unroll loops with few iterations, or where a measurement says so. In mlax that is one
# argument, over the same weights: `mlax.Repeat(block, 12, mode="scan")` or `mode="unroll"`.
#
# ## Reverse-mode gradients of `while_loop`
#
# `lax.while_loop` has no reverse-mode derivative: the number of iterations is unknown, and so is the number of
# residuals to store for the backward pass.

# %% tags=["raises-exception", "version"]
jax.grad(lambda h: while_loop(h, inputs).sum())(h)

# %% [markdown]
# The fix is a static bound: a `scan` over the maximum number of iterations, in which the ones after convergence change
# nothing.


# %%
def newton_root(a, iterations=20):
    """The square root of `a` by Newton's method with early stopping: differentiable, unlike a `while_loop`."""

    def step(carry, _):
        x, done = carry
        new = 0.5 * (x + a / x)
        return (jnp.where(done, x, new), done | (jnp.abs(new - x) < 1e-6)), ~done

    (x, _), active = lax.scan(step, (a, False), length=iterations)
    return x, active.sum()


(root, used), slope = newton_root(2.0), jax.grad(lambda a: newton_root(a)[0])(2.0)
print(f"root {root:.5f} in {used} iterations; gradient {slope:.5f}, analytically {0.5 / 2**0.5:.5f}")

# %% [markdown]
# ## Good to know
#
# - A `print` in the body of a `scan` runs once, since the body is traced once.
# - The carry of a `scan` must keep its shape and dtype from step to step. If JAX complains, the initial carry is
#   usually what is wrong.
# - An out-of-bounds index does not raise, since a compiled program cannot. Reading returns the last element, writing
#   does nothing, and an off-by-one error in a loop is silent:

# %%
x = jnp.arange(3.0)
print(x[jnp.array(10)], x.at[jnp.array(10)].set(7.0))
