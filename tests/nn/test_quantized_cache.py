"""The KV cache in int8 and float8: its error, its overflow, its dtypes and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn, place

RNG = jax.random.key(0)
ERRORS = {"int8": 0.01, "float8_e4m3fn": 0.05}  # of outputs, relative to their root mean square
quantized = pytest.mark.parametrize("dtype", ERRORS)


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


OPTIONS = {"rotary": {"rotary": nn.Rotary(), "kv_heads": 2}, "ring": {"rotary": nn.Rotary(), "window": 5}}


@quantized
@pytest.mark.parametrize("options", OPTIONS)
def test_prompts_of_different_lengths_decode_as_with_the_plain_cache_up_to_the_stated_error(dtype, options):
    plain = nn.MultiHeadAttention(4, causal=True, cache=16, **OPTIONS[options])
    small = mlax.override(plain, nn.MultiHeadAttention, cache_dtype=dtype)
    tokens = {"x": normal(3, 6, 32), "segments": jnp.asarray([[1] * 3 + [2] * 3] * 3)}
    trainables, _ = plain.init(RNG, tokens)
    results = []
    for layer in (plain, small):
        state, step, outputs = layer.init(RNG, tokens)[1], jax.jit(layer.fwd), []
        for lengths in ([6, 1, 3], [1, 1, 1], [1, 0, 1], [2, 5, 3]):
            t = max(lengths)
            x = {"x": tokens["x"][:, :t], "segments": tokens["segments"][:, :t], "lengths": jnp.asarray(lengths)}
            y, state = step(x, trainables, state)
            outputs += [np.asarray(y[row, :length]) for row, length in enumerate(lengths)]
        results.append(np.concatenate(outputs))
    want, found = results
    assert 0 < rms(found - want) < ERRORS[dtype] * rms(want)


@quantized
def test_a_full_quantized_cache_is_nan_under_jit_and_large_keys_are_not(dtype):
    layer = nn.MultiHeadAttention(2, causal=True, cache=4, cache_dtype=dtype)
    x = 1e5 * normal(2, 4, 8)
    trainables, state = layer.init(RNG, x)
    y, state = layer.fwd({"x": x, "lengths": jnp.asarray([4, 2])}, trainables, state)
    assert np.isfinite(y).all()
    y, state = jax.jit(layer.fwd)(x[:, :1], trainables, state)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
    assert np.isnan(jax.jit(layer.fwd)(x[:, :1], trainables, state)[0][0]).all()


@quantized
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_leaves_of_a_quantized_cache_are_codes_and_scales(dtype, compute):
    layer, x = nn.MultiHeadAttention(2, causal=True, cache=4, cache_dtype=dtype), normal(3, 1, 8, dtype=compute)
    trainables, state = jax.eval_shape(layer.init, RNG, x)
    leaves = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in state["cache"].items()}
    codes, scales = ((3, 2, 4, 4), dtype), ((3, 2, 4), compute)
    assert leaves == {"key": codes, "value": codes, "key_scale": scales, "value_scale": scales}
    y, new = jax.eval_shape(layer.fwd, x, trainables, state)
    assert y.dtype == compute and new == state
    violations = dtypes.audit(layer.fwd, x, trainables, state, dtype=compute)
    assert {name for each in violations for name in (*each.inputs, *each.outputs)} <= {compute, dtype, "int32"}
    assert dtype != "int8" or not violations  # float8 is a floating dtype, which cache_dtype declares


def test_mixed_precision_leaves_a_quantized_cache_as_declared():
    layer, x = nn.MultiHeadAttention(2, causal=True, cache=4, cache_dtype="int8"), normal(2, 3, 8)
    model = dtypes.mixed_bfloat16(layer)
    trainables, state = model.init(RNG, x)
    assert state["cache"]["key"].dtype == jnp.int8 and state["cache"]["key_scale"].dtype == jnp.float32
    y, new = jax.jit(model.fwd)(x, trainables, state)
    assert y.dtype == jnp.float32 and jax.tree.map(jnp.result_type, new) == jax.tree.map(jnp.result_type, state)
    assert rms(y - layer.fwd(x, *layer.init(RNG, x))[0]) < 0.02 * rms(y)


def test_a_cache_of_integers_other_than_int8_is_an_error():
    with pytest.raises(ValueError, match="KeyValueCache: the dtype is int16, but must be one of int8, float8_e4m3fn"):
        nn.KeyValueCache(4, param_dtype="int16")


def test_describe_names_the_bytes_of_the_kv_cache():
    model, x = (
        nn.MultiHeadAttention(2, causal=True, cache=64, head_width=64),
        jax.ShapeDtypeStruct((4, 1, 8), "float32"),
    )
    plan = place.single()
    plain, small = (
        plan.describe(mlax.override(model, nn.MultiHeadAttention, cache_dtype=dtype), x, compile=False)
        for dtype in (None, "int8")
    )
    assert (plain.cache, small.cache) == (2 * 4 * 64 * 2 * 64 * 4, 2 * 4 * 64 * 2 * (64 + 4))
    assert "KV cache       68 KiB, among the weights" in str(small)
    assert "KV cache" not in str(plan.describe(nn.Linear(8), x, compile=False))
