"""stages shows the three stages of a function, and what became of its arguments."""

import functools

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import inspect, nn

X = jax.ShapeDtypeStruct((2, 1000), jnp.float32)


def test_dropped_arguments_and_donated_buffers_are_named():
    @functools.partial(jax.jit, donate_argnums=(1, 2, 3))
    def add(x, y, z, unused):
        return {"a": x["p"] + y}

    vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    found = inspect.stages(add, {"p": X, "q": X}, X, X, vector)
    assert found.dropped == ("x['q']", "z", "unused")
    used, dropped, _ = found.donations
    assert (used.name, used.is_used) == ("y", True)
    assert not dropped.is_used and "dropped" in dropped.reason
    assert "dropped: x['q'], float32[2, 1000]" in str(found)

    shrink = jax.jit(lambda x: x.sum(), donate_argnums=0)
    (donation,) = inspect.stages(shrink, X).donations
    assert str(donation) == "x is donated, but its buffer is not used: no result is float32[2, 1000]"


def test_a_large_constant_is_found_by_its_name():
    big = jnp.ones((1000, 300))
    small = jnp.ones(1000)
    (constant,) = inspect.stages(lambda x: jax.jit(lambda x: x @ big)(x * small), X).constants
    assert constant == ("big", "float32[1000, 300]", 1_200_000)
    assert str(constant) == "big, float32[1000, 300], 1.14 MiB: pass it as an argument"


def test_what_happens_only_while_tracing_is_listed():
    history = []

    @jax.jit
    def traced(x):
        print("called")
        history.append(x.sum())
        return x

    found = inspect.stages(traced, X)
    assert any("print('called')" in each and "jax.debug.print" in each for each in found.side_effects)
    assert any(each.startswith("history holds a tracer") for each in found.side_effects)


def test_stages_can_be_searched_by_the_path_of_a_layer():
    model = mlax.Series(up=nn.Linear(4), act=jnp.tanh, head=nn.Linear(1))
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), X)
    found = inspect.stages(model.fwd, X, trainables)
    assert {match.stage for match in found.search("dot_general")} == {"jaxpr", "stablehlo", "hlo"}
    assert any("head/dot_general" in match.text for match in found.search("head"))
    assert sum(found.kernels.values()) >= 1
    assert "5 arguments" in repr(found)


def test_leaves_that_are_not_arrays_are_static():
    found = inspect.stages(lambda x, n, name: x * n, X, 3, "a")
    assert "3.0:f32[]" in found.jaxpr
    with pytest.raises(TypeError, match="neither a function nor"):
        inspect.stages(3)
