# %% [markdown]
# # What Python does under tracing
#
# Python runs once, while tracing, and decides which program there will be. The program decides nothing by itself unless
# it is told to by `cond`, `switch`, `scan`, `fori_loop` or `while_loop`. This page shows the difference for prints,
# conditionals and loops, and measures which loop to use.

# %%
import time
import timeit

import jax
import jax.numpy as jnp
from jax import lax

# %% [markdown]
# ## Prints
#
# `print` speaks while tracing, of tracers. `jax.debug.print` is an operation of the program, and speaks on each run,
# of values.


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
# An `if` on a shape, a dtype or a Python flag is fine: it picks one program, and costs nothing when that runs. An `if`
# on a *value* is an error (page 8 shows it), since there is no value yet. The three replacements differ in what they
# compute:
#
# | | computes | use it for |
# |---|---|---|
# | `jnp.where(p, a, b)` | both, then picks for each element | elementwise choices |
# | `lax.cond(p, f, g, x)` | one of the two, for the whole array | rare, dear branches |
# | `lax.switch(i, [f, g, h], x)` | one of many | the same, more of them |


# %%
def dear(x):
    for _ in range(50):
        x = jnp.sin(x @ x)
    return x


def cheap(x):
    return x


by_where = jax.jit(lambda p, x: jnp.where(p, dear(x), cheap(x)))
by_cond = jax.jit(lambda p, x: lax.cond(p, dear, cheap, x))
by_vmap = jax.jit(jax.vmap(by_cond))


def milliseconds(call, number=5):
    return 1e3 * min(timeit.repeat(lambda: jax.block_until_ready(call()), number=number, repeat=5)) / number


# %% tags=["measured"]
x = jnp.full((128, 128), 0.01)
four = jnp.stack([x] * 4)
where, cond = milliseconds(lambda: by_where(False, x)), milliseconds(lambda: by_cond(False, x))
mapped = milliseconds(lambda: by_vmap(jnp.zeros(4, bool), four)) / 4
print(f"the branch is not taken: where {where:.2f} ms, cond {cond:.2f} ms, cond under vmap {mapped:.2f} ms an example")
assert cond < where / 5
assert mapped > cond * 5

# %% [markdown]
# The last number is the surprise: **under `vmap` a `cond` becomes a `where`.** Different examples may need different
# branches, so both are computed, for all of them. The jaxpr says so:


# %% tags=["version"]
def names(function, *args):
    return [equation.primitive.name for equation in jax.make_jaxpr(function)(*args).jaxpr.eqns]


one = lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x)
single, several = names(one, True, 1.0), names(jax.vmap(one), jnp.array([True, False]), jnp.ones(2))
print("for one example:", *single)
print("for many:       ", *several)
assert "cond" in single and {"sin", "cos", "select_n"} < set(several)

# %% [markdown]
# ## Loops
#
# A Python loop is *unrolled*: the program holds its body as many times as it ran. The others hold it once.
#
# | | number of rounds | gradient | collects results |
# |---|---|---|---|
# | Python `for` | fixed while tracing | yes | yes |
# | `lax.scan` | fixed while tracing | yes | yes, stacked |
# | `lax.fori_loop` | may be an array | only if it is fixed | no |
# | `lax.while_loop` | until a condition fails | forward mode only | no |
#
# Take a recurrent network, the same small product again and again, 8 to 128 times.

# %%
kernel = jax.random.normal(jax.random.key(0), (64, 64)) / 8
inputs = jax.random.normal(jax.random.key(1), (128, 64))


def cell(h, x):
    return jnp.tanh(h @ kernel + x)


def unrolled(h, xs):
    for x in xs:
        h = cell(h, x)
    return h


def scanned(h, xs, unroll=1):
    return lax.scan(lambda h, x: (cell(h, x), None), h, xs, unroll=unroll)[0]


def fori(h, xs):
    return lax.fori_loop(0, len(xs), lambda i, h: cell(h, xs[i]), h)


def until(h, xs):
    return lax.while_loop(lambda c: c[0] < len(xs), lambda c: (c[0] + 1, cell(c[1], xs[c[0]])), (0, h))[1]


# %% tags=["version"]
h = jnp.zeros((16, 64))
loops = {"Python for": unrolled, "scan": scanned, "fori_loop": fori, "while_loop": until}
for name, loop in loops.items():
    lines = str(jax.make_jaxpr(loop)(h, inputs)).count("\n")
    assert jnp.allclose(loop(h, inputs), unrolled(h, inputs), atol=1e-5)
    print(f"{name:11} {lines:4} lines of jaxpr")

# %% tags=["measured"]
rounds = (8, 32, 128)
loops["scan, unroll=8"] = lambda h, xs: scanned(h, xs, unroll=8)
compile_s, run_ms = {}, {}
for name, loop in loops.items():
    compile_s[name], run_ms[name] = [], []
    for n in rounds:
        gradient = jax.jit(jax.grad(lambda h, xs: loop(h, xs).sum())) if name != "while_loop" else jax.jit(loop)
        began = time.perf_counter()
        compiled = gradient.lower(h, inputs[:n]).compile()
        compile_s[name].append(time.perf_counter() - began)
        run_ms[name].append(milliseconds(lambda: compiled(h, inputs[:n])))

print(f"{'n = 128':15} {'compile':>9} {'run':>11}   (loop and gradient; while_loop has the loop alone)")
for name in loops:
    print(f"{name:15} {compile_s[name][-1]:7.2f} s {run_ms[name][-1]:8.2f} ms")
assert compile_s["Python for"][-1] > 5 * compile_s["scan"][-1]
assert compile_s["scan"][-1] < 5 * compile_s["scan"][0]

# %% tags=["drawing"]
from matplotlib import pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2))
for (name, seconds), marker in zip(compile_s.items(), "osv^D", strict=True):
    left.loglog(rounds, seconds, marker=marker, label=name)
    right.loglog(rounds, run_ms[name], marker=marker, label=name + " (no gradient)" * (name == "while_loop"))
left.set(title="compiling, seconds", xlabel="rounds", xticks=rounds, xticklabels=rounds)
right.set(title="running, milliseconds", xlabel="rounds", xticks=rounds, xticklabels=rounds)
for axes in (left, right):
    axes.minorticks_off()
    axes.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
right.legend(frameon=False, fontsize=8)

# %% [markdown]
# **Compiling an unrolled loop grows with the number of rounds, of a scan it does not.** How much an unrolled one gains
# when it runs depends on the body and the device: little for matrix products like these, more for short bodies, and
# more on a GPU, where each round of a scan launches its kernels anew. `unroll=8` puts eight bodies into one round,
# compiles in between, and may run faster or, as it can on a CPU, slower: measure it.
#
# So: `scan` by default. Unroll what has few rounds, or what you have measured. In mlax that is one word, over the same
# weights: `mlax.Repeat(block, 12, mode="scan")` or `mode="unroll"`.
#
# ## A gradient through `while_loop`
#
# There is none in reverse: the number of rounds is not known, so nobody knows how much to keep for the way back.

# %% tags=["raises-exception", "version"]
jax.grad(lambda h: until(h, inputs).sum())(h)

# %% [markdown]
# The cure is a bound that is known: a `scan` of the largest number of rounds, in which finished ones change nothing.


# %%
def newton_root(a, rounds=20):
    """The square root of `a`, by steps that stop when they are small: differentiable, as `while_loop` is not."""

    def step(carried, _):
        x, done = carried
        new = 0.5 * (x + a / x)
        return (jnp.where(done, x, new), done | (jnp.abs(new - x) < 1e-6)), ~done

    (x, _), active = lax.scan(step, (a, False), length=rounds)
    return x, active.sum()


(root, used), slope = newton_root(2.0), jax.grad(lambda a: newton_root(a)[0])(2.0)
print(f"root {root:.5f} in {used} rounds; slope {slope:.5f}, by the book {0.5 / 2**0.5:.5f}")

# %% [markdown]
# ## What I would have wished to know
#
# - A `print` in the body of a `scan` speaks once, since the body is traced once.
# - A `scan` wants the carry to keep its shape and dtype from round to round. If it complains, the first value of the
#   carry is usually what is wrong.
# - An index that is out of range does not raise, since a program cannot. Reading takes the last element, writing does
#   nothing, and an off-by-one in a loop is silent:

# %%
x = jnp.arange(3.0)
print(x[jnp.array(10)], x.at[jnp.array(10)].set(7.0))
