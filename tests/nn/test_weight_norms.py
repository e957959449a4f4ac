"""Weight and spectral normalization against PyTorch, around several layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mlax
from mlax import nn
from tests.arrays import normal
from tests.asserts import assert_close_to_scale
from tests.nn.norm_references import differentiated, torch

RNG = jax.random.key(0)


@mlax.frozen
class Convolve(mlax.Layer):
    """Channels first, as PyTorch does it."""

    features: int
    window: tuple[int, ...]

    def init(self, rng, x):
        kernel = mlax.Normal(1.0)(rng, (self.features, x.shape[1], *self.window), x.dtype)
        return {"kernel": kernel, "bias": jnp.zeros(self.features, x.dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y = lax.conv(x, trainables["kernel"], (1,) * len(self.window), "VALID")
        return y + trainables["bias"][:, None, None], non_trainables


def transposed(kernel):
    """PyTorch keeps a matrix as (out, in)."""
    return kernel.T if kernel.ndim == 2 else kernel


@pytest.mark.parametrize(
    "case, layer",
    [
        ("linear", nn.WeightNorm(nn.Linear(5))),
        ("linear inputs", nn.WeightNorm(nn.Linear(5), axis=0)),
        ("conv", nn.WeightNorm(Convolve(4, (2, 3)), axis=0)),
    ],
)
def test_weight_norm_agrees_with_pytorch(case, layer):
    case = torch(f"weight_norm {case}")
    kernel = {name: jnp.asarray(transposed(case[name])) for name in ("direction", "magnitude")}
    trainables = {"kernel": kernel, "bias": jnp.asarray(case["bias"])}
    y, _, by_weights, by_x = differentiated(layer, case["0/x"], trainables, None, case["0/g"])
    assert_close_to_scale(y, case["0/y"])
    assert_close_to_scale(by_x, case["0/d_x"])
    assert_close_to_scale(transposed(by_weights["kernel"]["magnitude"]), case["0/d_parametrizations.weight.original0"])
    assert_close_to_scale(transposed(by_weights["kernel"]["direction"]), case["0/d_parametrizations.weight.original1"])


@pytest.mark.parametrize(
    "case, layer, steps",
    [
        ("linear", nn.SpectralNorm(nn.Linear(5)), 3),
        ("linear twice", nn.SpectralNorm(nn.Linear(5), iterations=2), 3),
        ("conv", nn.SpectralNorm(Convolve(4, (2, 3)), axis=0), 2),
    ],
)
def test_spectral_norm_agrees_with_pytorch_step_by_step(case, layer, steps):
    case = torch(f"spectral_norm {case}")
    state = {"kernel": {"left": jnp.asarray(case["left"]), "right": jnp.asarray(case["right"])}}
    for step in range(steps):
        kernel = jnp.asarray(transposed(case[f"{step}/parametrizations.weight.original"]))
        trainables = {"kernel": kernel, "bias": jnp.asarray(case[f"{step}/bias"])}
        x, g = case[f"{step}/x"], case[f"{step}/g"]
        y, state, by_weights, by_x = differentiated(layer, x, trainables, state, g)
        assert_close_to_scale(y, case[f"{step}/y"])
        assert_close_to_scale(by_x, case[f"{step}/d_x"])
        assert_close_to_scale(transposed(by_weights["kernel"]), case[f"{step}/d_parametrizations.weight.original"])
        assert_close_to_scale(state["kernel"]["left"], case[f"{step}/left"])
        assert_close_to_scale(state["kernel"]["right"], case[f"{step}/right"])
    y, same = layer.fwd(x, trainables, state, inference_mode=True)
    kernel = jnp.asarray(transposed(case["eval/kernel"]))
    assert_close_to_scale(y, layer.layer.fwd(x, {"kernel": kernel, "bias": trainables["bias"]})[0])
    jax.tree.map(np.testing.assert_array_equal, same, state)


def test_wrapped_layers_initially_compute_what_the_inner_layer_does():
    model = mlax.Series(up=nn.Linear(5), norm=nn.BatchNorm(), down=nn.Linear(2, bias=False))
    x = normal(4, 6)
    plain, plain_state = model.init(RNG, x)
    weight = nn.WeightNorm(model)
    trainables, state = weight.init(RNG, x)
    assert set(mlax.paths(trainables)) == {
        "up/bias",
        "up/kernel/direction",
        "up/kernel/magnitude",
        "norm/scale",
        "norm/shift",
        "down/kernel/direction",
        "down/kernel/magnitude",
    }
    y, new = weight.fwd(x, trainables, state)
    wanted, wanted_state = model.fwd(x, plain, plain_state)
    assert_close_to_scale(y, wanted)
    assert_close_to_scale(new, wanted_state)


def test_spectral_norm_keeps_the_state_of_the_inner_layer():
    model = nn.SpectralNorm(mlax.Series(up=nn.Linear(5), norm=nn.BatchNorm()))
    x = normal(4, 6)
    trainables, state = model.init(RNG, x)
    _, new = model.fwd(x, trainables, state)
    assert set(mlax.paths(new)) == {"up/kernel/left", "up/kernel/right", "norm/mean", "norm/var"}
    assert not np.array_equal(new["norm"]["mean"], state["norm"]["mean"])


@pytest.mark.parametrize("shape", [(6, 5), (3, 40), (1, 4), (7, 1)])
def test_the_largest_singular_value_approaches_1_in_training(shape):
    layer = nn.SpectralNorm(nn.Linear(shape[1], bias=False))
    x = jnp.eye(shape[0])
    trainables, state = layer.init(RNG, x)
    fwd = jax.jit(layer.fwd, static_argnames="inference_mode")
    for _ in range(60):
        kernel, state = fwd(x, trainables, state)
    np.testing.assert_allclose(np.linalg.svd(kernel, compute_uv=False)[0], 1.0, rtol=1e-4)
    for vector in jax.tree.leaves(state):
        np.testing.assert_allclose(np.linalg.norm(vector), 1.0, rtol=1e-6)


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_a_wrapped_layer_can_be_repeated(wrapper):
    model = mlax.Repeat(wrapper(nn.Linear(4)), 3)
    x = normal(2, 4)
    trainables, state = model.init(RNG, x)
    y, new = jax.jit(model.fwd)(x, trainables, state)
    trainables, state, new = (tree and tree["stacked"] for tree in (trainables, state, new))
    for time in range(3):
        own = jax.tree.map(lambda leaf, time=time: leaf[time], (trainables, state))
        x, moved = wrapper(nn.Linear(4)).fwd(x, *own)
        jax.tree.map(lambda leaf, moved, time=time: assert_close_to_scale(leaf[time], moved), new, moved)
    assert_close_to_scale(y, x)


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
@pytest.mark.parametrize(
    "layer, axis",
    [
        (nn.Linear(4), 1),
        (nn.Conv(4, 3), 0),
        pytest.param(nn.Conv(4, 3, layout="channel_first"), 0, marks=pytest.mark.thorough),
        (nn.Conv(4, 3, layout="NWHC/HWIO"), 3),
        (nn.ConvTranspose(4, 3), 0),
        pytest.param(mlax.Series(nn.Conv(4, 3)), 0, marks=pytest.mark.thorough),
    ],
)
def test_kernels_are_normalized_over_all_axes_but_their_outputs(wrapper, layer, axis):
    x = normal(4, 4, 4, 4)
    default, explicit = wrapper(layer), wrapper(layer, axis=axis)
    variables = default.init(RNG, x)
    jax.tree.map(np.testing.assert_array_equal, variables, explicit.init(RNG, x))
    np.testing.assert_array_equal(default.fwd(x, *variables)[0], explicit.fwd(x, *variables)[0])


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_each_layer_of_a_repeat_is_normalized_by_itself(wrapper):
    x = normal(2, 4, 4, 3)
    inner, outer = mlax.Repeat(wrapper(nn.Conv(3, 2)), 3), wrapper(mlax.Repeat(nn.Conv(3, 2), 3))
    trainables, state = inner.init(RNG, x)
    shapes = outer.init(RNG, x)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, (trainables, state))
    assert_close_to_scale(outer.fwd(x, trainables, state), inner.fwd(x, trainables, state))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_singular_vectors_of_a_zero_kernel_are_finite(dtype):
    x = normal(2, 4, dtype=dtype)
    layer = nn.SpectralNorm(nn.Linear(3, kernel_init=mlax.Zeros()))
    _, state = layer.init(RNG, x)
    assert not any(np.isnan(np.asarray(leaf, np.float32)).any() for leaf in jax.tree.leaves(state))


def test_the_error_of_a_wrapper_names_missing_variables():
    x = normal(2, 6)
    plain, _ = nn.Linear(3).init(RNG, x)
    with pytest.raises(ValueError, match="trainables lacks kernel/direction, kernel/magnitude"):
        nn.WeightNorm(nn.Linear(3)).fwd(x, plain)
    with pytest.raises(ValueError, match="non_trainables lacks kernel/left, kernel/right"):
        nn.SpectralNorm(nn.Linear(3)).fwd(x, plain)
