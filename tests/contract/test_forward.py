"""`fwd` is pure, computes what the reference does, the same under jit and vmap, and has the right gradients."""

import functools
import re

import jax
import numpy as np
import pytest

import mlax
from mlax import dtypes
from tests.asserts import assert_close

TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1, "float64": 1e-12}


def fwd(layer, x, trainables, non_trainables, **kwargs):
    return layer.fwd(x, trainables, non_trainables, rng=jax.random.key(1), **kwargs)


@pytest.mark.every_row
@pytest.mark.one_dtype  # in bfloat16 every row is compared at a million elements
def test_the_output_is_the_reference(row, dtype):
    layer, x, trainables, non_trainables = row.init(dtype)
    jitted = jax.jit(layer.fwd, static_argnames="inference_mode")
    y, _ = jitted(x, trainables, non_trainables, inference_mode=True)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.int64 if row.integers else np.float64), x)
    weights = {path: np.asarray(mlax.get(trainables, path), np.float64) for path in mlax.paths(trainables)}
    assert_close(y, row.reference(exact, weights), TOLERANCE.get(dtype, row.tolerance))


def test_init_and_fwd_are_pure(row):
    layer, x = row.layer("float32"), row.x("float32")
    trainables, non_trainables = layer.init(
        jax.random.key(0), x
    )  # not `row.init`, whose arrays another test may have changed
    again = layer.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, (trainables, non_trainables), again)
    before = jax.tree.map(np.array, (x, trainables, non_trainables))
    first = fwd(layer, x, trainables, non_trainables)
    second = fwd(layer, x, trainables, non_trainables)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, before, (x, trainables, non_trainables))
    assert jax.tree.structure(before) == jax.tree.structure((x, trainables, non_trainables))


def test_fwd_leaks_no_tracer(row):
    layer, x, trainables, non_trainables = row.init("float32")
    with jax.checking_leaks():
        jax.eval_shape(lambda *args: fwd(layer, *args), x, trainables, non_trainables)


def test_jit_equals_eager(row):
    layer, x, trainables, non_trainables = row.init("float32")
    eager = fwd(layer, x, trainables, non_trainables)
    jitted = jax.jit(lambda *args: fwd(layer, *args))(x, trainables, non_trainables)
    assert_close(eager, jitted, row.tolerance)


def test_the_state_keeps_its_structure_and_dtypes(row, dtype):
    layer, x, trainables, non_trainables = row.structs(dtype)
    for inference_mode in (False, True):
        function = functools.partial(fwd, layer, inference_mode=inference_mode)
        _, new = jax.eval_shape(function, x, trainables, non_trainables)
        assert jax.tree.structure(new) == jax.tree.structure(non_trainables)
        assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(non_trainables)]


def test_capturing_every_part_changes_neither_the_output_nor_the_state(row):
    layer, x, trainables, non_trainables = row.init("float32")
    parts = mlax.layers(layer)
    if not parts:
        pytest.skip("it has no parts")

    def both(*args):
        *plain, outputs = mlax.capture(layer, "**")(*args, rng=jax.random.key(1))
        return plain, outputs, list(fwd(layer, *args))

    plain, outputs, wanted = jax.eval_shape(both, x, trainables, non_trainables)
    assert plain == wanted
    assert {re.sub("#[0-9]+", "", path) for path in outputs} == set(parts)


def test_vmap_over_examples_equals_the_batched_call(row):
    if row.no_single_example:
        pytest.skip(row.no_single_example)
    layer, x, trainables, non_trainables = row.init("float32")

    def one(x):
        x = jax.tree.map(lambda leaf: leaf[None], x)
        y, _ = layer.fwd(x, trainables, non_trainables, inference_mode=True)
        return jax.tree.map(lambda leaf: leaf[0], y)

    whole, _ = layer.fwd(x, trainables, non_trainables, inference_mode=True)
    assert_close(jax.jit(jax.vmap(one))(x), whole, row.tolerance)


@functools.cache
def gradients(row, dtype):
    """The gradients of the mean square of the output; variables and input have the same values in every dtype."""
    layer, x = row.layer(dtype), row.x(dtype)
    variables = row.layer("float32").init(jax.random.key(0), row.x("float32"))
    trainables, non_trainables = dtypes.cast(variables, dtype)

    def loss(trainables, x):
        y, _ = fwd(layer, x, trainables, non_trainables)
        return sum((leaf * leaf).sum(dtype=dtype) / leaf.size for leaf in jax.tree.leaves(y))

    over = (0,) if row.integers else (0, 1)
    return jax.jit(jax.grad(loss, over))(trainables, x)


# `make test` compares those of float64 with finite differences, and those of bfloat16 at a million elements
@pytest.mark.thorough
@pytest.mark.gradients
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_in_every_dtype_agree_with_float64(row, dtype):
    with jax.enable_x64(True):
        exact = gradients(row, "float64")
    assert_close(gradients(row, dtype), exact, 10 * TOLERANCE.get(dtype, row.tolerance))
