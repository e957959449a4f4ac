"""Sharded weights: every slot is sharded as `partition` says, and no update reshards or recompiles."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mlax import optim
from tests.asserts import assert_close, compilations
from tests.catalogue.optimizers import ROWS

# square matrices: of others SOAP's bases are not unique, and so neither are its steps
SHAPES = {"dense": {"bias": (8,), "kernel": (8, 8)}, "stack": {"kernel": (2, 8, 8)}, "temperature": ()}
SPECS = {"dense": {"bias": P(None), "kernel": P("data", "model")}, "stack": {"kernel": P(None, "model", "data")}}
SPECS["temperature"] = P()
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # half the time to compile
BOTH = ("Adam", "AdamW kahan", "Adafactor", "Muon", "SOAP", "LBFGS", "FromOptax", "Everything")
PLAIN = [name for name, row in ROWS.items() if not row.optimizer.inner_optimizers()]
PLAIN += ["Accumulate", "Groups", "Everything"]
# of elementwise optimizers, whose slots all have the axes of their parameters, `make test` runs these
ELEMENTWISE = ("SGD momentum", "Adam", "AdamW master", "AdamW kahan", "ScheduleFree", "Accumulate", "Groups")
EXPLICIT = ("Adam", "AdamW kahan", "Muon", "LBFGS", "Everything")  # in `make test`; the others with automatic axes
CASES = [(name, AxisType.Auto) for name in PLAIN] + [(name, AxisType.Explicit) for name in BOTH]
BY_PATH = {
    **{
        name: ROWS[name].optimizer
        for name in ("SGD", "SGD momentum", "Adam", "AdamW", "Lion", "ClipGlobalNorm", "Groups")
    },
    "Freeze": optim.Freeze(optim.Adam(1e-2), ("**/bias",)),  # without a master slot, which depends on the dtype
}
BY_SHAPE = ("Adafactor", "SOAP", "Muon", "LBFGS", "FromOptax", "Everything")


def mesh(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def is_shape(node):
    return isinstance(node, tuple)


def tree(dtype, seed=0):
    draws = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: jnp.asarray(draws.normal(size=shape), dtype), SHAPES, is_leaf=is_shape)


def structs(dtype="float32", shapes=SHAPES):
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)


def on(devices, specs):
    return jax.tree.map(lambda spec: NamedSharding(devices, spec), specs, is_leaf=lambda node: isinstance(node, P))


def wrongly_sharded(arrays, wanted):
    """The paths of arrays with another sharding than the wanted one."""
    found, _ = jax.tree_util.tree_flatten_with_path(arrays)
    return [
        f"{jax.tree_util.keystr(path)} has {leaf.sharding} and not {sharding}"
        for (path, leaf), sharding in zip(found, jax.tree.leaves(wanted), strict=True)
        if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    ]


@dataclasses.dataclass(frozen=True)
class Run:
    """Three updates of sharded weights, and of the same ones on one device."""

    state: Any
    jitted_state: Any
    wanted: Any  # the shardings of the state
    before: Any  # the shardings of weights and state
    after: Any
    traces: int
    compiled: int
    alone: Any
    dtype: str


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=pytest.mark.thorough)
        if (ROWS[case[0]].optimizer.elementwise and case[0] not in ELEMENTWISE)
        or (case[0] in EXPLICIT) != (case[1] == AxisType.Explicit)
        else case
        for case in CASES
    ],
    ids=lambda case: f"{case[0]}-{case[1].name}",
)
def run(request):
    name, kind = request.param
    row, devices, traces = ROWS[name], mesh(kind), 0
    narrow = not row.no_slot_declarations and row.optimizer.policy("dense/kernel").rounding != optim.RoundToNearest()
    dtype = "bfloat16" if narrow else "float32"

    def update(grads, state, trainables):
        nonlocal traces
        traces += 1
        return row.update(grads, state, trainables)

    # without a mesh in the context, only the arrays have shardings
    with jax.set_mesh(devices) if kind == AxisType.Explicit else contextlib.nullcontext():
        trainables = jax.device_put(tree(dtype), on(devices, SPECS))
        state, jitted_state = (
            row.optimizer.init(trainables),
            jax.jit(row.optimizer.init, compiler_options=QUICK)(trainables),
        )
        wanted = on(devices, row.optimizer.partition(SPECS, trainables))
        before = jax.tree.map(lambda leaf: leaf.sharding, (trainables, jitted_state))
        jitted = jax.jit(update, compiler_options=QUICK)
        after = trainables, jitted_state
        first, *later = (jax.device_put(tree(dtype, seed), on(devices, SPECS)) for seed in (1, 2, 3))
        after = jitted(first, after[1], after[0])
        with compilations() as found:
            for grads in later:
                after = jitted(grads, after[1], after[0])
    compiled = 1 + len(found)
    return Run(state, jitted_state, wanted, before, after, traces, compiled, on_one_device(name, dtype), dtype)


@functools.cache
def on_one_device(name, dtype):
    update, trainables = jax.jit(ROWS[name].update, compiler_options=QUICK), tree(dtype)
    state = ROWS[name].optimizer.init(trainables)
    for seed in (1, 2, 3):
        trainables, state = update(tree(dtype, seed), state, trainables)
    return trainables, state


def test_init_shards_every_slot_as_partition_says(run):
    assert not wrongly_sharded(run.state, run.wanted)


def test_init_under_jit_shards_every_slot_as_partition_says(run):
    assert not wrongly_sharded(run.jitted_state, run.wanted)


def test_three_updates_change_no_sharding(run):
    assert not wrongly_sharded(run.after, run.before)


def test_three_updates_are_one_compilation(run):
    assert run.traces == run.compiled == 1


def test_values_equal_those_on_one_device(run):
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if run.dtype == "bfloat16" else {"rtol": 5e-4, "atol": 5e-5}
    free = {name: None for name in run.alone[1]._fields if name.endswith("_basis")}  # up to signs
    (new, state), (wanted, wanted_state) = run.after, run.alone
    found, wanted = (new, state._replace(**free)), (wanted, wanted_state._replace(**free))
    assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("optimizer", BY_PATH.values(), ids=BY_PATH)
def test_partition_needs_no_shapes_where_they_do_not_matter(optimizer):
    assert optimizer.partition(SPECS) == optimizer.partition(SPECS, structs())


@pytest.mark.parametrize("name", BY_SHAPE)
def test_the_error_of_partition_asks_for_the_trainables_where_shapes_matter(name):
    with pytest.raises(ValueError, match=r"partition\(specs, trainables\)"):
        ROWS[name].optimizer.partition(SPECS)


@pytest.mark.parametrize("name", ROWS)
def test_partition_takes_specs_and_shardings(name):
    optimizer, devices = ROWS[name].optimizer, mesh(AxisType.Auto)
    specs, shardings = (optimizer.partition(given, structs()) for given in (SPECS, on(devices, SPECS)))
    assert on(devices, specs) == shardings


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "SOAP", "FromOptax"])
def test_a_partition_can_be_out_shardings_of_jit(name):
    devices, optimizer = mesh(AxisType.Auto), ROWS[name].optimizer
    wanted = optimizer.partition(on(devices, SPECS), structs())
    state = jax.jit(optimizer.init, out_shardings=wanted)(tree("float32"))
    assert not wrongly_sharded(state, wanted)


def test_factored_slots_keep_the_axes_that_they_have():
    state = optim.Adafactor(stacked=("stack/**",)).partition(SPECS, structs())
    assert state.rows["dense"]["kernel"] == P("data") and state.columns["dense"]["kernel"] == P("model")
    assert state.rows["stack"]["kernel"] == P(None, "model") and state.columns["stack"]["kernel"] == P(None, "data")
    assert state.square["dense"]["bias"] == P(None) and state.step == P()


def test_slots_of_optax_in_other_shapes_than_the_weights_are_replicated():
    optimizer = optim.from_optax(optax.adafactor(1e-2, min_dim_size_to_factor=4))
    state = optimizer.partition(SPECS, structs())
    assert state.v_row["dense"]["kernel"] == P() and state.v["dense"]["bias"] == P(None)


@pytest.mark.parametrize("name", ROWS)
def test_the_state_of_weights_that_fit_nowhere_can_be_evaluated_abstractly(name):
    side = 1 << 20
    huge = {"dense": {"bias": (side,), "kernel": (side, side)}, "stack": {"kernel": (2, side, side)}}
    given = structs(shapes={**huge, "temperature": ()})
    held = len(jax.live_arrays())
    state = jax.eval_shape(ROWS[name].optimizer.init, given)
    assert len(jax.live_arrays()) <= held  # others may be collected meanwhile
    assert state.step.shape == () and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", ["Adam", "ScheduleFree", "Average", "Lookahead", "AdamW master", "Everything"])
def test_weights_and_state_can_both_be_donated(name):
    trainables, optimizer = tree("float32"), ROWS[name].optimizer
    state = optimizer.init(trainables)
    update = jax.jit(optimizer.update, donate_argnums=(1, 2))
    new, after = update(tree("float32", 1), state, trainables)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state, trainables)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, after)))


def test_gradients_are_accumulated_eagerly_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        trainables = {"kernel": jax.device_put(jnp.ones((8, 2)), P("data", None))}
        optimizer = optim.Accumulate(optim.SGD(0.1), 2)
        state = optimizer.init(trainables)
        for _ in range(2):
            trainables, state = optimizer.update({"kernel": trainables["kernel"]}, state, trainables)
    np.testing.assert_allclose(trainables["kernel"], 0.9, rtol=1e-6)
    assert trainables["kernel"].sharding.spec == state.gathered["kernel"].sharding.spec == P("data", None)


@pytest.mark.parametrize(
    ("name", "is_set"),
    [
        ("Adam", False),
        ("Muon", True),
        *(
            pytest.param(name, is_set, marks=pytest.mark.thorough)
            for name, is_set in (("Adam", True), ("Muon", False), ("Adafactor", True), ("Adafactor", False))
        ),
    ],
)
def test_gradients_are_accumulated_eagerly_on_explicit_axes(name, is_set):
    devices = mesh(AxisType.Explicit)
    optimizer = optim.Accumulate(ROWS[name].optimizer, 2)
    with jax.set_mesh(devices) if is_set else contextlib.nullcontext():
        weights = jax.device_put(tree("float32"), on(devices, SPECS))
        new, state = weights, optimizer.init(weights)
        for seed in (1, 2):
            new, state = optimizer.update(jax.device_put(tree("float32", seed), on(devices, SPECS)), state, new)
        assert jax.tree.map(lambda leaf: leaf.sharding, new) == jax.tree.map(lambda leaf: leaf.sharding, weights)
    plain, state = tree("float32"), optimizer.init(tree("float32"))
    for seed in (1, 2):
        plain, state = optimizer.update(tree("float32", seed), state, plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), new, plain)
