"""Equal layers share one trace, and nothing is traced or passed in vain."""

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import nn


def test_equal_layers_share_one_trace_for_each_inference_mode(row):
    traces = []

    def count(x):
        traces.append(1)
        return x

    _, x, *variables = row.init("float32")
    variables = [tree and {"layer": tree} for tree in variables]
    for inference_mode in (True, False, False, True, True, False):
        model = mlax.Series(layer=row.layer("float32"), count=mlax.F(count))
        fwd = jax.jit(model.fwd, static_argnames="inference_mode")
        fwd.trace(x, *variables, rng=jax.random.key(1), inference_mode=inference_mode)
    assert len(traces) == 2


def test_an_inference_mode_that_is_not_a_bool_is_a_type_error(row):
    layer, x, trainables, non_trainables = row.init("float32")
    arguments = (x, trainables, non_trainables)
    fwd = jax.jit(layer.fwd, static_argnames="inference_mode")
    fwd.trace(*arguments, inference_mode=True)
    for mode in (None, 1, 0, "yes", 1.0):
        for call in (layer.fwd, fwd):
            with pytest.raises(TypeError, match="must be True or False"):
                call(*arguments, inference_mode=mode)


def test_a_layer_that_does_not_read_inference_mode_does_not_retrace_for_it():
    traces = []
    model = mlax.Series(nn.Linear(3), nn.LayerNorm(), mlax.F(lambda x: traces.append(1) or x))
    x = jnp.ones((2, 4))
    variables = model.init(jax.random.key(0), x)
    traces.clear()
    fwd = jax.jit(model.fwd)
    for mode in (True, False, True):
        fwd(x, *variables, inference_mode=mode)
    assert len(traces) == 1


def test_reading_a_traced_inference_mode_is_an_error_that_says_how_to_jit():
    layer = nn.Dropout(0.5)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(layer.fwd)(jnp.ones(3), None, inference_mode=True)
    assert 'static_argnames="inference_mode"' in "".join(caught.value.__notes__)


def test_the_lowered_program_has_no_argument_for_state_that_a_layer_lacks(row):
    layer, x, trainables, non_trainables = row.init("float32")
    lowered = jax.jit(layer.fwd, static_argnames="inference_mode").lower(
        x, trainables, non_trainables, inference_mode=True
    )
    arguments = lowered.as_text().split("@main(")[1].split(") -> ")[0].count("%arg")
    assert arguments <= len(jax.tree.leaves((x, trainables, non_trainables)))
    if non_trainables is None:
        assert arguments == len(jax.tree.leaves((x, trainables)))


def test_an_unused_trainable_is_dropped_from_the_executable():
    model = mlax.Series(used=nn.Linear(3), ignored=mlax.F(jnp.zeros_like), after=nn.Linear(2))
    x = jnp.ones((2, 4))
    trainables, _ = model.init(jax.random.key(0), x)
    compiled = jax.jit(model.fwd).lower(x, trainables).compile()
    kept = compiled.as_text().split("ENTRY")[1].split(" parameter(")
    assert len(kept) - 1 == 2  # after's kernel and bias
