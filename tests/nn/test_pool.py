"""Pooling against PyTorch, against loops over windows, and its errors."""

import functools
import inspect
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import mlax
from mlax import nn, ops
from tests.catalogue import conv as loops

RNG = jax.random.key(0)
TORCH = np.load(Path(__file__).parents[1] / "references" / "conv.npz")
POOLS = {
    "max_line": nn.MaxPool(3, strides=2, padding=1),
    "max_plane": nn.MaxPool(2),
    "max_overlap": nn.MaxPool(3, strides=(2, 1), padding=1),
    "max_dilated": nn.MaxPool((3, 2), strides=1, dilation=(2, 3)),
    "max_ceil": nn.MaxPool(3, strides=2, ceil=True),
    "max_volume": nn.MaxPool((2, 1, 3), strides=(2, 1, 2)),
    "max_wide": nn.MaxPool(34, strides=3, padding=17),
    "max_apart": nn.MaxPool(36),
    "max_empty": nn.MaxPool(2),
    "mean_line": nn.MeanPool(3, strides=2, padding=1),
    "mean_plane": nn.MeanPool((3, 2), padding=1, count_padding=True),
    "mean_ceil": nn.MeanPool(3, strides=2, padding=1, ceil=True, count_padding=True),
    "mean_volume": nn.MeanPool(2, strides=1),
    "mean_wide": nn.MeanPool(34, strides=3),
    "adaptive_mean": nn.AdaptivePool((3, 2)),
    "adaptive_even": nn.AdaptivePool((3, 2)),
    "adaptive_larger": nn.AdaptivePool((5, None)),
    "adaptive_max": nn.AdaptivePool((3, 4), by="max"),
    "adaptive_max_line": nn.AdaptivePool(4, by="max"),
    "adaptive_max_volume": nn.AdaptivePool((2, 3, 1), by="max"),
}


@functools.partial(jax.jit, static_argnums=0)
def pulled(layer, x, weight):
    """The output, and the gradient of its weighted sum, in one program."""
    y, pull = jax.vjp(lambda x: layer.fwd(x, None)[0], x)
    return y, *pull(weight)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, marks=pytest.mark.thorough if layout == "channel_first" and number % 3 else ())
        for number, case in enumerate(POOLS)
        for layout in ("channel_first", "channel_last")
    ],
)
def test_outputs_and_gradients_agree_with_pytorch_including_ties(case, layout):
    image = np.asarray if layout == "channel_first" else loops.last
    layer = mlax.override(POOLS[case], mlax.Layer, layout=layout)
    x = jnp.asarray(image(TORCH[f"{case}/x"]), jnp.float32)
    y, d_x = pulled(layer, x, jnp.asarray(image(TORCH[f"{case}/weight"]), jnp.float32))
    np.testing.assert_allclose(y, image(TORCH[f"{case}/y"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_x, image(TORCH[f"{case}/d_x"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["max_line", "max_overlap", "max_ceil", "max_volume"])
def test_the_gradient_that_a_gpu_gathers_agrees_with_pytorch(case, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(ops.max_pool), "prefers_gathered_pool_grad", lambda *_: True)
    x, weight = (jnp.asarray(loops.last(TORCH[f"{case}/{name}"]), jnp.float32) for name in ("x", "weight"))
    y, pull = jax.vjp(lambda x: POOLS[case].fwd(x, None)[0], x)
    np.testing.assert_allclose(y, loops.last(TORCH[f"{case}/y"]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*pull(weight), loops.last(TORCH[f"{case}/d_x"]), rtol=1e-5, atol=1e-5)


def test_a_gathered_gradient_has_every_derivative(monkeypatch):
    x = jnp.asarray(loops.last(TORCH["max_line/x"]), jnp.float32)

    def derivatives(x):
        def cubes(x):
            return jnp.sum(POOLS["max_line"].fwd(x, None)[0] ** 3)

        each = jax.vmap(jax.grad(lambda x: cubes(x[None])))(x)
        return each, *jax.jvp(jax.grad(cubes), (x,), (jnp.cos(x),)), jax.jvp(cubes, (x,), (jnp.cos(x),))

    plain = jax.jit(lambda x: derivatives(x))(x)
    monkeypatch.setattr(inspect.getmodule(ops.max_pool), "prefers_gathered_pool_grad", lambda *_: True)
    gathered = jax.jit(lambda x: derivatives(x))(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), gathered, plain)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), rank=st.integers(1, 3))
def test_pooling_equals_a_loop_over_windows(data, rank):
    def draw(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(rank))

    window, strides, dilation = draw(1, 4), draw(1, 3), draw(1, 2)
    pads = tuple((k // 2, (k - 1) // 2) for k in window) if data.draw(st.booleans()) else ((0, 0),) * rank
    sizes = tuple((k - 1) * d + 1 + more for k, d, more in zip(window, dilation, draw(0, 3), strict=True))
    x = np.random.default_rng(0).normal(size=(2, *sizes, 2)).astype(np.float32)
    for layer, reduce, fill in (
        (nn.MaxPool(window, strides=strides, padding=pads, dilation=dilation), np.max, -math.inf),
        (nn.SumPool(window, strides=strides, padding=pads, dilation=dilation), np.sum, 0.0),
        (nn.MeanPool(window, strides=strides, padding=pads, dilation=dilation), np.nanmean, math.nan),
        (nn.MeanPool(window, strides=strides, padding=pads, dilation=dilation, count_padding=True), np.mean, 0.0),
        (nn.Pool(lax.mul, 1.0, window, strides=strides, padding=pads, dilation=dilation), np.prod, 1.0),
    ):
        want = loops.pool(x, reduce, window, strides, pads, dilation, fill)
        np.testing.assert_allclose(jax.jit(layer.fwd)(x, None)[0], want, rtol=1e-4, atol=1e-5)


@settings(max_examples=6, deadline=None)
@given(window=st.integers(1, 40), stride=st.integers(1, 40), extra=st.integers(0, 40))
def test_windows_of_any_length_equal_the_loop_forward_and_backward(window, stride, extra):
    x = np.random.default_rng(0).integers(0, 3, (1, window + extra, 1)).astype(np.float32)
    cuts = loops.cut(x, (window,), (stride,), [(0, 0)])[0, ..., 0]  # (windows, window)
    y, d_x = pulled(
        nn.MaxPool(window, strides=stride), x, np.arange(1, len(cuts) + 1, dtype=np.float32).reshape(1, -1, 1)
    )
    np.testing.assert_array_equal(y[0, :, 0], cuts.max(1))
    want = np.zeros(window + extra)
    np.add.at(want, np.arange(len(cuts)) * stride + cuts.argmax(1), np.arange(1.0, len(cuts) + 1))
    np.testing.assert_array_equal(d_x[0, :, 0], want)
    total, _ = jax.jit(nn.SumPool(window, strides=stride).fwd)(x, None)
    np.testing.assert_array_equal(total[0, :, 0], cuts.sum(1))


@settings(max_examples=10, deadline=None)
@given(size=st.integers(1, 12), bins=st.integers(1, 12))
def test_adaptive_pooling_equals_a_loop_over_the_bins_of_pytorch(size, bins):
    x = np.random.default_rng(0).normal(size=(2, size, 3)).astype(np.float32)
    for by, reduce in (("mean", np.mean), ("max", np.max), ("sum", np.sum)):
        want = loops.adaptive(x, reduce, (bins,))
        np.testing.assert_allclose(jax.jit(nn.AdaptivePool(bins, by=by).fwd)(x, None)[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["channel_first", "channel_last", "HWNC"])
def test_global_pooling_reduces_all_spatial_axes(layout):
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 6)).astype(np.float32)
    axes = {"channel_first": (2, 3), "channel_last": (1, 2), "HWNC": (0, 1)}[layout]
    for by, reduce in (("mean", np.mean), ("max", np.max), ("sum", np.sum)):
        for keep in (False, True):
            y, _ = nn.GlobalPool(by=by, keep_axes=keep, layout=layout).fwd(x, None)
            np.testing.assert_allclose(y, reduce(x, axis=axes, keepdims=keep), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [nn.MaxPool((3, 4)), nn.MaxPool((3, 4), strides=(1, 1)), nn.GlobalPool(by="max"), nn.AdaptivePool(1, by="max")],
)
def test_the_gradient_of_equal_elements_goes_to_the_first(layer):
    x = jnp.zeros((1, 3, 4, 1)).at[0, 1:, 1:3].set(2.0)
    d_x = jax.jit(jax.grad(lambda x: layer.fwd(x, None)[0].sum()))(x)
    np.testing.assert_array_equal(d_x, jnp.zeros_like(x).at[0, 1, 1].set(1.0))


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool(2),
        nn.MaxPool(2, strides=1),
        nn.MaxPool(20, strides=1, padding=9),
        nn.GlobalPool(by="max"),
        nn.AdaptivePool(3, by="max"),
    ],
)
def test_a_nan_is_the_largest(layer):
    x = jnp.zeros((1, 4, 4, 1)).at[0, 0, 1].set(jnp.nan)
    y, _ = jax.jit(layer.fwd)(x, None)
    assert jnp.isnan(y).any() and jnp.isnan(y.reshape(-1)[0])


def test_forward_mode_and_second_derivatives_work():
    x = jax.random.normal(RNG, (1, 6, 2))
    for layer in (nn.MaxPool(3, strides=2, padding=1), nn.GlobalPool(by="max"), nn.Pool(jnp.logaddexp, -math.inf, 2)):

        @jax.jit
        def function(x):
            return (layer.fwd(x, None)[0] ** 2).sum()

        forward = jax.jacfwd(function)(x)
        np.testing.assert_allclose(forward, jax.grad(function)(x), rtol=1e-5, atol=1e-5)
        twice = jax.grad(lambda x: (jax.grad(function)(x) ** 2).sum())(x)
        assert jnp.isfinite(twice).all()


def test_accum_dtype_accumulates_wide():
    x = jnp.full((1, 64, 64, 1), 1.0 + 2**-7, jnp.bfloat16)
    for layer in (nn.GlobalPool(accum_dtype="float32"), nn.MeanPool(64, accum_dtype="float32")):
        y, _ = jax.jit(layer.fwd)(x, None)
        assert y.dtype == jnp.bfloat16 and (y == x[0, 0, 0, 0]).all()


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (
            nn.MaxPool((2, 2)),
            (4, 32, 3),
            r"MaxPool\(\(2, 2\)\): window has 2 axes .* 1 spatial axis; pass window=\(2,\)",
        ),
        (nn.MaxPool(3), (4, 2, 2, 3), "window covers 3 positions but the input .* has 2"),
        (nn.MeanPool(2, padding=2), (4, 5, 3), "a window holds nothing but padding"),
        (nn.SumPool(2, padding="FULL"), (4, 5, 3), "padding is 'FULL'"),
        (nn.Pool(lax.add, 0.0, 2, layout="CHW"), (4, 5, 3), "layout is 'CHW'"),
        (nn.GlobalPool(), (4, 5), "needs a batch axis"),
        (nn.AdaptivePool((2, 2)), (4, 5, 3), r"size has 2 entries .* 1 spatial axes; pass size=\(2,\)"),
        (nn.AdaptivePool(0), (4, 5, 3), "size is 0, but must be integers"),
    ],
)
def test_errors_say_what_does_not_fit(layer, shape, words):
    with pytest.raises(ValueError, match=words) as caught:
        layer.init(RNG, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert str(caught.value).startswith(f"{layer}: ")


@pytest.mark.parametrize("kind", [nn.GlobalPool, functools.partial(nn.AdaptivePool, 2)])
def test_an_invalid_reduction_is_an_error(kind):
    with pytest.raises(ValueError, match="by is 'median', but must be one of mean, max, sum"):
        kind(by="median")


def test_a_max_pooling_fused_with_its_neighbors_has_the_same_value_and_derivatives(monkeypatch):
    x = jax.random.normal(jax.random.key(0), (2, 4, 6, 3)).at[0, 1, 1, 0].set(jnp.nan)

    def derivatives(fused):
        monkeypatch.setattr(inspect.getmodule(ops.max_pool), "prefers_fused_max", lambda _: fused)
        y, pull = jax.vjp(lambda x: ops.max_pool(x, 2), x)
        return ops.max_pool(x, 2), pull(y), jax.jvp(lambda x: ops.max_pool(x, 2), (x,), (x,))

    for one, other in zip(*(jax.tree.leaves(derivatives(fused)) for fused in (True, False)), strict=True):
        np.testing.assert_array_equal(one, other)
