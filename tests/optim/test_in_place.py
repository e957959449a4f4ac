"""The forms for a GPU: updates in place in whatever order arrays are donated, and few kernels for small leaves."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mlax
from mlax import optim
from mlax._jax import share_buffers, tree_vdot
from tests.asserts import assert_close, unequal_leaves
from tests.catalogue.optimizers import ROWS

EDGES = jnp.array([0.0, -0.0, 1.0, -1.0, jnp.inf, -jnp.inf, jnp.nan, 3e38, 1e-40])
ELEMENTWISE = sorted(name for name, row in ROWS.items() if row.optimizer.elementwise)


def inputs_of_results(function, *args):
    """For each result, the indices of the arguments that it depends on, flattened."""
    jaxpr = jax.make_jaxpr(lambda *args: function(*args))(*args).jaxpr  # a new function, which JAX traces again
    reached = {variable: {index} for index, variable in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        sources = [reached.get(each, set()) for each in equation.invars if not isinstance(each, Literal)]
        reached |= dict.fromkeys(equation.outvars, set().union(*sources))
    return [reached.get(each, set()) for each in jaxpr.outvars]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_shared_buffers_change_no_value(number):
    old = {str(i): jnp.roll(EDGES, i) for i in range(number)}
    new = {name: -each for name, each in old.items()}
    for permuted in (old, dict(reversed(old.items())), {**old, "0": jnp.full(EDGES.shape, jnp.nan)}):
        assert not unequal_leaves(share_buffers(new, permuted), new)


def test_results_depend_on_all_arrays_of_their_shape_and_dtype():
    old = {"w": EDGES, "mean": EDGES + 1, "square": EDGES.astype(jnp.float16), "empty": jnp.zeros((0,))}
    results = inputs_of_results(share_buffers, old, old)
    names = sorted(old)
    depends = {name: {names[i - 4] for i in found if i >= 4} for name, found in zip(names, results, strict=True)}
    assert depends == {"empty": set(), "mean": {"mean", "w"}, "square": set(), "w": {"mean", "w"}}


def test_on_a_gpu_each_result_of_a_leaf_depends_on_its_weights_and_slots(monkeypatch):
    weights, optimizer = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}, optim.AdamW(1e-3)
    state = optimizer.init(weights)
    before = inputs_of_results(optimizer.update, weights, state, weights)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    after = inputs_of_results(optimizer.update, weights, state, weights)
    # arguments: grads, step, means, squares, weights; results: weights, step, means, squares; of bias, then of kernel
    assert before[3] == {0, 3} and after[3] == {0, 3, 5, 7}
    assert all(
        {i, i + 2, i + 4} <= after[result] for i, results in ((3, (0, 3, 5)), (4, (1, 4, 6))) for result in results
    )


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_updates_on_a_gpu_compute_the_same_numbers(name, monkeypatch):
    kernel, optimizer = jnp.linspace(-1, 1, 8).reshape(2, 2, 2), ROWS[name].optimizer
    weights = {
        "dense": {"bias": kernel[0, 0], "kernel": kernel[0]},
        "stack": {"kernel": kernel},
        "temperature": kernel[0, 0, 0],
    }
    state, grads = optimizer.init(weights), jax.tree.map(lambda w: 0.3 - w, weights)
    expected = optimizer.update(grads, state, weights, value=1.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_close(optimizer.update(grads, state, weights, value=1.0), expected)  # a norm is summed in another order


def test_updates_on_a_gpu_keep_explicit_shardings(monkeypatch):
    optimizer = optim.AdamW(1e-2)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        weights = {"kernel": jax.device_put(jnp.linspace(-1, 1, 16).reshape(8, 2), P("data", None))}
        state = optimizer.init(weights)
        expected = optimizer.update(weights, state, weights)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        found = jax.jit(lambda *args: optimizer.update(*args))(weights, state, weights)
        assert_close(found, expected)
    assert found[0]["kernel"].sharding.spec == found[1].mean["kernel"].sharding.spec == P("data", None)


@pytest.mark.parametrize("b1", [{}, {"b1": jnp.float32(0.9)}])
def test_leaves_that_are_updated_together_take_the_same_steps_as_others(b1):
    weights = {"small": jnp.ones(3), "large": jnp.ones((300, 300)), "flat": jnp.ones(90_000), "other": jnp.ones(90_001)}
    optimizer = optim.AdamW(1e-2, decayed=("**",))
    state = optimizer.init(weights)
    for number in range(1, 4):
        grads = jax.tree.map(lambda w, number=number: w / number, weights)
        weights, state = optimizer.update(grads, state, weights, **b1)
    numbers = jnp.stack([w.ravel()[:3] for w in weights.values()])
    assert_close(numbers, jnp.broadcast_to(numbers[0, 0], numbers.shape))


def test_large_leaves_of_one_size_are_updated_apart():
    shares = {}

    @mlax.frozen
    class Recording(optim.SGD):
        def leaf_update(self, now, g, w, slots):
            shares[now.path] = now.shares_array
            return super().leaf_update(now, g, w, slots)

    weights = {
        "a": jnp.ones(3),
        "b": jnp.ones(3),
        "c": jnp.ones((300, 300)),
        "d": jnp.ones(90_000),
        "e": jnp.ones(90_001),
    }
    optimizer = Recording(0.1)
    jax.eval_shape(optimizer.update, weights, optimizer.init(weights), weights)
    assert shares == {"a": True, "b": True, "c": False, "d": False, "e": True}


def test_on_a_gpu_small_leaves_are_summed_together(monkeypatch):
    leaves = {"a": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": jnp.arange(4, dtype=jnp.bfloat16), "c": jnp.float32(3)}
    expected, sums = tree_vdot(leaves, leaves), count_sums(leaves)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_close(tree_vdot(leaves, leaves), expected)
    assert_close(tree_vdot(leaves, dict(leaves)), expected)
    assert sums == 3 and count_sums(leaves) == 1


def test_on_a_gpu_leaves_on_a_mesh_are_summed_apart(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for kind in AxisType.Explicit, AxisType.Auto:
        with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(kind,))):
            leaves = {"a": jax.device_put(jnp.ones((8, 2)), P("data", None)), "b": jnp.ones(3)}
            assert count_sums(leaves) == 2


def count_sums(leaves):
    jaxpr = jax.make_jaxpr(lambda leaves: tree_vdot(leaves, leaves))(leaves)
    return sum(equation.primitive.name == "reduce_sum" for equation in jaxpr.eqns)
