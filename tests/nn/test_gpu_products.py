"""Kernels of matrix products: interpreted, lowered for a GPU, and with every derivative of the plain products."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import _gpu, dtypes, nn, ops, zoo
from tests.arrays import normal, normals
from tests.asserts import assert_close
from tests.gpu import GPU, ROWS, assume_hopper, count_kernels, interpret_kernels, lower_for_cuda, needs_mosaic

PRODUCTS = inspect.getmodule(_gpu.prefers_product_kernels)
MLP = inspect.getmodule(_gpu.prefers_mlp_kernels)
FUSED = inspect.getmodule(inspect.unwrap(ops.gelu_mlp))
DERIVATIVES = {
    "gradient": lambda f, axes: jax.grad(f, axes),
    "forward mode": lambda f, axes: lambda *args: jax.jvp(f, args, args),
    "vmap of the gradient": lambda f, axes: jax.vmap(jax.grad(f, axes), (0, *(None for _ in axes[1:]))),
    "derivative of the gradient": lambda f, axes: lambda *args: jax.jvp(jax.grad(f, axes), args, args),
}


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def widen(tree):
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), tree)


@needs_mosaic
@pytest.mark.parametrize(("rows", "blocks"), [(256, 7), (768, 7), (256, 2)])
def test_the_gradients_of_several_products_are_those_of_each(monkeypatch, rows, blocks):
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(PRODUCTS, "multiprocessors", lambda: blocks)  # some have parts of several tiles
    x, *grads = normals((rows, 256), *[(rows, 128)] * 3, dtype=jnp.bfloat16)
    kernels = normals(*[(256, 128)] * 3, dtype=jnp.bfloat16)
    wide_x, wide_grads, wide_kernels = widen((x, grads, kernels))
    found = PRODUCTS.sum_of_products(grads, kernels).astype(np.float32)
    pairs = zip(wide_grads, wide_kernels, strict=True)
    np.testing.assert_allclose(found, sum(grad @ kernel.T for grad, kernel in pairs), rtol=2**-7, atol=0.1)
    for gradient, grad in zip(PRODUCTS.kernel_gradients(x, grads), wide_grads, strict=True):
        np.testing.assert_allclose(gradient.astype(np.float32), wide_x.T @ grad, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize(
    "tiles, depth, blocks",
    [(54, 512, 132), (54, 788, 132), (54, 64, 16), (3, 4, 7), (4, 8, 8), (5, 3, 5), (5, 3, 2)],  # 16: a part of a GPU
)
def test_each_step_of_each_tile_is_in_one_partial_sum(tiles, depth, blocks):
    split, seen = PRODUCTS.SplitK.over(tiles, depth, blocks), np.zeros((tiles, depth), int)
    partial = np.zeros((split.sums, 1, 1), np.float32)
    for block in range(blocks):
        for item in range(int(split.items(jnp.int32(block)))):
            tile, first, steps, place = map(int, split.segment(jnp.int32(block), jnp.int32(item)))
            seen[tile, first : first + steps] += 1
            partial[place] += steps
    np.testing.assert_array_equal(seen, 1)
    np.testing.assert_array_equal(split.reduce(jnp.asarray(partial)), np.full((tiles, 1, 1), depth))


@needs_mosaic
@pytest.mark.parametrize("blocks", [1, 3, 5])  # with 1, 2, 3 and 4 tiles each, so that turns are left over or not
@pytest.mark.parametrize("activation", [ops.gelu, ops.exact_gelu])
def test_a_product_with_gelu_and_its_gradient_are_those_of_the_plain_form(monkeypatch, activation, blocks):
    interpret_kernels(monkeypatch)
    monkeypatch.setattr(MLP, "multiprocessors", lambda: blocks)
    rows, d, f, options = 256, 192, 384, {"approximate": activation is ops.gelu}
    x, up, bias, grad, down = normals((rows, d), (d, f), (f,), (rows, d), (f, d), dtype=jnp.bfloat16)
    up, down = up / 8, down / 8
    exact = widen(x) @ widen(up) + widen(bias)
    h, y = MLP.gelu_product_kernel(x, up, bias, **options)
    tolerance = {"rtol": 2**-8, "atol": 2**-9}
    np.testing.assert_allclose(h.astype(np.float32), exact, **tolerance)
    np.testing.assert_allclose(y.astype(np.float32), activation(exact), **tolerance)
    np.testing.assert_array_equal(MLP.biased_product_kernel(x, up, bias), h)
    dh, dbias = MLP.gelu_product_gradient_kernel(grad, down, h, **options)
    (exact_dh,) = jax.vjp(activation, widen(h))[1](widen(grad) @ widen(down).T)
    np.testing.assert_allclose(dh.astype(np.float32), exact_dh, **tolerance)
    np.testing.assert_allclose(dbias, exact_dh.sum(0), rtol=1e-4, atol=1e-4)


@needs_mosaic
def test_the_products_with_gelu_are_lowered_for_a_gpu():
    x, up, bias, h, down = struct(512, 128), struct(128, 256), struct(256), struct(512, 256), struct(256, 128)
    for approximate in (True, False):
        options = {"approximate": approximate}
        assert count_kernels(functools.partial(MLP.gelu_product_kernel, **options), x, up, bias) == 1
        assert count_kernels(functools.partial(MLP.gelu_product_gradient_kernel, **options), x, down, h) == 1
    text = lower_for_cuda(MLP.biased_product_kernel, x, up, bias)
    assert text.count("custom_call @mosaic_gpu") == 1 and "biased_product" in text  # its name in a profile


@needs_mosaic
def test_attention_multiplies_jointly_where_that_was_measured(monkeypatch):
    assume_hopper(monkeypatch)
    layer, x = nn.MultiHeadAttention(12, causal=True, implementation="xla"), tokens(1 << 15)
    assert count_calls(layer, x)[0] == 2
    assert count_calls(layer, tokens(1 << 13))[0] == 0
    lora = mlax.replace(layer, "query", nn.LoRA(nn.Linear(768), rank=4))
    assert count_calls(lora, x)[0] == 0


@needs_mosaic
def test_the_products_of_an_mlp_apply_gelu_where_that_was_measured(monkeypatch):
    assume_hopper(monkeypatch)
    mlp = mlax.Series(up=nn.Linear(3072, activation=ops.exact_gelu), down=nn.Linear(768, bias=False))
    assert count_calls(mlp, tokens(1 << 15)) == (2, 3)
    assert count_calls(mlp, tokens(1 << 14)) == (2, 5)  # kernels of GELU and its gradient alone
    mlp = mlax.replace(mlp, "down", nn.Linear(768))
    assert count_calls(mlp, tokens(1 << 15)) == (2, 5)  # with the sum of the gradient of the bias, by two products
    for name, other in (
        ("down", nn.Linear(768, precision="highest")),
        ("down", nn.Linear(768, activation=jnp.tanh)),
        ("down", nn.Linear(512)),
        ("down", nn.LoRA(nn.Linear(768), rank=4)),
        ("up", nn.Linear(3072, activation=ops.gelu, accum_dtype="float32")),
        ("up", nn.Linear(3072, activation=ops.gelu, bias=False)),
        ("up", nn.Linear(3072, activation=jax.nn.relu)),
        ("up", nn.Linear(2048, activation=ops.gelu)),
    ):
        assert count_calls(mlax.replace(mlp, name, other), tokens(1 << 15))[1] >= 7, other
    _, _, outputs = jax.eval_shape(
        mlax.capture(mlp, "up"), tokens(1 << 15), jax.eval_shape(mlp.init, jax.random.key(0), tokens(1 << 15))[0]
    )
    assert outputs["up"].shape == (32, 1024, 3072)


@needs_mosaic
def test_a_block_of_gpt2_joins_its_products_also_if_the_next_norm_adds_its_last_bias(monkeypatch):
    assume_hopper(monkeypatch)
    block = dtypes.mixed_bfloat16(zoo.gpt2("small").parts()["blocks"].layer)
    block = mlax.override(block, nn.MultiHeadAttention, implementation="xla")
    kernels, products = count_calls(block, tokens(1 << 15))
    assert kernels == 2 * 2 + 2 + 2  # norms, the MLP, and the gradients of queries, keys and values
    monkeypatch.setattr(MLP, "MIN_ROWS", 1 << 16)
    assert count_calls(block, tokens(1 << 15)) == (kernels, products + 2)


def tokens(rows):
    return jax.ShapeDtypeStruct((rows // 1024, 1024, 768), jnp.bfloat16)


def count_calls(layer, x):
    """How many kernels and how many products outside of them the gradient of the sum of a layer's output takes."""
    weights = jax.eval_shape(layer.init, jax.random.key(0), x)[0]

    def gradient(weights, x):
        return jax.grad(lambda weights, x: layer.fwd(x, weights)[0].astype(np.float32).sum(), (0, 1))(weights, x)

    text = lower_for_cuda(gradient, weights, x)
    return text.count("custom_call @mosaic_gpu"), text.count("stablehlo.dot_general")


def use_plain_forms(monkeypatch):
    """Compute products as where kernels are chosen, but by the plain form of each kernel."""
    for module in (_gpu, FUSED):
        for name in ("prefers_product_kernels", "prefers_mlp_kernels"):
            monkeypatch.setattr(module, name, lambda *args: True)
    monkeypatch.setattr(FUSED, "on_gpu", lambda kernel, plain, *arrays: plain(*arrays))


@pytest.mark.parametrize("name", DERIVATIVES)
def test_several_products_have_every_derivative(monkeypatch, name):
    use_plain_forms(monkeypatch)
    x, *kernels = normals((2, 5, 8), *[(8, 6)] * 3)
    biases = [normal(6, seed=4), None, normal(6, seed=5)]

    def loss(multiply):
        return lambda x, kernels, biases: sum((i + y**2).sum() for i, y in enumerate(multiply(x, kernels, biases)))

    def multiply_each(x, kernels, biases):
        return [ops.linear(x, *pair) for pair in zip(kernels, biases, strict=True)]

    derive = DERIVATIVES[name]
    found, expected = (derive(loss(each), (0, 1, 2))(x, kernels, biases) for each in (ops.linears, multiply_each))
    assert_close(found, expected, 1e-5, 1e-5)


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("activation", [ops.gelu, ops.exact_gelu])
def test_products_with_gelu_have_every_derivative(monkeypatch, name, activation):
    use_plain_forms(monkeypatch)
    arrays = normals((2, 5, 8), (8, 12), (12,), (12, 6))

    def joint(x, up, bias, down):
        return (ops.gelu_mlp(x, up, bias, down=down, activation=activation) ** 2).sum()

    def plain(x, up, bias, down):
        return (ops.linear(ops.linear(x, up, bias, activation=activation), down) ** 2).sum()

    found, expected = (DERIVATIVES[name](each, (0, 1, 2, 3))(*arrays) for each in (joint, plain))
    assert_close(found, expected, 1e-5, 1e-4)


def test_weights_that_do_not_fit_are_reported_as_those_of_their_own_layer(monkeypatch):
    use_plain_forms(monkeypatch)
    mlp, x = mlax.Series(up=nn.Linear(12, activation=ops.gelu), down=nn.Linear(6)), normal(5, 8)
    trainables, _ = mlp.init(jax.random.key(0), x)
    for kernel in (normal(12, 7), normal(12, 6, dtype="bfloat16"), normal(11, 6), None, {"q": normal(12, 6)}):
        wrong = {**trainables, "down": {**trainables["down"], "kernel": kernel}}
        with pytest.raises((ValueError, TypeError)) as error:
            mlp.fwd(x, wrong)
        assert "in down" in "".join(error.value.__notes__)


def test_a_subclass_of_linear_is_computed_by_its_own_forward_pass(monkeypatch):
    """It may compute anything, for example by weights of unit norm, from variables of the same shapes."""

    @mlax.frozen
    class Doubled(nn.Linear):
        def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
            y, state = nn.Linear.fwd(self, x, {**trainables, "kernel": 2 * trainables["kernel"]}, non_trainables)
            return 2 * y, state

    x, up, attention = normal(2, 5, 8), nn.Linear(12, activation=ops.gelu), nn.MultiHeadAttention(2)
    layers = (
        mlax.Series(up=Doubled(12, activation=ops.gelu), down=nn.Linear(8)),
        mlax.Series(up=up, down=Doubled(8)),
        mlax.override(mlax.replace(attention, "value", Doubled(8)), nn.Linear, bias_init=mlax.Ones()),
        mlax.override(mlax.replace(attention, "out", Doubled(8)), nn.Linear, bias_init=mlax.Ones()),
    )
    expected = [layer.fwd(x, layer.init(jax.random.key(0), x)[0])[0] for layer in layers]
    use_plain_forms(monkeypatch)
    monkeypatch.setattr(_gpu, "prefers_kernels", lambda x: True)
    for layer, wanted in zip(layers, expected, strict=True):
        assert_close(layer.fwd(x, layer.init(jax.random.key(0), x)[0])[0], wanted)
    assert Doubled(8).split_bias(x, {"kernel": normal(8, 8), "bias": normal(8)}, False) is None


def test_an_axis_of_size_0_is_no_obstacle():
    mlp, x = mlax.Series(up=nn.Linear(12, activation=ops.gelu), down=nn.Linear(6)), jnp.ones((5, 0))
    assert mlp.fwd(x, mlp.init(jax.random.key(0), x)[0])[0].shape == (5, 6)


@needs_mosaic
@pytest.mark.parametrize("capability", [8.0, 9.0, 10.0, 12.0])
def test_kernels_with_products_are_for_hopper_gpus(monkeypatch, capability):
    assume_hopper(monkeypatch)
    monkeypatch.setattr(GPU, "compute_capability", lambda device=None: capability)
    x, kernel, up, down = (struct(*shape) for shape in ((1 << 15, 768), (768, 768), (768, 3072), (3072, 768)))
    assert _gpu.prefers_product_kernels(x, [kernel] * 3) == (capability == 9.0)
    assert _gpu.prefers_mlp_kernels(x, up, down) == (capability == 9.0)


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_in_kernels_and_its_derivative_are_those_in_float64(approximate):
    x = np.concatenate([sign * np.logspace(-30, 19, 2000, dtype=np.float32) for sign in (1, -1)])
    found = [compute(jnp.asarray(x), approximate) for compute in (ROWS.gelu_of, ROWS.gelu_slope_of)]
    with jax.enable_x64(True):
        gelu = functools.partial(jax.nn.gelu, approximate=approximate)
        wide = jnp.asarray(x, "float64")
        exact = gelu(wide), jax.vmap(jax.grad(gelu))(wide)
    assert_close(found, list(exact), 1e-6)
