"""Mamba, beyond the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import mlax
from mlax import dtypes, nn, ops
from tests.arrays import normal
from tests.asserts import assert_close
from tests.references.experts import assert_agrees_with_torch, cases

RNG = jax.random.key(0)


@pytest.mark.parametrize(
    ("case", "decode"),
    [
        pytest.param(case, decode, marks=pytest.mark.thorough if decode and number else ())
        for number, case in enumerate(cases("mamba"))
        for decode in (False, True)
    ],
)
def test_outputs_and_gradients_agree_with_torch(case, decode):
    _, _, window, rank = case.split()
    assert_agrees_with_torch(case, nn.Mamba(5, states=3, window=int(window), rank=int(rank), chunk=4, decode=decode))


def sequential(x, step, log_rate, write, read, skip, state):
    ys = []
    for i in range(x.shape[1]):
        decay = np.exp(-step[:, i, :, None] * np.exp(log_rate))
        state = decay * state + (step[:, i] * x[:, i])[..., None] * write[:, i, None]
        ys.append((state * read[:, i, None]).sum(-1) + skip * x[:, i])
    return np.stack(ys, 1) if ys else np.zeros_like(x), state


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.sampled_from([(0, 5, 2, 3), (2, 0, 1, 2), (1, 1, 3, 1), (2, 7, 2, 3), (1, 9, 1, 1)]),
    chunk=st.sampled_from([1, 2, 4, 64]),
)
def test_the_scan_equals_a_loop_over_time_for_any_sizes_and_chunks(sizes, chunk):
    b, t, c, n = sizes
    shapes = [(b, t, c), (b, t, c), (c, n), (b, t, n), (b, t, n), (c,), (b, c, n)]
    arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    arrays[1] = np.abs(arrays[1])
    got = jax.jit(ops.selective_scan, static_argnames="chunk")(*arrays, chunk=chunk)
    want = sequential(*(np.asarray(array, np.float64) for array in arrays))
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize(("t", "w", "cut"), [(6, 4, 2), (6, 1, 3), (2, 4, 1), (5, 3, 5), (0, 2, 0)])
def test_the_filter_is_a_convolution_and_resumes_where_it_stopped(t, w, cut):
    x, kernel, bias = (normal(*shape) for shape in ((2, t, 3), (w, 3), (3,)))
    run = jax.jit(ops.causal_filter)
    whole, seen = run(x, kernel, bias)
    for i, j in np.ndindex(2, 3):
        want = np.convolve(x[i, :, j], kernel[::-1, j])[:t] + bias[j] if t else np.zeros(0)
        np.testing.assert_allclose(whole[i, :, j], want, rtol=1e-5, atol=1e-5)
    first, before = run(x[:, :cut], kernel, bias)
    then, after = run(x[:, cut:], kernel, bias, before)
    np.testing.assert_allclose(np.concatenate([first, then], 1), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(after, seen)


def test_decoding_token_by_token_after_a_prompt_equals_one_pass_and_compiles_once():
    x = normal(2, 11, 6)
    layer, decoder = nn.Mamba(6, states=4, chunk=4), nn.Mamba(6, states=4, chunk=4, decode=True)
    trainables, state = decoder.init(RNG, x[:, :5])
    jax.tree.map(np.testing.assert_array_equal, trainables, layer.init(RNG, x)[0])
    whole, _ = jax.jit(layer.fwd)(x, trainables)
    traces = []

    @jax.jit
    def step(x, state):
        traces.append(x.shape)
        return decoder.fwd(x, trainables, state, inference_mode=True)

    y, state = step(x[:, :5], state)
    ys = [y]
    for i in range(5, 11):
        y, state = step(x[:, i : i + 1], state)
        ys.append(y)
    np.testing.assert_allclose(np.concatenate(ys, 1), whole, rtol=1e-5, atol=1e-5)
    assert traces == [(2, 5, 6), (2, 1, 6)]


@pytest.mark.parametrize("decode", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_time_may_be_symbolic_in_an_export(decode, thorough):
    layer = nn.Mamba(4, states=3, chunk=4, decode=decode)
    b, t = export.symbolic_shape("b, t")
    x = jax.ShapeDtypeStruct((b, t, 4), jnp.float32)
    trainables, _ = layer.init(RNG, jnp.ones((1, 1, 4)))

    @jax.jit
    def gradient(trainables, state, x):
        return jax.grad(lambda *at: (layer.fwd(at[1], at[0], state)[0] ** 2).sum(), (0, 1))(trainables, x)

    exported = export.export(gradient)(trainables, jax.eval_shape(layer.init, RNG, x)[1], x)
    for length in (1, 4, 7) if thorough else (1, 7):
        given = normal(2, length, 4)
        state = layer.init(RNG, given)[1]
        assert_close(exported.call(trainables, state, given), gradient(trainables, state, given), 1e-5)


def test_initial_rates_are_bitwise_equal_under_jit(thorough):
    layer = nn.Mamba(4, states=64)
    init = jax.jit(layer.init)
    for dtype in ("float32", "bfloat16", "float16") if thorough else ("float32", "bfloat16"):
        x = jnp.ones((1, 2, 4), dtype)
        eager, jitted = layer.init(RNG, x), init(RNG, x)
        jax.tree.map(np.testing.assert_array_equal, eager, jitted)
        exact = np.log(np.arange(1, 65)).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(eager[0]["scan"]["log_rate"][0], exact)


def test_no_step_depends_on_a_later_one():
    x = normal(1, 9, 6)
    layer = nn.Mamba(6, states=4, chunk=4)
    trainables, _ = layer.init(RNG, x)
    fwd = jax.jit(layer.fwd)
    before, _ = fwd(x, trainables)
    after, _ = fwd(np.concatenate([x[:, :5], 9 - x[:, 5:]], 1), trainables)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_the_states_of_all_steps_are_never_in_memory_at_once():
    c, n = 64, 64

    @jax.jit
    @jax.grad
    def grad(x, step, log_rate, write, read, skip):
        return ops.selective_scan(x, step, log_rate, write, read, skip, chunk=8)[0].sum()

    def temporary(t):
        shapes = [(1, t, c), (1, t, c), (c, n), (1, t, n), (1, t, n), (c,)]
        lowered = grad.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    states_of_256_times = 256 * c * n * 4  # bytes of float32
    assert temporary(512) - temporary(256) < states_of_256_times / 2


def test_initial_steps_and_rates_are_those_of_the_paper():
    x = normal(1, 3, 64)
    trainables, _ = nn.Mamba(64).init(RNG, x)
    steps = jax.nn.softplus(trainables["step"]["bias"])
    assert 0.9e-3 < steps.min() < 3e-3 and 0.05 < steps.max() < 0.11
    np.testing.assert_allclose(jnp.exp(trainables["scan"]["log_rate"][5]), np.arange(1, 17), rtol=1e-5)
    assert trainables["step"]["kernel"].shape == (4, 128)


def test_mixed_precision_keeps_the_state_in_float32():
    model = dtypes.mixed_bfloat16(nn.Mamba(6, states=4, decode=True))
    trainables, state = model.init(RNG, normal(1, 3, 6))
    y, new = jax.jit(model.fwd)(normal(1, 3, 6), trainables, state)
    assert mlax.get(model, "scan").accum_dtype == "float32"
    assert y.dtype == new["scan"]["state"].dtype == jnp.float32


def test_a_wide_state_is_more_accurate():
    ones, zeros = np.ones((1, 256, 1)), np.zeros((1, 1))
    arrays = [ones, ones / 256, zeros, ones, ones, zeros[0]]  # the state is a sum of many small values
    run = jax.jit(ops.selective_scan, static_argnames=("chunk", "accum_dtype"))
    narrow, wide = (
        run(*(jnp.asarray(array, jnp.bfloat16) for array in arrays), chunk=1, accum_dtype=accum_dtype)[0]
        for accum_dtype in (None, "float32")
    )
    exact, _ = sequential(*arrays, np.zeros((1, 1, 1)))
    far, near = (np.abs(np.asarray(y, np.float64) - exact).max() for y in (narrow, wide))
    assert narrow.dtype == wide.dtype == jnp.bfloat16
    assert near < 2e-3 < 0.05 < far


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="states is 0, but must be an integer of at least 1"):
        nn.Mamba(6, states=0)
    with pytest.raises(ValueError, match="rank is 0, but must be at least 1, or None"):
        nn.Mamba(6, rank=0)
    with pytest.raises(ValueError, match=r"the shape \(3, 6\), but must be \(b, t, d\)"):
        nn.Mamba(6).init(RNG, jnp.ones((3, 6)))
