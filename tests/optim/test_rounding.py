"""Weights in bfloat16 and float16: what a master, compensation and chance keep of small steps, and rounding loses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mlax import optim
from mlax.optim import hash_bits, stochastic_round

STEPS = 1_500
DRAWS = 1 << 16


@functools.cache
def final(dtype, rounding, seed):
    """The loss of a linear regression after AdamW with steps smaller than half of what bfloat16 can tell apart."""
    optimizer = optim.AdamW(optim.Cosine(3e-3, STEPS), rounding=rounding)
    draws = np.random.default_rng(seed)
    x, truth = draws.normal(size=(64, 16)), draws.normal(size=(16, 4)) + 2
    y = jnp.asarray(x @ truth + draws.normal(size=(64, 4)), jnp.float32)
    start = jnp.asarray(truth + 0.5 * draws.normal(size=(16, 4)), jnp.bfloat16)
    trainables = {"kernel": start.astype(dtype), "bias": jnp.zeros(4, dtype)}
    x = jnp.asarray(x, jnp.float32)

    def loss(trainables):
        kernel, bias = (trainables[name].astype(jnp.float32) for name in ("kernel", "bias"))
        return jnp.mean((x @ kernel + bias - y) ** 2)

    def step(carry, _):
        trainables, state = carry
        return optimizer.update(jax.grad(loss)(trainables), state, trainables), None

    run = jax.jit(lambda carry: lax.scan(step, carry, length=STEPS)[0])
    return float(loss(run((trainables, optimizer.init(trainables)))[0]))


# over seeds 0 to 4: master weights 1.0007 at most, Kahan 1.0008, stochastic 1.0053; to nearest 4.3 at least
@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "rounding", "part"),
    [
        ("bfloat16", optim.MasterWeights(), 0.01),
        ("float16", optim.MasterWeights(), 0.01),
        ("bfloat16", optim.KahanSummation(), 0.03),
        ("bfloat16", optim.StochasticRounding(), 0.03),
    ],
)
def test_small_steps_of_narrow_weights_reach_what_float32_reaches(dtype, rounding, part, seed):
    wide = final("float32", optim.RoundToNearest(), seed)
    assert abs(final(dtype, rounding, seed) / wide - 1) < part


@pytest.mark.parametrize("seed", [0, 3])
def test_small_steps_of_bfloat16_weights_stall_if_rounded_to_nearest(seed):
    assert final("bfloat16", optim.RoundToNearest(), seed) > 3 * final("float32", optim.RoundToNearest(), seed)


def test_a_mean_square_stored_in_bfloat16_never_decays_and_in_float32_does():
    def square(dtype):
        optimizer = optim.Adam(1e-3, slot_dtypes=(("square", dtype),))
        trainables = {"kernel": jnp.ones(8, jnp.bfloat16)}
        state = optimizer.init(trainables)
        state = state._replace(square={"kernel": jnp.ones(8, dtype)})
        update = lambda _, state: optimizer.update({"kernel": jnp.zeros(8)}, state, trainables)[1]  # noqa: E731
        return np.float32(lax.fori_loop(0, 1_000, update, state).square["kernel"])

    np.testing.assert_array_equal(square("bfloat16"), 1)
    np.testing.assert_allclose(square("float32"), 0.999**1_000, rtol=1e-3)


def many(value, dtype, seed=0, step=0):
    x = jnp.full(DRAWS, value, jnp.float32)
    return np.float64(stochastic_round(x, dtype, hash_bits(x.shape, jnp.int32(step), seed)))


VALUES = {
    "bfloat16": [1.001, -1.001, 3.14159, 1e-3, -250.3, 1 + 2**-9, 2 - 2**-10, 1e-38, 3e38],
    "float16": [1.0001, -3.14159, 1000.3, 6e-5, 3e-6, -3e-6, 4.7e-8, 1e-8, 2.0**-14 - 2.0**-26, 65_490.0, -65_490.0],
}


@pytest.mark.parametrize(("dtype", "value"), [(dtype, value) for dtype, values in VALUES.items() for value in values])
def test_the_mean_of_stochastic_rounding_is_exact(dtype, value):
    found = many(value, dtype)
    value = float(np.float32(value))
    grid = np.unique(found)
    assert len(grid) == 2 and grid[0] < value < grid[1]
    gap = grid[1] - grid[0]
    nearest = float(jnp.asarray(value, jnp.float32).astype(dtype))
    assert nearest in grid
    bound = 5 * np.sqrt((value - grid[0]) * (grid[1] - value) / DRAWS) + gap * 1e-6
    assert abs(found.mean() - value) < bound


def test_the_mean_of_stochastic_rounding_from_float64_is_exact():
    with jax.enable_x64(True):
        x = jnp.full(DRAWS, 1.001, jnp.float64)
        found = np.float64(stochastic_round(x, "bfloat16", hash_bits(x.shape, jnp.int32(0), 0)))
    assert abs(found.mean() - 1.001) < 5 * np.sqrt(0.001 * (2**-7 - 0.001) / DRAWS)


EXACT = [0.0, 1.0, -1.0, 0.5, 2.0, 1024.0, -0.25, 65_504.0, 2.0**-14, 2.0**-24, -(2.0**-20), np.inf, -np.inf]


@pytest.mark.parametrize("value", EXACT)
def test_what_float16_can_represent_stays(value):
    np.testing.assert_array_equal(many(value, "float16"), value)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 2.0**-126, 2.0**127, 3.3895313892515355e38, np.inf, -np.inf])
def test_what_bfloat16_can_represent_stays(value):
    np.testing.assert_array_equal(many(value, "bfloat16"), value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_stays_nan(dtype):
    assert np.isnan(many(np.nan, dtype)).all()


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 65_520.0), ("float16", 65_600.0), ("float16", 3e38), ("bfloat16", 3.4e38)]
)
def test_beyond_the_largest_value_is_infinity(dtype, value):
    assert np.isinf(many(value, dtype)).all() and np.isinf(many(-value, dtype)).all()


LARGEST = {"float16": 65_504.0, "bfloat16": 3.3895313892515355e38}


# between the largest number and where infinity is nearer, which is half of the distance of neighbours there
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float16", 65_504.01),
        ("float16", 65_510.0),
        ("float16", 65_519.9),
        ("bfloat16", 3.39e38),
        ("bfloat16", 3.396e38),
    ],
)
def test_a_value_nearest_to_the_largest_one_never_becomes_infinite(dtype, value):
    np.testing.assert_array_equal(many(value, dtype), LARGEST[dtype])
    np.testing.assert_array_equal(many(-value, dtype), -LARGEST[dtype])


def test_a_weight_at_the_largest_value_of_float16_stays_finite():
    optimizer = optim.SGD(1.0, rounding=optim.StochasticRounding())
    trainables = {"kernel": jnp.full(4096, LARGEST["float16"], jnp.float16)}
    grads = {"kernel": jnp.full(4096, -10.0, jnp.float32)}
    new, _ = optimizer.update(grads, optimizer.init(trainables), trainables)
    np.testing.assert_array_equal(new["kernel"], trainables["kernel"])


def test_a_zero_keeps_its_sign():
    assert np.signbit(many(-0.0, "bfloat16")).all() and np.signbit(many(-0.0, "float16")).all()


def rounded(seed=0, path="kernel", step=0):
    optimizer = optim.SGD(1.0, rounding=optim.StochasticRounding(seed))
    trainables = {path: jnp.ones(4096, jnp.bfloat16)}
    state = optimizer.init(trainables)._replace(step=jnp.int32(step))
    grads = {path: jnp.full(4096, 2.0**-9, jnp.float32)}  # a quarter of the way to the number below 1
    return np.float64(optimizer.update(grads, state, trainables)[0][path]) < 1


@pytest.mark.parametrize("other", [{"seed": 1}, {"path": "bias"}, {"step": 1}, {"step": 1 << 20}])
def test_random_bits_differ_by_seed_path_and_step(other):
    one, two = rounded(), rounded(**other)
    assert (one != two).any()
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / np.sqrt(4096)


def test_members_of_an_ensemble_round_independently():
    optimizer = optim.SGD(1.0, rounding=optim.StochasticRounding())
    trainables = {"kernel": jnp.ones((2, 4096), jnp.bfloat16)}
    state = jax.vmap(optimizer.init)(trainables)
    grads = {"kernel": jnp.stack([jnp.full(4096, 2.0**-9), jnp.full(4096, 2.0**-9 + 2.0**-20)])}
    one, two = np.float64(jax.vmap(optimizer.update)(grads, state, trainables)[0]["kernel"]) < 1
    assert 0.4 < one.mean() < 0.6 and 0.4 < two.mean() < 0.6
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / np.sqrt(4096)


def test_random_bits_are_deterministic():
    np.testing.assert_array_equal(rounded(), rounded())


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 256, 1024])
@pytest.mark.parametrize("along", ["places", "rows", "steps"])
def test_random_bits_are_practically_independent(lag, along):
    if along == "steps":
        draws = jax.vmap(lambda step: hash_bits((4,), step, 7))(jnp.arange(DRAWS // 4)).T.ravel()
    else:
        draws = hash_bits((DRAWS // 256, 256) if along == "rows" else (DRAWS,), jnp.int32(3), 7)
        draws = draws.T.ravel() if along == "rows" else draws
    for bits in (draws >> 16, draws & 0xFFFF):  # the low ones are what bfloat16 uses
        uniform = np.float64(bits) / 0xFFFF - 0.5
        assert abs(uniform.mean()) < 5 * np.sqrt(1 / 12 / DRAWS)
        assert abs(np.corrcoef(uniform[:-lag], uniform[lag:])[0, 1]) < 5 / np.sqrt(DRAWS)


@pytest.mark.parametrize("rounding", [optim.KahanSummation(), optim.MasterWeights()])
def test_a_thousand_small_additions_add_up(rounding):
    optimizer = optim.SGD(1e-4, rounding=rounding)
    trainables = {"kernel": jnp.ones(8, jnp.bfloat16)}
    grads = {"kernel": jnp.full(8, -1.0, jnp.bfloat16)}

    @jax.jit
    def run(carry):
        return lax.fori_loop(0, 1_000, lambda _, carry: optimizer.update(grads, carry[1], carry[0]), carry)

    new, _ = run((trainables, optimizer.init(trainables)))
    np.testing.assert_allclose(np.float32(new["kernel"]), 1.1, atol=2**-7)  # the distance of neighbours there


def test_a_thousand_small_additions_are_lost_if_rounded_to_nearest():
    optimizer = optim.SGD(1e-4)
    carry = {"kernel": jnp.ones(8, jnp.bfloat16)}, optimizer.init({"kernel": jnp.ones(8, jnp.bfloat16)})
    grads = {"kernel": jnp.full(8, -1.0, jnp.bfloat16)}
    new, _ = lax.fori_loop(0, 1_000, lambda _, carry: optimizer.update(grads, carry[1], carry[0]), carry)
    np.testing.assert_array_equal(np.float32(new["kernel"]), 1)
