"""Initialisers draw what they say, the same bits however they are run."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from tests.catalogue import FLOATS

RNG = jax.random.key(7)

DRAWS = {
    "normal": (mlax.Normal(0.3), lambda shape, dtype: jax.random.normal(RNG, shape, dtype)),
    "truncated": (mlax.TruncatedNormal(0.3), lambda *like: jax.random.truncated_normal(RNG, -2.0, 2.0, *like)),
    "uniform": (mlax.Uniform(0.3), lambda shape, dtype: jax.random.uniform(RNG, shape, dtype, -1.0, 1.0)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("draw", DRAWS)
def test_samples_are_those_of_jax_random(draw, dtype):
    initializer, expected = DRAWS[draw]
    shapes = [(), (0, 3), (1 << 14,), (601, 700)]
    with jax.enable_x64(dtype == "float64"):
        every = jax.jit(lambda: [expected(shape, jnp.dtype(dtype)) * jnp.asarray(0.3, dtype) for shape in shapes])()
        for shape, want in zip(shapes, every, strict=True):
            got = initializer(RNG, shape, dtype)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_key_implementations_work(impl):
    rng = jax.random.key(0, impl=impl)
    np.testing.assert_array_equal(mlax.Normal(1.0)(rng, (5, 6), "float32"), jax.random.normal(rng, (5, 6)))


def test_samples_under_vmap_are_those_of_each_key():
    keys = jax.random.split(RNG, 3)
    together = jax.vmap(lambda key: mlax.Normal(0.5)(key, (40, 50), "float32"))(keys)
    for key, one in zip(keys, together, strict=True):
        np.testing.assert_array_equal(mlax.Normal(0.5)(key, (40, 50), "float32"), one)


@pytest.mark.parametrize("distribution", ["normal", "truncated", "uniform"])
@pytest.mark.parametrize(
    ("make", "variance"),
    [(mlax.lecun, 1 / 300), (mlax.he, 2 / 300), (mlax.glorot, 2 / (300 + 600))],
    ids=["lecun", "he", "glorot"],
)
def test_variance_scaling_has_the_variance_of_its_paper(make, variance, distribution):
    draws = make(distribution)(RNG, (300, 600), "float32")
    assert abs(float(draws.var()) / variance - 1) < 0.02
    assert abs(float(draws.mean())) < 0.02 * math.sqrt(variance)


def test_fans_count_the_window_and_follow_the_axes():
    draws = mlax.he("normal")(RNG, (64, 3, 3, 32), "float32", in_axis=-1, out_axis=0)
    assert abs(float(draws.var()) * 32 * 9 / 2 - 1) < 0.05
    draws = mlax.VarianceScaling(1.0, "out", "normal")(RNG, (64, 3, 3, 32), "float32", in_axis=-1, out_axis=0)
    assert abs(float(draws.var()) * 64 * 9 - 1) < 0.05


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (3, 4, 5, 30)])
def test_orthogonal_rows_or_columns_are_orthonormal(shape):
    q = np.asarray(mlax.Orthogonal(2.0)(RNG, shape, "float32")).reshape(-1, shape[-1]) / 2.0
    small = q.T @ q if q.shape[0] >= q.shape[1] else q @ q.T
    np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-5)


def test_orthogonal_follows_the_output_axis():
    q = np.asarray(mlax.Orthogonal()(RNG, (6, 3, 4), "float32", in_axis=1, out_axis=0)).reshape(6, -1)
    np.testing.assert_allclose(q @ q.T, np.eye(6), atol=1e-5)


def test_identity_is_at_the_centre_of_the_window():
    kernel = mlax.Identity(2.0)(RNG, (3, 4, 5), "bfloat16")
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel[1], 2 * jnp.eye(4, 5, dtype=jnp.bfloat16))
    assert not kernel[0].any() and not kernel[2].any()
    oihw = mlax.Identity()(RNG, (5, 4, 3), "float32", in_axis=1, out_axis=0)
    np.testing.assert_array_equal(oihw[..., 1], np.eye(5, 4))


@pytest.mark.parametrize(("initializer", "value"), [(mlax.Zeros(), 0), (mlax.Ones(), 1), (mlax.Constant(0.25), 0.25)])
def test_constants_are_constant(initializer, value):
    made = initializer(RNG, (3, 4), "float16")
    assert made.dtype == jnp.float16 and bool((made == value).all())


@pytest.mark.parametrize("initializer", [mlax.lecun(), mlax.Orthogonal(), mlax.Identity()], ids=repr)
def test_a_shape_with_fewer_than_two_axes_is_an_error(initializer):
    with pytest.raises(ValueError, match="fewer than two axes"):
        initializer(RNG, (3,), "float32")


def test_a_misspelled_choice_is_an_error():
    with pytest.raises(ValueError, match="must be in, out or mean"):
        mlax.VarianceScaling(fan="average")
    with pytest.raises(ValueError, match="must be normal, truncated or uniform"):
        mlax.VarianceScaling(distribution="gauss")


def test_equal_initializers_are_equal():
    assert mlax.lecun() == mlax.lecun() == mlax.VarianceScaling()
    assert mlax.lecun() != mlax.he()
