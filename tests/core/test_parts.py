"""The parts of a composite: layers, tuples of layers and dicts of layers, and how `wire` calls them."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mlax
from mlax import nn, place
from tests.layers import Count

X = jnp.ones((2, 6))
RNG = jax.random.key(0)


@mlax.frozen
class Tower(mlax.Composite):
    """Layers in sequence, then one output for each head."""

    layers: tuple[mlax.Layer, ...]
    heads: dict[str, mlax.Layer]

    def wire(self, sub, x):
        for layer in sub.layers:
            x = layer(x)
        return {name: sub.heads[name](x) for name in self.heads}


@mlax.frozen
class Grid(mlax.Composite):
    """Two rows of layers, of which it calls the last of the first row and the first of the last."""

    rows: tuple[tuple[mlax.Layer, ...], ...]

    def wire(self, sub, x):
        return sub.rows[-1][0](sub.rows[0][-1](x))


def tower():
    return Tower((nn.Linear(5), Count(), nn.BatchNorm()), {"a": nn.Linear(2), "b": nn.Linear(3)})


def raised(kind, function, *args):
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


def test_tuples_and_dicts_of_layers_are_parts():
    trainables, state = tower().init(RNG, X)
    assert {path: mlax.get(trainables, path).shape for path in mlax.paths(trainables)} == {
        "layers/0/kernel": (6, 5),
        "layers/0/bias": (5,),
        "layers/2/scale": (5,),
        "layers/2/shift": (5,),
        "heads/a/kernel": (5, 2),
        "heads/a/bias": (2,),
        "heads/b/kernel": (5, 3),
        "heads/b/bias": (3,),
    }
    assert mlax.paths(state) == ("layers/1/calls", "layers/2/mean", "layers/2/var")
    y, new = tower().fwd(X, trainables, state)
    assert new["layers"]["1"]["calls"] == 1
    h, _ = nn.Linear(5).fwd(X, trainables["layers"]["0"])
    h, _ = nn.BatchNorm().fwd(h, trainables["layers"]["2"], state["layers"]["2"])
    np.testing.assert_array_equal(y["b"], nn.Linear(3).fwd(h, trainables["heads"]["b"])[0])


def test_tuples_of_tuples_of_layers_are_parts():
    grid = Grid(((nn.Linear(5),), (nn.Linear(4),)))
    assert mlax.paths(grid.init(RNG, X)[0]) == (
        "rows/0/0/bias",
        "rows/0/0/kernel",
        "rows/1/0/bias",
        "rows/1/0/kernel",
    )
    text = raised(ValueError, Grid(((nn.Linear(5), nn.Linear(6)), (nn.Linear(4),))).init, RNG, X)
    assert "wire never calls 'rows/0/0'; call it as sub.rows[0][0](x)" in text


def test_a_composite_with_tuples_and_dicts_is_still_a_description():
    assert tower() == tower() and hash(tower()) == hash(tower())
    assert pickle.loads(pickle.dumps(tower())) == tower()
    assert tower() != Tower(tower().layers, {"b": nn.Linear(3), "a": nn.Linear(2)})  # the order of the parts
    assert repr(Grid(((nn.Linear(5),),))) == "Grid(((Linear(5),),))"
    assert "  layers/0: Linear(5)" in str(tower()) and "  heads/b: Linear(3)" in str(tower())
    with pytest.raises(TypeError):
        tower().heads["c"] = nn.Linear(3)  # pyright: ignore[reportIndexIssue]


def test_layers_in_tuples_and_dicts_can_be_replaced_and_overridden():
    model = mlax.replace(mlax.replace(tower(), "layers/0", nn.Linear(7)), "heads/b", nn.Linear(9))
    assert model == Tower((nn.Linear(7), Count(), nn.BatchNorm()), {"a": nn.Linear(2), "b": nn.Linear(9)})
    assert mlax.get(model, "heads/b") == nn.Linear(9)
    assert not any(
        path.endswith("bias") for path in mlax.paths(mlax.override(model, nn.Linear, bias=False).init(RNG, X)[0])
    )


def test_a_plan_initializes_layers_in_tuples_like_init():
    mesh = place.Plan(mesh={"data": 2}, variables=[("layers/0/kernel", P("data")), ("**", P())])
    x = jnp.ones((2, 6))
    planned, plain = mesh.init(tower(), RNG, x), tower().init(RNG, x)
    jax.tree.map(np.testing.assert_array_equal, planned, plain)


def test_the_parts_of_a_cell_may_be_in_a_tuple():
    @mlax.frozen
    class TwoLayers(mlax.CompositeCell):
        layers: tuple[mlax.Layer, ...] = (nn.Linear(4), nn.Linear(4, bias=False))

        def initial_carry(self, x):
            return jnp.zeros((*x.shape[:-1], 4), x.dtype)

        def ahead(self, sub, x):
            return sub.layers[0](x)

        def feedback(self, sub, carry):
            return sub.layers[1](carry)

        def step(self, sub, carry, ahead):
            return jnp.tanh(ahead), jnp.tanh(ahead)

    x, plain = jnp.ones((2, 3, 6)), nn.RNNCell(4)
    trainables, _ = mlax.Recurrent(TwoLayers()).init(RNG, x)
    same = {"input": trainables["layers"]["0"], "recurrent": trainables["layers"]["1"]}

    def grads(cell, trainables):
        return jax.grad(lambda trainables: mlax.Recurrent(cell).fwd(x, trainables)[0].sum())(trainables)

    found, wanted = grads(TwoLayers(), trainables), grads(plain, same)
    for index, name in (("0", "input"), ("1", "recurrent")):
        np.testing.assert_allclose(found["layers"][index]["kernel"], wanted[name]["kernel"], rtol=1e-5)


def test_a_function_or_class_in_a_field_for_layers_is_an_error_at_construction():
    @mlax.frozen
    class Head(mlax.Composite):
        act: mlax.Layer
        norm: mlax.Layer | None = None

        def wire(self, sub, x):
            return sub.act(x)

    text = raised(TypeError, Head, jax.nn.relu)
    assert text == "Head: field `act` is the function relu, which is not a layer; wrap it: mlax.F(relu)."
    text = raised(TypeError, Head, nn.Linear)
    assert text == "Head: field `act` is the class Linear, which is not a layer; did you mean Linear(...)?"
    assert "field `norm` is the class LayerNorm" in raised(TypeError, Head, nn.Linear(3), nn.LayerNorm)
    text = raised(TypeError, Tower, (nn.Linear(3), jax.nn.relu), {})
    assert text == "Tower: field `layers` is the function relu, which is not a layer; wrap it: mlax.F(relu)."
    text = raised(TypeError, Tower, (), {"a": jax.nn.relu})
    assert text == "Tower: field `heads` is a dict, which is not hashable; a dict may hold layers only."


def test_a_function_among_layers_is_an_error_even_without_annotations():
    @mlax.frozen
    class Loose(mlax.Composite):
        layers: tuple

        def wire(self, sub, x):
            return [layer(x) for layer in sub.layers]

    text = raised(TypeError, Loose((nn.Linear(3), jax.nn.relu)).init, RNG, X)
    assert "part 'layers/1' is the function relu" in text and "wrap it: mlax.F(relu)" in text


def test_the_error_of_a_missing_or_uncalled_index_names_what_there_is():
    @mlax.frozen
    class Beyond(mlax.Composite):
        layers: tuple[mlax.Layer, ...] = (nn.Linear(3), nn.Linear(3))

        def wire(self, sub, x):
            return sub.layers[2](x)

    assert raised(LookupError, Beyond().init, RNG, X) == "there is no part layers/2; layers holds 0, 1."

    @mlax.frozen
    class Whole(Beyond):
        def wire(self, sub, x):
            return sub.layers(x)

    text = raised(TypeError, Whole().init, RNG, X)
    assert text == "sub.layers is a group of 2 parts; call one of them, as sub.layers[0](x)."


def test_variables_of_a_tuple_that_lead_to_no_part_are_named():
    trainables, state = tower().init(RNG, X)
    trainables["layers"]["3"] = {"kernel": jnp.ones(3)}
    assert "trainables has extra 'layers/3'; the parts are layers/0, " in raised(
        ValueError, tower().fwd, X, trainables, state
    )


def test_parts_that_are_not_a_dict_are_an_error():
    @mlax.frozen
    class Listed(mlax.Composite):
        def parts(self):
            return [nn.Linear(3)]

        def wire(self, sub, x):
            return x

    text = raised(TypeError, Listed().init, RNG, X)
    assert text == "Listed(): parts returned a list, but must return a dict of layers by name."


def test_a_name_that_parts_holds_twice_is_an_error():
    @mlax.frozen
    class Twice(mlax.Composite):
        def parts(self):
            return {"up": nn.Linear(3), "down": nn.Linear(4), "up": nn.Linear(5)}  # noqa: F601

        def wire(self, sub, x):
            return sub.down(sub.up(x))

    assert raised(ValueError, Twice().init, RNG, X) == "Twice(): `parts` has two entries 'up'; rename one."


def test_a_wire_that_returns_the_state_or_nothing_is_an_error():
    @mlax.frozen
    class Pair(mlax.Composite):
        up: mlax.Layer = nn.Linear(3)

        def wire(self, sub, x):
            return sub.up(x), None

    @mlax.frozen
    class Nothing(Pair):
        def wire(self, sub, x):
            sub.up(x)

    for call in (lambda: Pair().init(RNG, X), lambda: Pair().fwd(X, {"up": nn.Linear(3).init(RNG, X)[0]})):
        text = raised(TypeError, call)
        assert text == "Pair(): wire returned (float32[2, 3], None); `sub` collects the state, so return y alone."
    assert raised(TypeError, Nothing().init, RNG, X) == "Nothing(): wire returned None; return the output."


def test_the_error_of_calling_a_field_in_wire_names_the_part():
    @mlax.frozen
    class Calls(mlax.Composite):
        dense: mlax.Layer = nn.Linear(3)
        more: tuple[mlax.Layer, ...] = (nn.Linear(4),)

        def wire(self, sub, x):
            return self.more[0](sub.dense(x))

    text = raised(TypeError, Calls().init, RNG, X)
    assert text == "Calls: wire calls self.more[0](x), which is a description; write sub.more[0](x)."


def test_the_error_of_reading_a_part_from_self_names_sub():
    @mlax.frozen
    class Reads(mlax.Composite):
        def parts(self):
            return {"dense": nn.Linear(3)}

        def wire(self, sub, x):
            return self.dense(x)  # pyright: ignore[reportAttributeAccessIssue]

    assert raised(AttributeError, Reads().init, RNG, X) == "Reads: wire reads self.dense; write sub.dense(x)."
