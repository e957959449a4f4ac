"""Upsampling, pixel shuffle, local response norm and cumulative BatchNorm against PyTorch, and their errors."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn
from tests.arrays import normal
from tests.asserts import assert_close_to_scale

RNG = jax.random.key(0)
TORCH = np.load(Path(__file__).parents[1] / "references" / "resample.npz")
LAYERS = {
    "nearest_line": nn.Upsample(3),
    "nearest_plane": nn.Upsample((2, 3)),
    "nearest_volume": nn.Upsample(2),
    "linear_line": nn.Upsample(3, by="linear"),
    "linear_plane": nn.Upsample((2, 3), by="linear"),
    "linear_aligned": nn.Upsample((2, 3), by="linear", align_corners=True),
    "linear_one": nn.Upsample(2, by="linear", align_corners=True),
    "linear_volume": nn.Upsample(2, by="linear"),
    "shuffle": nn.PixelShuffle(3),
    "unshuffle": nn.PixelUnshuffle(3),
    "response_odd": nn.LocalResponseNorm(3, alpha=0.5, beta=0.6, k=1.5),
    "response_even": nn.LocalResponseNorm(4),
}


@pytest.mark.parametrize("layout", ["channel_first", "channel_last"])
@pytest.mark.parametrize("case", LAYERS)
def test_outputs_and_gradients_agree_with_pytorch(case, layout):
    layer, is_last = LAYERS[case], layout == "channel_last"
    options = {"axis": -1 if is_last else 1} if isinstance(layer, nn.LocalResponseNorm) else {"layout": layout}
    layer = mlax.override(layer, type(layer), **options)
    arrays = (TORCH[f"{case}/{name}"] for name in ("x", "y", "g", "d_x"))
    x, y, g, d_x = (jnp.asarray(np.moveaxis(each, 1, -1) if is_last else each) for each in arrays)
    assert layer.init(RNG, x) == (None, None)

    @jax.jit
    def run(x, g):
        found, gradient = jax.vjp(lambda x: layer.fwd(x, None)[0], x)
        return found, gradient(g)[0]

    assert_close_to_scale(run(x, g), (y, d_x))


def test_batch_norm_without_momentum_agrees_with_pytorch():
    layer = nn.BatchNorm(momentum=None)
    trainables, state = layer.init(RNG, jnp.zeros((5, 3)))
    for step in range(3):
        _, state = layer.fwd(jnp.asarray(TORCH[f"cumulative/{step}/x"]), trainables, state)
        for name in ("mean", "var"):
            assert_close_to_scale(state[name], TORCH[f"cumulative/{step}/{name}"])


@pytest.mark.parametrize("layout", ["channel_last", "NWHC", "HWNC", "CHWN"])
def test_pixel_unshuffle_is_the_inverse_of_pixel_shuffle_in_every_layout(layout):
    x = normal(12, 12, 12, 12)
    both = mlax.Series(nn.PixelShuffle((2, 3), layout=layout), nn.PixelUnshuffle((2, 3), layout=layout))
    np.testing.assert_array_equal(both.fwd(x, *both.init(RNG, x))[0], x)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda x: nn.Upsample(2, by="cubic"), "by.? is 'cubic'"),
        (lambda x: nn.Upsample(2, align_corners=True), "align_corners"),
        (lambda x: nn.Upsample((2, 2, 2)).init(RNG, x), "3 axes"),
        (lambda x: nn.Upsample(0).init(RNG, x), "factor is 0"),
        (lambda x: nn.PixelShuffle(2).init(RNG, x), "5 channels"),
        (lambda x: nn.PixelUnshuffle(2).init(RNG, x), "multiples of the factors"),
        (lambda x: nn.LocalResponseNorm(0), "size is 0"),
        (lambda x: nn.LocalResponseNorm(3, k=0.0), "k must be positive"),
    ],
)
def test_errors_say_what_came_and_what_to_do(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make(jax.ShapeDtypeStruct((2, 3, 4, 5), jnp.float32))


@pytest.mark.parametrize("layer", [nn.Upsample(2), nn.LocalResponseNorm(3)], ids=str)
def test_integers_are_refused(layer):
    with pytest.raises(TypeError, match=r"uint8.*floating"):
        layer.init(RNG, jnp.ones((2, 3, 4, 5), "uint8"))


def test_local_response_norm_in_float16_does_not_overflow():
    x = jnp.full((1, 2, 6), 10_000.0, "float16")
    y, _ = nn.LocalResponseNorm(3).fwd(x, None)
    np.testing.assert_allclose(np.asarray(y, np.float64)[0, 0, 2], 1e4 / (1 + 1e-4 * 1e8) ** 0.75, rtol=1e-2)


def test_names_of_pytorch_lead_to_the_layers():
    advice = {"Softmax": "ops.softmax", "UpsamplingNearest2d": "nn.Upsample", "UpsamplingBilinear2d": "align_corners"}
    for name, words in advice.items():
        with pytest.raises(AttributeError, match=words):
            getattr(nn, name)
