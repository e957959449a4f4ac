"""Positions: rotary, sinusoidal, learned, ALiBi and relative, and an embedding read the other way round."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn, ops
from mlax.ops import cos_and_sin
from tests.arrays import normal
from tests.catalogue import FLOATS
from tests.catalogue.attention import frequencies, llama3, rotate, yarn

RNG = jax.random.key(0)
FAR = [0, 1, 7, 1023, 1024, 131_071, 1_000_003, 2**20 - 1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_cosines_and_sines_are_exact_in_every_dtype_at_a_million_positions(dtype):
    with jax.enable_x64(dtype == "float64"):
        found = cos_and_sin(jnp.asarray(FAR), ops.rotary_frequencies(16), jnp.dtype(dtype))
        angles = np.asarray(FAR)[:, None] * frequencies(16)
        for wave, want in zip(found, (np.cos(angles), np.sin(angles)), strict=True):
            error = np.abs(np.asarray(wave, np.float64) - want).max()
            assert wave.dtype == dtype and error < max(2.0 * float(jnp.finfo(dtype).eps), 1e-9)


def test_a_position_out_of_range_gives_nan():
    cos, _ = cos_and_sin(jnp.asarray([-1, 0, 2**20 - 1, 2**20]), (1.0,), jnp.float32)
    np.testing.assert_array_equal(np.isnan(cos[:, 0]), [True, False, False, True])


def test_rotary_products_depend_on_the_distance_only():
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8) + 1

    def score(i, j):
        return (ops.rotary(q, jnp.asarray([i])) * ops.rotary(k, jnp.asarray([j]))).sum()

    np.testing.assert_allclose(score(5, 3), score(50_005, 50_003), rtol=1e-5)
    assert abs(float(score(5, 3) - score(5, 4))) > 1e-3


def test_rotary_pairs_halves_or_neighbours():
    x = normal(2, 5, 3, 8)
    order = np.asarray([0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_allclose(ops.rotary(x[..., order]), ops.rotary(x, interleaved=True)[..., order], rtol=1e-6)
    np.testing.assert_allclose(ops.rotary(x), rotate(np.asarray(x, np.float64), frequencies(8)), rtol=1e-5, atol=1e-6)


def test_each_row_may_have_its_own_positions():
    x = normal(2, 3, 1, 4)
    positions = jnp.asarray([[0, 1, 2], [7, 8, 9]])
    y, _ = nn.Rotary().fwd((x, positions), None)
    np.testing.assert_allclose(y[1:], ops.rotary(x[1:], positions[1]), rtol=1e-6)
    np.testing.assert_allclose(y[:1], ops.rotary(x[:1]), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"factor": 32.0}, {"factor": 4.0, "low": 2.0, "high": 8.0, "length": 512}])
def test_llama_3_frequencies_agree_with_the_definition(options):
    found = nn.Llama3Scaling(**options).frequencies(128, 500_000.0)
    want = llama3(frequencies(128, 500_000.0), **options)
    np.testing.assert_allclose(found, want, rtol=1e-12)
    assert len({round(float(ratio), 6) for ratio in np.asarray(found) / frequencies(128, 500_000.0)}) > 2


def test_scalings_divide_the_frequencies():
    plain = np.asarray(ops.rotary_frequencies(64))
    np.testing.assert_allclose(nn.LinearScaling(4.0).frequencies(64, 10_000.0), plain / 4)
    ntk = np.asarray(nn.NTKScaling(4.0).frequencies(64, 10_000.0))
    np.testing.assert_allclose([plain[0] / ntk[0], plain[-1] / ntk[-1]], [1, 4], rtol=1e-12)


def test_slopes_are_the_published_ones():
    np.testing.assert_allclose(ops.alibi_slopes(8), [1 / 2**i for i in range(1, 9)])
    np.testing.assert_allclose(ops.alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    np.testing.assert_allclose(ops.alibi_slopes(3), [2**-4, 2**-8, 2**-2])
    np.testing.assert_allclose(ops.alibi_slopes(1), [2**-8])


@pytest.mark.parametrize("kernel", ["xla", "chunked"])
def test_alibi_inside_attention_equals_its_bias(kernel):
    q, k = normal(2, 4, 3, 5), normal(2, 6, 3, 5)
    bias = ops.alibi(3, jnp.arange(4), jnp.arange(6), jnp.float32)
    inside = ops.attention(q, k, k, alibi=True, implementation=kernel)
    np.testing.assert_allclose(inside, ops.attention(q, k, k, bias=bias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "bidirectional"), [("both", True), ("one", False)])
def test_buckets_agree_with_torch(name, bidirectional):
    with np.load(Path(__file__).parents[1] / "references" / "attention.npz") as file:
        want = file[f"buckets/{name}"]
    np.testing.assert_array_equal(ops.relative_buckets(jnp.arange(-300, 301), 32, bidirectional=bidirectional), want)


@pytest.mark.parametrize("layer", [nn.LearnedPositions(8, decoding=True), nn.SinusoidalPositions(decoding=True)])
def test_decoding_continues_at_the_next_position(layer):
    x = normal(2, 8, 4)
    trainables, state = layer.init(RNG, x)
    whole, _ = layer.fwd(x, trainables, state)
    first, state = layer.fwd(x[:, :5], trainables, state)
    rest, state = layer.fwd(x[:, 5:], trainables, state)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, rtol=1e-6)
    assert state["count"].tolist() == [8, 8]


@pytest.mark.parametrize("layer", [nn.LearnedPositions(8, decoding=True), nn.SinusoidalPositions(decoding=True)])
def test_rows_with_prompts_of_different_lengths_continue_each_at_their_own_position(layer):
    x = normal(2, 8, 4)
    trainables, state = layer.init(RNG, x)
    whole, _ = layer.fwd(x, trainables, state)
    for lengths in ([5, 2], [1, 6], [2, 0]):  # the padding of the second call would be past the table
        done, t = state["count"], max(lengths)
        tokens = np.full((2, t, 4), 50.0, np.float32)
        for row, length in enumerate(lengths):
            tokens[row, :length] = x[row, done[row] : done[row] + length]
        y, state = layer.fwd((jnp.asarray(tokens), jnp.asarray(lengths)), trainables, state)
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(y[row, :length], whole[row, done[row] : done[row] + length], rtol=1e-6)
    assert state["count"].tolist() == [8, 8]
    with pytest.raises(ValueError, match=r"counts positions itself when decoding.*pass lengths \(batch,\)"):
        layer.fwd((x, jnp.zeros((2, 8), jnp.int32)), trainables, state)


def test_a_learned_position_out_of_range_is_an_error_and_nan_if_traced():
    layer = nn.LearnedPositions(4)
    with pytest.raises(ValueError, match="is 5 long; pass a length of at least that"):
        layer.init(RNG, normal(1, 5, 2))
    trainables, _ = layer.init(RNG, normal(1, 2, 2))
    with pytest.raises(ValueError, match="is 5 long"):
        jax.eval_shape(layer.fwd, normal(1, 5, 2), trainables)
    for positions, words in (([3, 4], "positions go from 3 to 4, but must be from 0 to 3"), ([-1, 0], "go from -1")):
        with pytest.raises(ValueError, match=words):
            layer.fwd((normal(1, 2, 2), jnp.asarray(positions)), trainables)
    y, _ = jax.jit(layer.fwd)((normal(1, 2, 2), jnp.asarray([3, 4])), trainables)
    np.testing.assert_array_equal(np.isnan(y[0, :, 0]), [False, True])


def test_a_decoder_past_its_learned_positions_is_an_error():
    layer = nn.LearnedPositions(4, decoding=True)
    trainables, state = layer.init(RNG, normal(1, 3, 2))
    _, state = layer.fwd(normal(1, 3, 2), trainables, state)
    with pytest.raises(ValueError, match="positions go from 3 to 4"):
        layer.fwd(normal(1, 2, 2), trainables, state)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layer", [nn.Rotary(), nn.SinusoidalPositions()])
def test_narrow_waves_are_rounded_once_at_any_position(layer, dtype):
    angles = np.asarray(FAR)[:, None] * frequencies(16)
    if isinstance(layer, nn.Rotary):
        x = jnp.ones((2, 8, 1, 16)).at[..., 8:].set(0)  # so that the first half becomes cosines and the second sines
        want = np.concatenate([np.cos(angles), np.sin(angles)], -1)
    else:
        x = jnp.zeros((2, 8, 16))
        want = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(8, 16)
    y, _ = layer.fwd((x.astype(dtype), jnp.asarray([FAR] * 2)), None)
    error = np.abs(np.asarray(y, np.float64).reshape(2, 8, 16) - want).max()
    assert error <= 0.51 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("layer", [nn.Rotary(), nn.SinusoidalPositions()])
def test_positions_of_a_wrong_shape_dtype_or_range_are_errors(layer):
    x = normal(2, 3, 1, 4) if isinstance(layer, nn.Rotary) else normal(2, 3, 4)
    for positions, words in (
        (jnp.arange(4), r"positions have the shape \(4,\), but must be \(3,\) or \(2, 3\)"),
        (jnp.zeros((3, 3), jnp.int32), r"positions have the shape \(3, 3\)"),
        (jnp.arange(3.0), "positions are float32, but must be integers"),
        (jnp.arange(3) - 1, "positions go from -1 to 1, but must be from 0 to 1048575"),
        (jnp.arange(3) + 2**20 - 2, "to 1048576, but"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            layer.fwd((x, positions), None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinusoids_of_floating_positions_agree_with_those_of_integers(dtype):
    whole = jnp.arange(1000).reshape(10, 100)
    found = ops.sinusoids(whole.astype(jnp.float32), 16, dtype)
    np.testing.assert_allclose(found, ops.sinusoids(whole, 16, dtype), atol=1e-4 if dtype == "float32" else 8e-3)
    assert found.dtype == dtype and found.shape == (10, 100, 16)
    between = ops.sinusoids(jnp.asarray([0.25]), 2, "float32")
    np.testing.assert_allclose(between, [[np.sin(0.25), np.cos(0.25)]], rtol=1e-6)


def test_yarn_agrees_with_the_reference_formulas():
    scaling = nn.YaRNScaling(4.0, length=4096)
    np.testing.assert_allclose(scaling.frequencies(128, 10_000.0), yarn(128, 10_000.0, 4.0, 4096), rtol=1e-12)
    other = nn.YaRNScaling(16.0, length=2048, fast=16.0, slow=2.0)
    np.testing.assert_allclose(other.frequencies(64, 5e5), yarn(64, 5e5, 16.0, 2048, 16.0, 2.0), rtol=1e-12)
    # published for Llama 2 with a factor of 4: 1.1386 = 0.1 ln 4 + 1
    np.testing.assert_allclose(scaling.magnitude(), 1.138629436, rtol=1e-9)
    assert nn.YaRNScaling(4.0, length=4096, attention_factor=1.0).magnitude() == 1.0
    x = normal(1, 5, 1, 64)
    y, _ = nn.Rotary(scaling=other).fwd(x, None)
    want = rotate(np.asarray(x, np.float64), yarn(64, 10_000.0, 16.0, 2048, 16.0, 2.0)) * (0.1 * np.log(16) + 1)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_dynamic_ntk_agrees_with_the_reference_formula():
    def base(time, factor=4.0, length=8, width=8):  # as Hugging Face's Transformers computes it
        return 10_000.0 * (factor * max(time, length) / length - (factor - 1)) ** (width / (width - 2))

    scaling = nn.DynamicNTKScaling(4.0, length=8)
    for time in (3, 8, 20):
        np.testing.assert_allclose(scaling.frequencies(8, 10_000.0, time), frequencies(8, base(time)), rtol=1e-12)
        x = normal(1, time, 1, 8)
        want = rotate(np.asarray(x, np.float64), frequencies(8, base(time)))
        np.testing.assert_allclose(nn.Rotary(scaling=scaling).fwd(x, None)[0], want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="is not known where positions are given; pass time="):
        nn.Rotary(scaling=scaling).fwd((normal(1, 2, 1, 8), jnp.asarray([4, 5])), None)
    fixed = nn.DynamicNTKScaling(4.0, length=8, time=20)
    np.testing.assert_allclose(fixed.frequencies(8, 10_000.0), frequencies(8, base(20)), rtol=1e-12)


def test_sinusoids_alternate_sines_and_cosines():
    table = ops.sinusoids(jnp.arange(3), 4, jnp.float32)
    want = [[np.sin(p), np.cos(p), np.sin(p / 100), np.cos(p / 100)] for p in range(3)]
    np.testing.assert_allclose(table, want, atol=1e-6)


def test_a_tied_head_is_the_transposed_table():
    model = mlax.Tied(
        mlax.Series(embed=nn.Embed(7, 4), head=nn.Linear(7, bias=False)),
        mlax.Tie("head/kernel", to="embed/table", transpose=True),
    )
    tokens = jnp.asarray([[1, 5, 0]])
    trainables, _ = model.init(RNG, tokens)
    assert mlax.paths(trainables) == ("embed/table",)

    def by_hand(table):
        return ops.tied_logits(table[tokens], table)

    table = trainables["embed"]["table"]
    np.testing.assert_allclose(model.fwd(tokens, trainables)[0], by_hand(table), rtol=1e-5)
    grads = jax.grad(lambda trainables: (model.fwd(tokens, trainables)[0] ** 2).sum())(trainables)
    want = jax.grad(lambda table: (by_hand(table) ** 2).sum())(table)
    np.testing.assert_allclose(grads["embed"]["table"], want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Rotary(width=3), "width is 3, but must be an even integer"),
        (lambda: nn.Rotary().init(RNG, normal(1, 2, 1, 5)), "heads of width 5, which is odd"),
        (lambda: nn.Rotary(width=8).init(RNG, normal(1, 2, 1, 6)), "heads of width 6 only"),
        (lambda: nn.Rotary().init(RNG, normal(1, 2, 6)), "must be .batch, time, heads, width."),
        (lambda: nn.SinusoidalPositions().init(RNG, normal(1, 2, 5)), "is 5 wide, but the width must be even"),
        (lambda: nn.LearnedPositions(4).init(RNG, normal(2, 5)), "must be .batch, time, width."),
        (lambda: inspect.unwrap(ops.tied_logits)(normal(2, 3), normal(5, 4)), "must be of equal size"),
        (lambda: ops.relative_buckets(jnp.arange(3), 5), "an even number of at least 4"),
        (lambda: ops.relative_buckets(jnp.arange(3), 32, farthest=8), "farthest is 8, but must be above 8"),
        (lambda: ops.rotary_frequencies(7), "the width is 7, but must be even"),
    ],
)
def test_errors_say_what_is_wrong(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_relative_bias_of_anything_but_positions_is_an_error():
    with pytest.raises(TypeError, match="must be a pair of integers"):
        nn.RelativeBias(2).init(RNG, normal(2, 3))


def test_positions_take_a_dict_whose_lengths_only_decoding_reads():
    x, lengths = jnp.ones((2, 3, 4)), jnp.array([2, 3])
    layer = nn.LearnedPositions(8)
    trainables, _ = layer.init(jax.random.key(0), {"x": x, "lengths": lengths})
    np.testing.assert_array_equal(layer.fwd({"x": x, "lengths": lengths}, trainables)[0], layer.fwd(x, trainables)[0])
    decoder = nn.LearnedPositions(8, decoding=True)
    _, state = decoder.init(jax.random.key(0), {"x": x, "lengths": None})
    _, state = decoder.fwd({"x": x, "lengths": lengths}, trainables, state)
    np.testing.assert_array_equal(state["count"], lengths)
    with pytest.raises(ValueError, match="but must be a dict of x and lengths"):
        layer.fwd({"x": x, "positions": lengths}, trainables)


def test_a_relative_bias_for_several_layers_counts_the_tokens_of_each_row():
    layer, x, lengths = nn.RelativeBias(2, bidirectional=False), jnp.ones((2, 3, 4)), jnp.array([3, 1])
    trainables, state = layer.init(RNG, {"x": x, "lengths": None})
    whole, _ = layer.fwd({"x": jnp.ones((1, 6, 4))}, trainables)  # (1, h, 6, 6)
    assert state is None and whole.shape == (1, 2, 6, 6)
    decoder = nn.RelativeBias(2, bidirectional=False, cache=6)
    _, state = decoder.init(RNG, {"x": x, "lengths": lengths})
    first, state = decoder.fwd({"x": x, "lengths": lengths}, trainables, state)
    then, state = decoder.fwd({"x": x[:, :1]}, trainables, state)
    np.testing.assert_array_equal(first, jnp.repeat(whole[:, :, :3], 2, axis=0))
    np.testing.assert_array_equal(then, jnp.stack([whole[0, :, 3:4], whole[0, :, 1:2]]))
    assert state["count"].tolist() == [4, 2]
    narrow, _ = layer.fwd({"x": x.astype("bfloat16")}, trainables)
    assert narrow.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="must be a dict of x"):
        layer.init(RNG, {"positions": x})
