"""The key-value cache of attention: decoding equals the uncached pass, in one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn
from tests.arrays import normal
from tests.asserts import assert_close_to_scale, compilations
from tests.layers import fwd

RNG = jax.random.key(0)


VARIANTS = {
    "plain": {},
    "rotary": {"rotary": nn.Rotary(), "kv_heads": 2},
    "ring": {"rotary": nn.Rotary(), "window": 6},
    "ring with all": {"window": 5, "alibi": True, "sinks": True, "kv_heads": 1, "qk_norm": nn.LayerNorm()},
    "relative": {"relative": nn.RelativeBias(4, bidirectional=False)},
    "window beyond the cache": {"window": 50},
}


@pytest.mark.parametrize(
    "variant",
    [
        name if name in ("rotary", "ring with all", "relative") else pytest.param(name, marks=pytest.mark.thorough)
        for name in VARIANTS
    ],
)
def test_decoding_equals_the_uncached_pass(variant):
    plain = nn.MultiHeadAttention(4, causal=True, **VARIANTS[variant])
    cached = nn.MultiHeadAttention(4, causal=True, cache=24, **VARIANTS[variant])
    x = normal(2, 24, 16)
    trainables, _ = plain.init(RNG, x)
    _, state = cached.init(RNG, x[:, :1])
    step = jax.jit(cached.fwd)
    outputs = []
    for tokens in np.split(np.asarray(x), [9, 10, 11, 20, 21, 22, 23], axis=1):  # many, one, one, many past the window
        y, state = step(tokens, trainables, state)
        outputs.append(y)
    assert_close_to_scale(np.concatenate(outputs, 1), fwd(plain, x, trainables))


RAGGED = {
    "plain": {},
    "rotary": {"rotary": nn.Rotary(), "kv_heads": 2},
    "ring": {"rotary": nn.Rotary(), "window": 4},
    "relative": {"relative": nn.RelativeBias(4, bidirectional=False)},
}


@pytest.mark.parametrize(
    "variant", [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("plain", "rotary")), "ring", "relative"]
)
def test_prompts_of_different_lengths_decode_in_one_batch_as_if_alone(variant):
    plain = nn.MultiHeadAttention(4, causal=True, **RAGGED[variant])
    cached = nn.MultiHeadAttention(4, causal=True, cache=16, **RAGGED[variant])
    x = normal(3, 12, 16)
    trainables, _ = plain.init(RNG, x)
    want = [np.asarray(fwd(plain, x[i : i + 1], trainables))[0] for i in range(3)]
    _, state = cached.init(RNG, x[:, :1])
    step = jax.jit(cached.fwd)
    done = np.zeros(3, int)
    for lengths in ([6, 1, 3], [1, 1, 1], [1, 0, 1], [2, 5, 3], [1, 1, 1]):  # prompts, then one or several, or none
        t = max(lengths)
        # padding is large, so that it would show
        tokens = np.full((3, t, 16), 50.0, np.float32)
        for row, length in enumerate(lengths):
            tokens[row, :length] = x[row, done[row] : done[row] + length]
        y, state = step({"x": tokens, "lengths": jnp.asarray(lengths)}, trainables, state)
        for row, length in enumerate(lengths):
            assert_close_to_scale(y[row, :length], want[row][done[row] : done[row] + length])
        done += lengths
    assert state["position"]["count"].tolist() == done.tolist()


@pytest.mark.parametrize("window", [None, 5])
def test_segments_and_positions_with_a_cache_equal_the_uncached_pass(window):
    options = {"causal": True, "rotary": nn.Rotary(), "window": window}
    plain, cached = nn.MultiHeadAttention(2, **options), nn.MultiHeadAttention(2, cache=16, **options)
    x = normal(2, 9, 8)
    more = {
        "segments": jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 3, 3], [1, 2, 2, 2, 2, 2, 2, 2, 2]]),
        "positions": jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6, 7]]),
    }
    inputs = {"x": x, **more}
    trainables, _ = plain.init(RNG, inputs)
    _, state = cached.init(RNG, inputs)
    outputs, step = [], jax.jit(cached.fwd)
    for start in (0, 3, 6):
        y, state = step({name: each[:, start : start + 3] for name, each in inputs.items()}, trainables, state)
        outputs.append(y)
    assert_close_to_scale(np.concatenate(outputs, 1), fwd(plain, inputs, trainables))
    with pytest.raises(ValueError, match="non_trainables has extra segments"):
        cached.fwd(x[:, :1], trainables, state)


def test_a_mask_and_a_bias_with_a_cache_are_those_of_the_tokens_in_order():
    plain, cached = nn.MultiHeadAttention(2, causal=True), nn.MultiHeadAttention(2, causal=True, cache=8)
    x, bias = normal(2, 6, 8), normal(1, 2, 6, 6)
    mask = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 6)) < 0.6) | jnp.eye(6, dtype=bool)[None, None]
    trainables, _ = plain.init(RNG, x)
    _, state = cached.init(RNG, x)
    outputs, step = [], jax.jit(cached.fwd)
    for start, end in ((0, 4), (4, 5), (5, 6)):  # the first covers four tokens, the others all six
        keys = 4 if end == 4 else 6
        part = {"x": x[:, start:end], "mask": mask[:, :, start:end, :keys], "bias": bias[:, :, start:end, :keys]}
        y, state = step(part, trainables, state)
        outputs.append(y)
    whole = fwd(plain, {"x": x, "mask": mask, "bias": bias}, trainables)
    assert_close_to_scale(np.concatenate(outputs, 1), whole)


def test_a_row_that_overflows_the_cache_under_jit_is_nan_and_the_others_are_not():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4)
    x = normal(2, 4, 8)
    trainables, state = layer.init(RNG, x)
    with pytest.raises(ValueError, match="lengths go up to 5, but there are only 4 tokens"):
        layer.fwd({"x": x, "lengths": jnp.asarray([5, 2])}, trainables, state)
    _, state = layer.fwd({"x": x, "lengths": jnp.asarray([4, 2])}, trainables, state)
    y, _ = jax.jit(layer.fwd)(x[:, :1], trainables, state)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_the_cache_is_in_the_dtype_of_mixed_precision_unless_it_declares_another():
    x = jnp.ones((2, 1, 8))
    for declared, dtype in ((None, jnp.bfloat16), ("float32", jnp.float32)):
        layer = nn.MultiHeadAttention(2, causal=True, cache=4, cache_dtype=declared)
        model = dtypes.mixed_bfloat16(mlax.Series(attend=layer, norm=nn.LayerNorm()))
        trainables, state = model.init(RNG, x)
        cache = state["attend"]["cache"]
        assert {cache["key"].dtype, cache["value"].dtype} == {jnp.dtype(dtype)}
        assert trainables["attend"]["key"]["kernel"].dtype == jnp.float32
        _, new = jax.eval_shape(model.fwd, x, trainables, state)
        assert new["attend"]["cache"]["key"].dtype == dtype


@pytest.mark.parametrize("window", [None, 32])
def test_256_tokens_decode_with_one_compilation(window):
    layer = nn.MultiHeadAttention(2, causal=True, cache=256, window=window, rotary=nn.Rotary())
    x = normal(1, 256, 8)
    trainables, state = layer.init(RNG, x[:, :1])
    traces = []

    @jax.jit
    def step(x, state):
        traces.append(1)
        return layer.fwd(x, trainables, state)

    first, *tokens = np.split(np.asarray(x), 256, axis=1)
    y, state = step(first, state)
    outputs = [y]
    with compilations() as found:
        for token in tokens:
            y, state = step(token, state)
            outputs.append(y)
    assert len(traces) == 1 and not found
    plain = nn.MultiHeadAttention(2, causal=True, window=window, rotary=nn.Rotary())
    assert_close_to_scale(np.concatenate(outputs, 1), fwd(plain, x, trainables))


def test_a_full_cache_is_an_error_eagerly_and_nan_under_jit():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4)
    x = normal(1, 4, 8)
    trainables, empty = layer.init(RNG, x)
    with pytest.raises(ValueError, match="the input has 5 tokens, but there are 4 slots"):
        layer.init(RNG, jnp.ones((1, 5, 8)))
    _, full = layer.fwd(x, trainables, empty)
    with pytest.raises(ValueError, match="the cache is full: there are 4 slots, for 5 tokens"):
        layer.fwd(x[:, :1], trainables, full)
    y, state = jax.jit(layer.fwd)(x[:, :1], trainables, full)
    assert jnp.isnan(y).all()
    assert jnp.isnan(jax.jit(layer.fwd)(x[:, :1], trainables, state)[0]).all()


def test_a_ring_buffer_never_fills():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4, window=3)
    x = normal(1, 20, 8)
    trainables, state = layer.init(RNG, x[:, :1])
    assert state["cache"]["key"].shape == (1, 2, 3, 4)
    y, state = jax.jit(layer.fwd)(x, trainables, state)
    assert np.isfinite(y).all() and state["position"]["count"].tolist() == [20]


def test_one_product_for_queries_keys_and_values_has_no_source():
    layer, x = nn.MultiHeadAttention(2, fused=True), normal(1, 3, 8)
    with pytest.raises(ValueError, match="with fused=True x attends to itself, but the input has a source"):
        layer.init(RNG, (x, x))
    with pytest.raises(ValueError, match="keys and values are of another input; leave out fused"):
        nn.MultiHeadAttention(2, fused=True, cross=True)


def test_a_cache_of_another_batch_size_is_an_error():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4)
    trainables, state = layer.init(RNG, jnp.ones((2, 1, 8)))
    with pytest.raises(ValueError, match=r"needs count to be int32\[3\], but it is int32\[2\]"):
        layer.fwd(jnp.ones((3, 1, 8)), trainables, state)


def test_a_cache_can_be_narrower_than_the_computation():
    layer = nn.MultiHeadAttention(2, causal=True, cache=4, cache_dtype="bfloat16")
    x = jnp.ones((2, 1, 8))
    trainables, state = layer.init(RNG, x)
    y, new = jax.eval_shape(layer.fwd, x, trainables, state)
    assert y.dtype == jnp.float32 and new["cache"]["key"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_cross_attention_stores_keys_and_values_of_its_source_for_later_calls(dtype):
    x, source, lengths = normal(3, 5, 8), normal(3, 7, 6), jnp.array([7, 3, 1])
    options = {"cross": True, "qk_norm": nn.RMSNorm()}
    plain = nn.MultiHeadAttention(2, **options)
    trainables, _ = plain.init(RNG, (x, source))
    wanted, _ = plain.fwd({"x": x, "source": source, "lengths": lengths}, trainables)
    cached = nn.MultiHeadAttention(2, cache=1, cache_dtype=dtype, **options)
    _, state = cached.init(RNG, (x[:, :1], source))
    first, state = cached.fwd({"x": x[:, :2], "source": source, "lengths": lengths}, trainables, state)
    step = jax.jit(cached.fwd)
    rest, new = step(x[:, 2:], trainables, state)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), wanted, atol=1e-6 if dtype is None else 0.03)
    jax.tree.map(np.testing.assert_array_equal, new, state)
    products = str(step.trace(x[:, 2:], trainables, state).jaxpr).count("dot_general")
    assert products == 4  # queries, scores, values, outputs: none for the source
    with pytest.raises(ValueError, match="call init on a source of this shape"):
        cached.fwd((x, source[:, :4]), trainables, state)
