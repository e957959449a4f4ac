"""Several inputs to `wire`: a composite takes them from a tuple, and calls parts with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn, place
from tests.asserts import assert_close, assert_raises
from tests.layers import Modulated

RNG = jax.random.key(0)
X, T = jnp.linspace(-1, 1, 24).reshape(4, 6), jnp.linspace(0, 1, 12).reshape(4, 3)


@mlax.frozen
class Plain(mlax.Composite):
    """A scaled sum of its inputs, the second of which may be left out."""

    linear: mlax.Layer = nn.Linear(6)

    def wire(self, sub, x, t=None):
        return sub.linear(x) if t is None else sub.linear(x) + t.sum()


@mlax.frozen
class Starred(mlax.Composite):
    def wire(self, sub, x, *more):
        return sum(more, start=x)


@mlax.frozen
class Outer(mlax.Composite):
    """Calls parts with several inputs."""

    blocks: mlax.Layer
    after: mlax.Layer = Plain()

    def wire(self, sub, x, t):
        return sub.after(sub.blocks(x, t), t)


def apply(layer, x, variables=None, **options):
    return layer.fwd(x, *(variables or layer.init(RNG, x)), **options)[0]


def test_inputs_are_taken_from_a_tuple_and_passed_to_parts():
    model = Outer(Modulated(6))
    trainables, state = model.init(RNG, (X, T))
    y, new = model.fwd((X, T), trainables, state, inference_mode=True)
    block, _ = Modulated(6).fwd((X, T), trainables["blocks"], state["blocks"], inference_mode=True)
    wanted, _ = nn.Linear(6).fwd(block, trainables["after"]["linear"])
    assert_close(y, wanted + T.sum(), 1e-5)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    attend = nn.MultiHeadAttention(2)  # which takes (query, key and value)
    assert jax.eval_shape(lambda: apply(Outer(attend), (X[None], T[None]))).shape == (1, 4, 6)


def test_an_input_with_a_default_may_be_left_out():
    variables = Plain().init(RNG, X)
    assert_close(apply(Plain(), (X, T), variables), apply(Plain(), X, variables) + T.sum())
    for left_out in ((X,), (X, None)):
        np.testing.assert_array_equal(apply(Plain(), left_out, variables), apply(Plain(), X, variables))
    for inputs in (X, (X,), (X, X), (X, X, X)):
        np.testing.assert_array_equal(apply(Starred(), inputs), X * (len(inputs) if isinstance(inputs, tuple) else 1))


def test_every_repetition_gets_the_inputs_after_the_first():
    trainables, state = mlax.Repeat(Modulated(6), 3).init(RNG, (X, T))
    wanted = X
    for index in range(3):
        own, counts = jax.tree.map(lambda leaf, index=index: leaf[index], (trainables["stacked"], state["stacked"]))
        wanted, _ = Modulated(6).fwd((wanted, T), own, counts, inference_mode=True)
    for mode in ("scan", "remat", "unroll"):
        y, _ = mlax.Repeat(Modulated(6), 3, mode=mode).fwd((X, T), trainables, state, inference_mode=True)
        assert_close(y, wanted, 1e-5)


def test_several_inputs_pass_through_wrappers():
    variables = Modulated(6).init(RNG, (X, T))
    wanted = apply(Modulated(6), (X, T), variables, inference_mode=True)
    mixed = dtypes.Mixed(Modulated(6))
    assert_close(apply(mixed, (X, T), variables, inference_mode=True), wanted, 0.05)
    residual = mlax.Residual(Modulated(6))
    inner = [{"layer": tree} for tree in variables]
    assert_close(apply(residual, (X, T), inner, inference_mode=True), wanted + X)
    series = mlax.Series(block=Modulated(6), head=nn.Linear(2))
    assert jax.eval_shape(lambda: apply(series, (X, T), rng=RNG)).shape == (4, 2)
    mapped = mlax.Map(Modulated(6), axis=0, variables=0)
    assert jax.eval_shape(lambda: apply(mapped, (X[:, None], T[:, None]), rng=RNG)).shape == (4, 1, 6)
    plan = place.Plan(mesh={"data": 2}, batch=jax.P("data"))
    jax.tree.map(np.testing.assert_array_equal, plan.init(Modulated(6), RNG, (X, T)), variables)


def test_a_cell_may_take_its_carry_and_input_as_two():
    @mlax.frozen
    class Accumulate(mlax.Composite, mlax.Cell):
        linear: mlax.Layer = nn.Linear(6, bias=False, kernel_init=mlax.Identity())

        def initial_carry(self, x):
            return jnp.zeros_like(x)

        def wire(self, sub, carry, x):
            total = carry + sub.linear(x)
            return total, total

    assert_close(apply(mlax.Recurrent(Accumulate()), X[None]), jnp.cumsum(X[None], 1))


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (X, "float32[4, 6]"),
        ([X, T], "a list"),
        ({"x": X, "t": T}, "a dict"),
        ((X,), "(float32[4, 6])"),
        ((X, T, T), "(float32[4, 6], float32[4, 3], float32[4, 3])"),
    ],
)
def test_a_wrong_number_of_inputs_is_an_error_that_names_the_signature(x, got):
    words = (f"Modulated(6): the input is {got}, but wire(self, sub, x, t) takes the tuple (x, t)", "fwd((x, t), ...)")
    variables = Modulated(6).init(RNG, (X, T))
    assert_raises(lambda: Modulated(6).init(RNG, x), TypeError, words)
    assert_raises(lambda: Modulated(6).fwd(x, *variables), TypeError, words)


def test_inputs_as_separate_arguments_are_an_error_that_says_to_pass_a_tuple():
    variables = Modulated(6).init(RNG, (X, T))
    model: mlax.Layer = Modulated(6)
    words = ("pass several inputs as one tuple: init(rng, (x, t)).",)
    assert_raises(lambda: model.init(RNG, X, T), TypeError, words)  # pyright: ignore[reportCallIssue]
    words = ("pass several inputs as one tuple: fwd((x, t), trainables, non_trainables).",)
    assert_raises(lambda: model.fwd(X, T, *variables, T), TypeError, words)  # pyright: ignore[reportCallIssue]
    words = ("the key is a keyword argument: rng=key",)
    assert_raises(lambda: model.fwd((X, T), *variables, RNG), TypeError, words)  # pyright: ignore[reportCallIssue]
    words = ("Modulated(6): trainables is float32[4, 3]", "Pass several inputs as one tuple")
    assert_raises(lambda: model.fwd(X, T, variables[0]), TypeError, words)


def test_inputs_by_keyword_or_none_at_all_are_errors_that_show_the_call():
    @mlax.frozen
    class Named(mlax.Composite):
        block: mlax.Layer = Modulated(6)

        def wire(self, sub, x, t):
            return sub.block(x, t=t)

    @mlax.frozen
    class Empty(Named):
        def wire(self, sub, x, t):
            return sub.block()

    words = ("sub.block: got t by keyword, but a part takes its inputs by position: sub.block(x), or sub.block(x, t).",)
    assert_raises(lambda: Named().init(RNG, (X, T)), TypeError, words)
    assert_raises(lambda: Empty().init(RNG, (X, T)), TypeError, ("sub.block: got none, but",))


def test_a_wire_that_cannot_be_called_is_an_error_of_its_class():
    with pytest.raises(TypeError, match=r"Keyword.wire\(self, sub, x, \*, t\): .*; write wire\(self, sub, x, t\)"):

        class Keyword(mlax.Composite):
            def wire(self, sub, x, *, t):
                return x

    with pytest.raises(TypeError, match=r"write wire\(self, sub, x\)"):

        class Nothing(mlax.Composite):
            def wire(self, sub):
                return None
