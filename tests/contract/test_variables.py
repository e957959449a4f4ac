"""Variables are plain nested dicts of arrays, created where they will be used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax


def shapes(tree):
    return {path: mlax.get(tree, path).shape for path in mlax.paths(tree)}


def test_the_variables_have_the_paths_and_shapes_of_the_catalogue(row):
    _, _, trainables, non_trainables = row.init("float32")
    assert (shapes(trainables), shapes(non_trainables)) == row.variables


@pytest.mark.one_dtype  # in each dtype: test_dtypes
def test_variables_are_plain_dicts_of_arrays_or_none(row, dtype):
    def check(tree):
        if isinstance(tree, dict):
            assert type(tree) is dict and tree
            for name, value in tree.items():
                assert type(name) is str
                check(value)
        else:
            assert isinstance(tree, jax.Array)

    _, _, trainables, non_trainables = row.init(dtype)
    for tree in (trainables, non_trainables):
        assert tree is None or check(tree) is None
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(trainables)} <= {dtype, row.quantized}


def test_eval_shape_of_init_allocates_nothing(row):
    layer, x, trainables, non_trainables = row.init("float32")
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (trainables, non_trainables))
    rng, x = jax.random.key(0), jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    before = len(jax.live_arrays())
    assert jax.eval_shape(layer.init, rng, x) == like
    assert len(jax.live_arrays()) == before


def test_init_needs_only_shapes(row):
    layer, x, *variables = row.init("float32")
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    jax.tree.map(np.testing.assert_array_equal, list(layer.init(jax.random.key(0), x)), variables)


def test_init_under_jit_is_bitwise_equal(row):  # in other dtypes: test_initializers
    layer, x, *variables = row.init("float32")
    made = jax.jit(layer.init)(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, list(made), variables)


def test_variables_are_created_on_the_default_device(row):
    device = jax.devices()[-1]
    with jax.default_device(device):
        layer, x = row.layer("float32"), row.x("float32")
        rng = jax.random.key(0)
        others = {id(array) for array in jax.live_arrays()}
        made = layer.init(rng, x)
        for array in jax.live_arrays():
            assert id(array) in others or array.devices() == {device}
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(made))


def test_another_key_gives_other_values(row):
    layer, x, trainables, _ = row.init("float32")
    other, _ = layer.init(jax.random.key(1), x)
    for path in mlax.paths(trainables):
        if path.split("/")[-1] in ("kernel", "table", "recurrent"):
            assert not jnp.array_equal(mlax.get(trainables, path), mlax.get(other, path))


@pytest.mark.parametrize("rng", [None, 0, "key"])
def test_init_without_a_key_is_an_error_that_says_how_to_make_one(row, rng):
    with pytest.raises(TypeError, match=r"pass jax.random.key\(0\)"):
        row.layer("float32").init(rng, row.x("float32"))
