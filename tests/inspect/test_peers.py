"""Functions that are not mlax's are inspected too: plain JAX, Flax and Equinox."""

import jax
import jax.numpy as jnp
import pytest

from mlax import inspect

X = jnp.ones((8, 16))
UP, HEAD = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4  # FLOPs


def plain():
    def loss(weights, x):
        with jax.named_scope("up"):
            x = x @ weights["up"]
        with jax.named_scope("head"):
            return (jnp.log(jax.nn.relu(x)) @ weights["head"]).sum()

    return jax.value_and_grad(loss), {"up": jnp.ones((16, 32)), "head": jnp.ones((32, 4))}, ("up", "head")


def linen():
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(32, name="up", use_bias=False)(x)
            return nn.Dense(4, name="head", use_bias=False)(jnp.log(nn.relu(x))).sum()

    variables = Model().init(jax.random.key(0), X)
    return jax.value_and_grad(Model().apply), variables, ("Model/up", "Model/head")


def nnx():
    flax = pytest.importorskip("flax.nnx")

    class Model(flax.Module):
        def __init__(self, rngs):
            self.up = flax.Linear(16, 32, use_bias=False, rngs=rngs)
            self.head = flax.Linear(32, 4, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.head(jnp.log(jax.nn.relu(self.up(x)))).sum()

    graph, weights = flax.split(Model(flax.Rngs(0)))
    return jax.value_and_grad(lambda weights, x: flax.merge(graph, weights)(x)), weights, ("", "")  # it names nothing


def equinox():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        up: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jnp.log(jax.nn.relu(self.up(x))))

    up, head = jax.random.split(jax.random.key(0))
    model = Model(eqx.nn.Linear(16, 32, False, key=up), eqx.nn.Linear(32, 4, False, key=head))
    gradient = eqx.filter_value_and_grad(lambda model, x: jax.vmap(model)(x).sum())
    return gradient, model, ("eqx.nn.Linear", "eqx.nn.Linear")


@pytest.mark.filterwarnings("ignore")  # of the other libraries
@pytest.mark.parametrize("library", [plain, linen, nnx, equinox])
def test_a_function_of_another_library_is_inspected_with_its_names(library):
    function, weights, (up, head) = library()
    flops = {}
    for row in inspect.cost(function, weights, X).rows:
        flops[row.path, row.is_backward] = row.flops
    if up == head:
        assert (flops[up, False], flops[up, True]) == (UP + HEAD, UP + 2 * HEAD)
    else:
        assert (flops[up, False], flops[up, True]) == (UP, UP)
        assert (flops[head, False], flops[head, True]) == (HEAD, 2 * HEAD)
    assert inspect.memory(function, weights, X, batch=8).batched > 0
    stages = inspect.stages(function, weights, X)
    assert len(stages.arguments) == 3 and not stages.dropped and stages.search("dot_general")
    assert any(row.path == head and row.is_backward for row in inspect.dtypes(function, weights, X).rows)
    assert not inspect.transfers(function, weights, X).rows
    found = inspect.nonfinite(function, weights, 0 * X)
    assert (found.cause or found).primitive == "log" and "test_peers.py" in (found.cause or found).source


@pytest.mark.filterwarnings("ignore")
def test_the_jitted_functions_of_flax_and_equinox_are_watched_for_recompilation():
    flax, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    model = flax.Linear(16, 4, rngs=flax.Rngs(0))
    for jitted in (flax.jit(lambda model, x: model(x)), eqx.filter_jit(lambda model, x: x + 1)):
        watched = inspect.retrace(jitted, show=False)
        for n in (8, 4):
            watched(model, X[:n])
        (change,) = watched.compilations[-1].changes
        assert change[:3] == ("x", "float32[8, 16]", "float32[4, 16]")
        assert inspect.stages(jitted, model, X).hlo
