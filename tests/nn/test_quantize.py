"""Quantized inference: int8 kernels, float8 products, their error, and how a model gets them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mlax
from mlax import dtypes, nn, ops, place

RNG = jax.random.key(0)
ERRORS = {"int8": 0.01, "float8_e4m3fn": 0.05}  # of outputs, relative to their root mean square
quantized = pytest.mark.parametrize("dtype", ERRORS)


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


@quantized
@pytest.mark.parametrize("compute", ["float16", "bfloat16", "float32"])
def test_an_array_and_its_codes_differ_by_the_stated_error(dtype, compute):
    x = normal(64, 32, dtype=compute).at[0].set(0).at[1].multiply(1e-2).at[2].multiply(1e4)
    codes, scale = ops.quantize(x, dtype)
    found, x = (np.asarray(each, np.float64) for each in (ops.dequantize(codes, scale), x))
    assert codes.dtype == dtype and scale.dtype == compute and scale.shape == (64,)
    np.testing.assert_array_equal(scale.astype(jnp.bfloat16), scale.astype(jnp.float32))  # at most 8 bits
    step = np.asarray(scale, np.float64)[:, None]
    bound = {"float32": 0.5, "float16": 0.6, "bfloat16": 1.0}[compute] + 0.01
    if dtype == "int8":
        assert (np.abs(found - x) <= bound * step).all()
    else:
        assert (np.abs(found - x) <= np.maximum(np.abs(x) / 15, 2**-9 * step)).all()


@quantized
def test_nan_and_infinity_show_and_the_largest_number_is_kept(dtype):
    x = jnp.asarray([[1.0, np.nan], [1.0, np.inf], [1.0, 3e38]])
    found = ops.dequantize(*ops.quantize(x, dtype))
    assert np.isnan(found[:2]).any(1).all() and np.isfinite(found[2]).all()
    np.testing.assert_allclose(found[2, 1], 3e38, rtol=0.01)


@quantized
def test_a_quantized_linear_computes_the_product_of_the_codes(dtype):
    layer, x = nn.QuantizedLinear(nn.Linear(24, bias_init=mlax.Normal(1.0)), dtype), normal(3, 5, 48)
    trainables, _ = layer.init(RNG, x)
    kernel, scale, bias = (np.asarray(trainables[name], np.float64) for name in ("kernel", "scale", "bias"))
    inputs = x if dtype == "int8" else ops.dequantize(*ops.quantize(x, dtype))
    assert kernel.shape == {"int8": (48, 24), "float8_e4m3fn": (24, 48)}[dtype]
    kernel = kernel if dtype == "int8" else kernel.T
    want = np.asarray(inputs, np.float64) @ (kernel * scale) + bias
    np.testing.assert_allclose(jax.jit(layer.fwd)(x, trainables)[0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(lambda x: layer.fwd(x, trainables)[0]))(x), want, rtol=1e-5, atol=1e-5)


@quantized
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_a_linear_of_4096_inputs_has_the_stated_error(dtype, compute):
    x, kernel = normal(16, 4096, dtype=compute), normal(4096, 64, dtype=compute, seed=1)
    want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    codes, scale = ops.quantize(kernel, dtype, axis=-2)
    found = ops.quantized_linear(x, codes if dtype == "int8" else codes.T, scale)
    assert found.dtype == compute
    assert 0.1 * ERRORS[dtype] < rms(np.asarray(found, np.float64) - want) / rms(want) < ERRORS[dtype]


class Decoder(mlax.Composite):
    """Every place that holds Linears: attention, GLU, MLP and experts, in a Repeat."""

    def parts(self):
        feed = mlax.Series(gate=nn.GLU(32), down=nn.Linear(16, bias=False))
        block = mlax.Series(
            attend=mlax.Residual(nn.MultiHeadAttention(2, causal=True, rotary=nn.Rotary())), feed=mlax.Residual(feed)
        )
        # every token goes to both, since another choice of experts would not be a small error
        experts = nn.MoE(nn.MLP((24, 16)), experts=2, k=2, capacity_factor=None)
        return {"embed": nn.Embed(11, 16), "blocks": mlax.Repeat(block, 2), "experts": experts}

    def wire(self, sub, tokens):
        y, _ = sub.experts(sub.blocks(sub.embed(tokens)))
        return sub.embed(y)


@pytest.fixture(scope="module")
def decoder():
    model, tokens = mlax.frozen(Decoder)(), jnp.asarray(np.random.default_rng(0).integers(0, 11, (3, 5)))
    trainables, _ = model.init(RNG, tokens)
    return model, trainables, tokens


@quantized
def test_every_linear_of_a_model_is_quantized_and_its_output_has_the_stated_error(decoder, dtype):
    model, trainables, tokens = decoder
    small, codes = nn.quantize(model, trainables, dtype)
    kernels = {path: mlax.get(codes, path) for path in mlax.paths(codes) if path.endswith("/kernel")}
    assert kernels.keys() == {path for path in mlax.paths(trainables) if path.endswith("/kernel")}
    for path, leaf in kernels.items():
        *stack, inputs, outputs = mlax.get(trainables, path).shape
        is_transposed = dtype == "float8_e4m3fn" and "router" not in path
        assert leaf.shape == (*stack, *((outputs, inputs) if is_transposed else (inputs, outputs)))
    assert {str(leaf.dtype) for path, leaf in kernels.items() if "router" not in path} == {dtype}
    assert mlax.get(codes, "blocks/stacked/attend/layer/query/scale").shape == (2, 16)
    assert mlax.get(codes, "experts/experts/stacked/linear_0/scale").shape == (2, 24)
    assert mlax.get(codes, "embed/table") is mlax.get(trainables, "embed/table")
    want, found = (jax.jit(each.fwd)(tokens, given)[0] for each, given in ((model, trainables), (small, codes)))
    assert 0 < rms(found - want) / rms(want) < 2 * ERRORS[dtype]  # the errors of several layers add up
    wanted, made = (jax.tree.map(jnp.shape, tree) for tree in (codes, jax.eval_shape(small.init, RNG, tokens)[0]))
    assert wanted == made


def test_patterns_choose_the_linears(decoder):
    model, trainables, _ = decoder
    small, codes = nn.quantize(model, trainables, "int8", ("**", "!experts/**"))
    assert isinstance(mlax.get(small, "blocks/stacked/attend/layer/out"), nn.QuantizedLinear)
    assert mlax.get(small, "experts") == mlax.get(model, "experts") and codes["experts"] == trainables["experts"]
    with pytest.raises(KeyError, match="'blocks/attend/query' matches nothing; did you mean"):
        nn.quantize(model, trainables, "int8", "blocks/attend/query")


def test_a_tied_kernel_stays_as_it_is():
    layers = mlax.Series(up=nn.Linear(8), down=nn.Linear(8), out=nn.Linear(8))
    model = mlax.Tied(layers, mlax.Tie("down/kernel", to="up/kernel"))
    trainables, _ = model.init(RNG, normal(2, 8))
    small, codes = nn.quantize(model, trainables)
    kinds = {str(leaf.dtype) for path, leaf in mlax.core.flatten_paths(codes).items() if "out" not in path}
    assert kinds == {"float32"} and codes["out"]["kernel"].dtype == jnp.int8
    assert small.fwd(normal(2, 8), codes)[0].shape == (2, 8)


@quantized
def test_mixed_precision_casts_neither_codes_nor_the_value_of_scales(dtype):
    x = normal(4, 64)
    model, trainables = nn.quantize(nn.MLP((32, 8)), nn.MLP((32, 8)).init(RNG, x)[0], dtype)
    found, _ = dtypes.mixed_bfloat16(model).fwd(x, trainables)
    want, _ = model.fwd(x.astype(jnp.bfloat16), jax.tree.map(lambda leaf: dtypes.cast(leaf, "bfloat16"), trainables))
    np.testing.assert_array_equal(found, want.astype(jnp.float32))
    full, _ = model.fwd(x, trainables)
    assert rms(found - full) < ERRORS[dtype] * rms(full)


@quantized
def test_a_quantized_model_is_exported_with_a_symbolic_batch_size(dtype):
    x = normal(3, 5, 16)
    model, trainables = nn.quantize(nn.MLP((32, 8)), nn.MLP((32, 8)).init(RNG, x)[0], dtype)
    with jax.numpy_rank_promotion("raise"):
        function = jax.jit(lambda trainables, x: model.fwd(x, trainables)[0])
        (b,) = export.symbolic_shape("b")
        exported = export.export(function)(trainables, jax.ShapeDtypeStruct((b, 5, 16), "float32"))
    np.testing.assert_allclose(exported.call(trainables, x), function(trainables, x), rtol=1e-5, atol=1e-6)


def test_a_float8_kernel_is_multiplied_as_it_is_stored_and_not_transposed():
    layer, x = nn.QuantizedLinear(nn.Linear(24), "float8_e4m3fn"), normal(3, 48, dtype="bfloat16")
    trainables, _ = layer.init(RNG, x)
    text = str(jax.make_jaxpr(layer.fwd)(x, trainables))
    assert "f8_e4m3fn[24,48]" in text and "[48,24]" not in text


@quantized
def test_tensor_parallelism_shards_the_same_features_of_a_quantized_model(decoder, dtype):
    model, trainables, tokens = decoder
    small, _ = nn.quantize(model, trainables, dtype)

    def spec(of, path):
        shardings, _ = place.tensor(of, tokens, 2).variable_shardings(of, tokens)
        return mlax.get(shardings, path).spec

    block, experts = "blocks/stacked/attend/layer", "experts/experts/stacked"
    for name in (f"{block}/query", f"{block}/out", f"{experts}/linear_0", f"{experts}/linear_1"):
        *stack, inputs, outputs = spec(model, f"{name}/kernel")
        assert {inputs, outputs} == {None, "model"}
        wanted = (inputs, outputs) if dtype == "int8" else (outputs, inputs)
        assert tuple(spec(small, f"{name}/kernel")) == (*stack, *wanted)
        assert spec(small, f"{name}/bias") == spec(model, f"{name}/bias")
    assert spec(small, f"{block}/query/scale") == P(None, "model") and "model" not in spec(small, f"{block}/out/scale")


@quantized
def test_a_quantized_linear_takes_inputs_and_kernels_that_are_sharded_over_a_mesh(dtype):
    layer, x = nn.QuantizedLinear(nn.Linear(8), dtype), normal(4, 3, 16)
    trainables, _ = layer.init(RNG, x)
    want, _ = layer.fwd(x, trainables)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            x = jax.device_put(x, NamedSharding(mesh, P("data")))
            found, _ = jax.jit(layer.fwd)(x, jax.device_put(trainables, NamedSharding(mesh, P())))
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_input_is_that_of_the_dequantized_linear():
    linear, x = nn.Linear(8), normal(4, 16)
    layer = nn.QuantizedLinear(linear, "int8")
    trainables, _ = layer.init(RNG, x)
    plain = {"kernel": ops.dequantize(trainables["kernel"], trainables["scale"], -2), "bias": trainables["bias"]}
    found, want = (
        jax.grad(lambda x, each=each, given=given: (each.fwd(x, given)[0] ** 2).sum())(x)
        for each, given in ((layer, trainables), (linear, plain))
    )
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_float8_leaves_the_declared_dtype_only_in_its_own_product():
    model, x = nn.MLP((32, 8)), normal(4, 16, dtype="bfloat16")
    model, trainables = nn.quantize(model, model.init(RNG, x)[0], "float8_e4m3fn")
    violations = dtypes.audit(model.fwd, x, trainables, dtype="bfloat16")
    assert {each.path for each in violations} == {"linear_0", "linear_1"}
    found = {name for each in violations for name in (*each.inputs, *each.outputs)}
    assert found == {"bfloat16", "float8_e4m3fn", "float32"}


MLP = nn.MLP((8,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.quantize(MLP, MLP.init(RNG, normal(2, 4))[0], "int4"), "must be one of int8, float8_e4m3fn"),
        (lambda: nn.quantize(nn.LayerNorm(), {"scale": jnp.ones(3)}), "there is no Linear with a kernel in LayerNorm"),
        (lambda: nn.quantize(*nn.quantize(MLP, MLP.init(RNG, normal(2, 4))[0])), "is quantized already"),
        (lambda: nn.QuantizedLinear(nn.Conv(3, 3), "int8"), "is not a Linear"),
        (
            lambda: nn.quantize(MLP, MLP.init(RNG, normal(2, 4))[0])[0].fwd(
                normal(2, 4), MLP.init(RNG, normal(2, 4))[0]
            ),
            "the kernel is float32, but must be int8; quantize the weights together with the model",
        ),
        (
            lambda: nn.quantize(mlax.wrap(MLP, nn.Linear, lambda layer: nn.LoRA(layer, 2)), {"linear_0": {}}),
            "linear_0 has a LoRA; merge it first",
        ),
    ],
)
def test_what_cannot_be_quantized_is_an_error_that_says_what_to_do(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
