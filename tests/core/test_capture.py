"""capture: the outputs of parts, beside what `fwd` returns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, nn, place
from tests.arrays import normal
from tests.asserts import assert_close, assert_raises, unequal_leaves
from tests.layers import Block, Count, Modulated, tanh

RNG, KEY = jax.random.key(0), jax.random.key(1)
X = normal(4, 6)


BLOCK = mlax.Series(up=nn.Linear(12), act=tanh, drop=nn.Dropout(0.5), count=Count(), down=nn.Linear(6))


def model(mode="scan"):
    return mlax.Series(first=nn.Linear(6), blocks=mlax.Repeat(BLOCK, 3, mode=mode), norm=nn.BatchNorm())


def run(layer, x, *patterns, inference_mode=False):
    """The variables, y and the outputs captured, where y and the new state are those of `fwd`."""
    variables = layer.init(RNG, x)
    y, state, outputs = mlax.capture(layer, *patterns)(x, *variables, rng=KEY, inference_mode=inference_mode)
    wanted = layer.fwd(x, *variables, rng=KEY, inference_mode=inference_mode)
    assert jax.tree.structure((y, state)) == jax.tree.structure(wanted)
    if not isinstance(jax.tree.leaves(y)[0], jax.core.Tracer):
        assert_close((y, state), wanted)  # bitwise where no scan is compiled, see below
    return variables, y, outputs


def test_output_and_state_are_bitwise_those_of_fwd():
    layer = mlax.Series(block=Block(6), norm=nn.BatchNorm())
    variables = layer.init(RNG, X)
    y, state, _ = mlax.capture(layer, "**")(X, *variables, rng=KEY)
    assert not unequal_leaves((y, state), layer.fwd(X, *variables, rng=KEY))


def test_the_outputs_of_repetitions_are_stacked_in_every_mode():
    (trainables, state), y, outputs = run(model(), X, "first", "blocks/stacked", "blocks", "**/up")
    assert {path: output.shape for path, output in outputs.items()} == {
        "first": (4, 6),
        "blocks": (4, 6),
        "blocks/stacked": (3, 4, 6),
        "blocks/stacked/up": (3, 4, 12),
    }
    assert_close(outputs["first"], nn.Linear(6).fwd(X, trainables["first"])[0])
    np.testing.assert_array_equal(outputs["blocks"], outputs["blocks/stacked"][-1])
    assert_close(nn.BatchNorm().fwd(outputs["blocks"], trainables["norm"], state["norm"])[0], y, 1e-5)
    up = jax.tree.map(lambda leaf: leaf[1], trainables["blocks"]["stacked"]["up"])
    assert_close(outputs["blocks/stacked/up"][1], nn.Linear(12).fwd(outputs["blocks/stacked"][0], up)[0], 1e-5)
    for mode in ("remat", "unroll"):
        fwd = mlax.capture(model(mode), "first", "blocks/stacked", "blocks", "**/up")
        assert_close(fwd(X, trainables, state, rng=KEY)[-1], outputs, 1e-5)


def test_a_second_call_of_a_part_is_numbered():
    @mlax.frozen
    class Twice(mlax.Composite):
        inner: mlax.Layer = mlax.Series(count=Count(), shared=nn.Linear(6))

        def wire(self, sub, x):
            return sub.inner(jnp.tanh(sub.inner(x)))

    (trainables, _), y, outputs = run(Twice(), X, "inner", "**/shared")
    assert set(outputs) == {"inner", "inner#2", "inner/shared", "inner#2/shared"}
    np.testing.assert_array_equal(outputs["inner#2"], y)
    np.testing.assert_array_equal(outputs["inner"], nn.Linear(6).fwd(X, trainables["inner"]["shared"])[0])


def test_a_part_that_is_not_called_has_no_output():
    @mlax.frozen
    class Training(mlax.Composite):
        drop: mlax.Layer = nn.Dropout(0.5)
        linear: mlax.Layer = nn.Linear(6)

        def wire(self, sub, x):
            return sub.linear(x if sub.inference_mode else sub.drop(x))

    assert set(run(Training(), X, "**")[-1]) == {"drop", "linear"}
    assert set(run(Training(), X, "**", inference_mode=True)[-1]) == {"linear"}


@pytest.mark.parametrize(
    ("layer", "x", "shapes"),
    [
        (mlax.Map(mlax.Series(a=nn.Linear(2), b=nn.Linear(3))), (4, 5, 6), {"a": (5, 4, 2), "b": (5, 4, 3)}),
        (mlax.Map(nn.Linear(2), variables=0), (4, 5, 6), {"stacked": (5, 4, 2)}),
        (mlax.Remat(mlax.Series(a=nn.Linear(2))), (4, 6), {"a": (4, 2)}),
        (nn.SpectralNorm(mlax.Series(a=nn.Linear(2), b=nn.BatchNorm())), (4, 6), {"a": (4, 2), "b": (4, 2)}),
        (place.Stream(mlax.Repeat(BLOCK, 2)), (4, 6), {"stacked/down": (2, 4, 6)}),
        (mlax.Parallel(a=tanh, b=nn.MultiHeadAttention(2)), (4, 5, 6), {"a": (4, 5, 6), "b/out": (4, 5, 6)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, mlax.Layer) else "",
)
def test_outputs_pass_through_wrappers(layer, x, shapes):
    _, _, outputs = jax.eval_shape(lambda x: run(layer, x, *shapes), normal(*x))
    assert {path: output.shape for path, output in outputs.items()} == shapes


def test_outputs_inside_mixed_precision_have_the_dtype_computed_in():
    layer = dtypes.Mixed(mlax.Series(block=Modulated(6)))
    _, _, outputs = jax.eval_shape(lambda x: run(layer, x, "**/norm", "block"), (X, X))
    assert {path: str(output.dtype) for path, output in outputs.items()} == dict.fromkeys(outputs, "bfloat16")


@mlax.frozen
class Phases(mlax.CompositeCell):
    """A cell that calls one part in every phase."""

    same: mlax.Layer = nn.Linear(3)
    before: mlax.Layer = nn.Linear(3)

    def initial_carry(self, x):
        return jnp.zeros((x.shape[0], 3), x.dtype)

    def ahead(self, sub, x):
        return sub.same(sub.before(x))

    def feedback(self, sub, carry):
        return sub.same(carry)

    def step(self, sub, carry, ahead):
        return ahead, jnp.tanh(sub.same(ahead))


def test_the_outputs_of_time_steps_are_stacked():
    x, layer = normal(2, 5, 3), mlax.Recurrent(Phases())
    (trainables, _), y, outputs = run(layer, x, "**")
    paths = ["before", "same", "same#2", "same#3"]
    assert {path: output.shape for path, output in outputs.items()} == dict.fromkeys(paths, (5, 2, 3))
    assert_close(jnp.tanh(outputs["same#3"]).swapaxes(0, 1), y)
    carry = Phases().initial_carry(x[:, 0])
    for time in range(5):
        (carry, _), _, wanted = mlax.capture(Phases(), "**")((carry, x[:, time]), trainables)
        assert_close({path: output[time] for path, output in outputs.items()}, wanted, 1e-5)


def test_gradients_flow_through_the_outputs_of_time_steps():
    x, layer = normal(2, 2, 3), mlax.Recurrent(Phases())

    def by_scan(trainables):
        return sum((output**3).sum() for output in mlax.capture(layer, "**")(x, trainables)[-1].values())

    def by_loop(trainables):
        carry, total = Phases().initial_carry(x[:, 0]), 0.0
        for time in range(2):
            (carry, _), _, outputs = mlax.capture(Phases(), "**")((carry, x[:, time]), trainables)
            total += sum((output**3).sum() for output in outputs.values())
        return total

    found, wanted = jax.jit(lambda given: (jax.grad(by_scan)(given), jax.grad(by_loop)(given)))(layer.init(RNG, x)[0])
    assert_close(found, wanted, 1e-5)


def test_a_cell_with_state_returns_its_outputs_and_its_state():
    @mlax.frozen
    class Counting(mlax.Composite, mlax.Cell):
        count: mlax.Layer = Count()
        linear: mlax.Layer = nn.Linear(3)

        def initial_carry(self, x):
            return jnp.zeros_like(x)

        def wire(self, sub, carry, x):
            y = sub.count(sub.linear(carry + x))
            return y, y

    _, y, outputs = run(mlax.Recurrent(Counting(), reverse=True), normal(2, 5, 3), "count")
    np.testing.assert_array_equal(outputs["count"].swapaxes(0, 1), y)


def test_gradients_flow_through_outputs_in_every_mode():
    block = mlax.Series(up=nn.Linear(6), act=tanh)
    trainables, _ = mlax.Repeat(block, 2).init(RNG, X)

    def loss(trainables, mode):
        y, _, outputs = mlax.capture(mlax.Repeat(block, 2, mode=mode), "**/up")(X, trainables)
        return (outputs["stacked/up"] ** 2).sum() + 0 * y.sum()

    def by_loop(trainables):
        x, total = X, 0.0
        for index in range(2):
            h, _ = nn.Linear(6).fwd(x, jax.tree.map(lambda leaf, index=index: leaf[index], trainables["stacked"]["up"]))
            x, total = jnp.tanh(h), total + (h**2).sum()
        return total

    losses = [functools.partial(loss, mode=mode) for mode in ("scan", "remat", "unroll")]
    *found, wanted = jax.jit(lambda given: [jax.grad(each)(given) for each in (*losses, by_loop)])(trainables)
    for grads in found:
        assert_close(grads, wanted, 1e-5)


def test_equal_captures_share_one_compilation():
    traces = []

    def count(x):
        traces.append(1)
        return x

    def layer():
        return mlax.Series(a=nn.Linear(6), count=mlax.F(count))

    variables = layer().init(RNG, X)
    traces.clear()
    for _ in range(3):
        fwd = jax.jit(mlax.capture(layer(), "a"), static_argnames="inference_mode")
        fwd(X, *variables, inference_mode=True)
    assert len(traces) == 1
    assert mlax.capture(layer(), "a") == mlax.capture(layer(), "a") != mlax.capture(layer(), "*")
    assert hash(mlax.capture(layer(), "a")) == hash(mlax.capture(layer(), "a"))


def test_capture_works_under_vmap():
    variables = model().init(RNG, X)
    _, _, whole = mlax.capture(model(), "first")(X, *variables, inference_mode=True)
    one = jax.vmap(lambda x: mlax.capture(model(), "first")(x[None], *variables, inference_mode=True)[-1]["first"][0])
    assert_close(one(X), whole["first"])


def test_a_pattern_without_a_match_is_an_error_that_suggests_one():
    assert_raises(lambda: mlax.capture(model(), "frist"), KeyError, ("'frist' matches nothing", "mean 'first'?"))
    assert_raises(lambda: mlax.capture(model()), TypeError, ("capture: pass at least one pattern", '"**"'))
    assert_raises(lambda: mlax.capture(nn.Linear, "a"), TypeError, ("the model is the class Linear",))


def test_outputs_inside_a_pipeline_are_refused_and_that_of_the_whole_is_captured():
    pipelined = place.Pipelined(mlax.Repeat(nn.Linear(6), 2), stages=2, microbatches=2)
    layer = mlax.Series(blocks=pipelined)
    variables = layer.init(RNG, X)
    with jax.set_mesh(jax.make_mesh((2,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))):
        weights = jax.device_put(variables[0], P("stage"))
        words = ("outputs inside a pipeline cannot be captured", "capture that of the whole pipeline")
        assert_raises(
            lambda: jax.eval_shape(lambda: mlax.capture(layer, "blocks/stacked")(X, weights)), ValueError, words
        )
        _, _, outputs = jax.eval_shape(lambda: mlax.capture(layer, "blocks")(X, weights))
        assert outputs["blocks"].shape == (4, 6)
    assert set(run(layer, X, "blocks/stacked")[-1]) == {"blocks/stacked"}  # without a mesh
