"""Each planted fault is found, and named, by one call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, inspect, nn, place

X = jnp.ones((2, 4))


@pytest.fixture
def scaled():
    def scaled(x, rate):
        return x * rate

    return inspect.retrace(jax.jit(scaled), show=False)


def test_a_shape_that_changes_each_step(scaled):
    for size in (5, 6, 7):
        scaled(jnp.ones(size), 2.0)
    second, third = (change for each in scaled.compilations[1:] for change in each.changes)
    assert str(second).startswith("x was float32[5] and is now float32[6]; pad it to a fixed shape")
    assert str(third).startswith("x was float32[6] and is now float32[7]; pad it to a fixed shape")


def test_a_python_float_that_turns_weakly_typed(scaled):
    for rate in (jnp.float32(0.1), 0.1, 0.2):
        scaled(X, rate)
    assert len(scaled.compilations) == 2
    assert "rate was float32[] and is now float32[], weakly typed" in str(scaled)


def test_an_unhashable_static_argument():
    apply = inspect.retrace(jax.jit(lambda x, axes: x.sum(axes), static_argnames="axes"))
    with pytest.raises(ValueError, match="hashable") as error:
        apply(X, [0, 1])
    assert error.value.__notes__ == ["if axes, a list, is the static argument: pass a tuple or a frozen dataclass."]


@pytest.mark.parametrize("library", [jnp, np])
def test_a_closed_over_constant_of_100_megabytes(library):
    table = library.zeros((25_000_000,), "float32")
    found = inspect.stages(lambda x: x * table, jax.ShapeDtypeStruct((), jnp.float32))
    assert "constant: table, float32[25000000], 95.4 MiB: pass it as an argument" in str(found)
    assert len(found.stablehlo) < 10_000  # its elements are left out


def test_a_donated_buffer_that_could_not_be_used():
    @functools.partial(jax.jit, donate_argnames=("state", "batch"))
    def step(state, batch):
        return state + batch.sum(0)

    shapes = jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.float32)
    assert [str(each) for each in inspect.stages(step, *shapes).donations] == [
        "state is donated",
        "batch is donated, but its buffer is not used: no result is float32[2, 4]",
    ]


def test_an_upcast():
    model = mlax.Series(up=nn.Linear(4), norm=mlax.F(lambda x: x.astype("float32").mean(-1).astype("bfloat16")))
    x = X.astype("bfloat16")
    trainables, _ = model.init(jax.random.key(0), x)
    (first, *_) = dtypes.audit(model.fwd, x, trainables)
    assert first.path == "norm"
    rows = {row.path: dict(row.counts) for row in inspect.dtypes(model.fwd, x, trainables).rows}
    assert set(rows["up"]) == {"bfloat16"} and "float32" in rows["norm"]


def blocks(function):
    """Twelve blocks whose scales are 1, except for that of block 7, which is 0."""
    block = mlax.Residual(mlax.Series(scale=nn.Scaler(), act=mlax.F(function)))
    model = mlax.Series(blocks=mlax.Repeat(block, 12, mode="scan"))
    trainables, _ = model.init(jax.random.key(0), X)
    trainables = jax.tree.map(lambda leaf: leaf.at[7].set(0.0), trainables)
    return lambda trainables: model.fwd(X, trainables)[0].sum(), trainables


def test_a_nan_from_the_logarithm_of_zero_in_block_7_of_12():
    loss, trainables = blocks(lambda x: x * jnp.log(x))
    found = inspect.nonfinite(loss, trainables)
    assert (found.path, found.is_backward) == ("blocks/7/layer/act", False)
    assert found.cause.primitive == "log" and found.cause.inputs[0].zeros == X.size


def test_a_nan_from_the_square_root_at_zero_that_only_the_backward_pass_has():
    loss, trainables = blocks(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0))
    assert inspect.nonfinite(loss, trainables) is None
    found = inspect.nonfinite(jax.grad(loss), trainables)
    assert (found.path, found.is_backward) == ("blocks/7/layer/act", True)


def test_a_hidden_transfer_to_the_host():
    def norm(x):
        return jax.pure_callback(np.tanh, x, x, vmap_method="sequential")  # NumPy in the middle of a model

    model = mlax.Series(up=nn.Linear(4), norm=mlax.F(norm))
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), X)
    rows = {(row.layer, row.kind): row.bytes for row in inspect.transfers(model.fwd, X, trainables).rows}
    assert rows == {("norm", "device to callback"): X.nbytes, ("norm", "callback to device"): X.nbytes}
    double = jax.jit(lambda x: 2 * x)
    double(X)
    with pytest.raises(place.UnplannedTransfer, match="implicit host-to-device transfer of float32"), place.guard():
        double(np.ones((2, 4), np.float32))
