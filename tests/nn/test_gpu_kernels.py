"""Kernels of Pallas: lowered for a GPU and interpreted on the CPU, against the plain forms of the same operations."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import mlax
from mlax import dtypes, nn, ops, zoo
from mlax._jax import cuda_branch
from tests.arrays import normal
from tests.gpu import GPU, ROWS, assume_hopper, count_kernels, lower_for_cuda, needs_mosaic
from tests.gpu import interpret_kernels as interpret

NORMS = inspect.getmodule(inspect.unwrap(ops.layer_norm))


def test_without_a_gpu_xla_computes_norms_and_losses():
    x = jax.ShapeDtypeStruct((2048, 256), jnp.bfloat16)
    answer = ops.kernel_backend(x, accum_dtype="float32")
    assert answer == "xla: there is no NVIDIA GPU of compute capability 9.0 or later"


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "dtype", "accum_dtype", "answer"),
    [
        ((4, 512, 256), "bfloat16", "float32", "mosaic: "),
        ((4, 512, 256), "bfloat16", None, "xla: kernels are for bfloat16 with accum_dtype='float32'"),
        ((4, 512, 256), "float32", "float32", "xla: kernels are for bfloat16"),
        ((4, 512, 200), "bfloat16", "float32", "xla: kernels are for rows of a multiple of 128"),
        ((8, 256), "bfloat16", "float32", "xla: kernels are for 1024 rows"),
    ],
)
def test_the_backend_of_a_gpu_is_chosen_by_shape_and_dtype(monkeypatch, shape, dtype, accum_dtype, answer):
    assume_hopper(monkeypatch)
    assert ops.kernel_backend(jax.ShapeDtypeStruct(shape, dtype), accum_dtype=accum_dtype).startswith(answer)


def test_under_vmap_and_on_a_cpu_the_plain_form_is_computed():
    def kernel(x: Any) -> Any:
        raise AssertionError("there is no GPU")

    run = functools.partial(GPU.on_gpu, kernel, lambda x: 2 * x)
    np.testing.assert_array_equal(run(np.ones(3)), 2 * np.ones(3))
    np.testing.assert_array_equal(jax.vmap(run)(np.ones((2, 3))), 2 * np.ones((2, 3)))


@needs_mosaic
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_norms_and_their_gradients_are_one_kernel_each(monkeypatch, name):
    assume_hopper(monkeypatch)
    norm, number = (ops.layer_norm, 3) if name == "layer" else (ops.rms_norm, 2)
    x, weight = jax.ShapeDtypeStruct((2, 512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.bfloat16)

    def gradients(*primals: Any) -> Any:
        y, pull_back = jax.vjp(lambda *primals: norm(*primals, accum_dtype="float32"), *primals)
        return pull_back(y)

    for function, kernels in ((lambda *primals: norm(*primals, accum_dtype="float32"), 1), (gradients, 2)):
        assert count_kernels(function, *[x, weight, weight][:number]) == kernels


@needs_mosaic
def test_no_kernel_takes_the_sign_of_a_number_for_which_ptxas_would_run_while_it_is_lowered(monkeypatch):
    assume_hopper(monkeypatch)
    x, weight = jax.ShapeDtypeStruct((2, 512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    norm = jax.make_jaxpr(lambda *primals: ops.layer_norm(*primals, accum_dtype="float32"))(x, weight, weight)
    assert " rsqrt " in str(norm) and " div " in str(norm) and " sign " not in str(norm)


@needs_mosaic
@pytest.mark.parametrize("width", [128, 384, 1024])
@pytest.mark.parametrize("centered", [True, False])
def test_the_norm_kernels_compute_the_plain_norms(monkeypatch, width, centered):
    interpret_kernels(monkeypatch)
    x, dy = (draw(seed, 7, width) for seed in range(2))
    scale, shift = draw(2, width), draw(3, width) if centered else None
    y, mean, factor = ROWS.norm_kernel(x, scale, shift, eps=1e-5, centered=centered)
    primals = [each.astype(np.float32) for each in (x, scale, shift) if each is not None]
    norm = functools.partial(ops.layer_norm if centered else ops.rms_norm, eps=1e-5)
    expected, pull_back = jax.vjp(norm, *primals)
    np.testing.assert_allclose(y.astype(np.float32), expected, rtol=2**-8, atol=2**-8)
    dx, sums = ROWS.norm_gradient_kernel(x, mean, factor, scale, dy, has_shift=centered)
    for gradient, exact in zip((dx, *sums), pull_back(dy.astype(np.float32)), strict=True):
        np.testing.assert_allclose(gradient.astype(np.float32), exact, rtol=2**-7, atol=2**-7)


@needs_mosaic
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_the_gradient_kernel_of_a_norm_adds_the_cotangent_around_it_and_sums_it(monkeypatch, name):
    interpret_kernels(monkeypatch)
    x, dy, stream_grad, scale, bias = draw(0, 7, 384), draw(1, 7, 384), draw(2, 7, 384), draw(3, 384), draw(4, 384)
    primals = (x, scale, bias, bias) if name == "layer" else (x, scale, bias)
    norm = ops.residual_layer_norm if name == "layer" else ops.residual_rms_norm
    _, pull_back = jax.vjp(norm, *[each.astype(np.float32) for each in primals])
    exact = pull_back((stream_grad.astype(np.float32), dy.astype(np.float32)))
    _, mean, factor = ROWS.norm_kernel(x, scale, None, eps=1e-5, centered=name == "layer")
    dx, sums = ROWS.norm_gradient_kernel(x, mean, factor, scale, dy, stream_grad, has_shift=name == "layer")
    for gradient, wanted in zip((dx, *sums), exact, strict=True):
        np.testing.assert_allclose(gradient.astype(np.float32), wanted, rtol=2**-7, atol=2**-6)


@needs_mosaic
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_a_residual_norm_has_every_derivative_of_its_plain_form(name):
    rule = NORMS._residual_norm_rule(name == "layer", 1e-5, jnp.dtype(np.float32))
    x, scale, shift, bias = (jax.random.normal(jax.random.key(seed), (4, 128)[seed > 0 :]) for seed in range(4))
    primals = (x, scale, shift if name == "layer" else None, bias)

    def plain(primals: Any) -> Any:
        x, scale, shift, bias = primals
        y = ops.rms_norm(x, scale, eps=1e-5) if shift is None else ops.layer_norm(x, scale, shift)
        return x + bias, y

    def derivatives(function: Any) -> Any:
        def loss(primals: Any) -> Any:
            stream, y = function(primals)
            return (jnp.sin(stream) * jnp.cos(y)).sum()

        gradient = jax.grad(loss)
        bent = jax.grad(lambda primals: sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(gradient(primals))))
        by_rows = jax.vmap(gradient, in_axes=((0, None, None, None),))
        return gradient(primals), jax.jvp(loss, (primals,), (primals,))[1], bent(primals), by_rows(primals)

    found, expected = derivatives(rule), derivatives(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


@needs_mosaic
def test_a_scanned_gpt2_on_a_gpu_which_normalizes_again_has_the_second_derivatives_of_an_unrolled_one(monkeypatch):
    assume_hopper(monkeypatch)
    monkeypatch.setitem(mlax.Repeat.apply_with_keys.__globals__, "prefers_layer_scan", lambda *trees: True)
    tokens = jax.random.randint(jax.random.key(0), (8, 129), 0, 64)

    def second_derivatives(mode: Any) -> Any:
        model = zoo.GPT2(vocabulary=64, positions=128, width=128, depth=2, heads=2)
        model = mlax.override(mlax.override(model, nn.MultiHeadAttention, implementation="xla"), mlax.Repeat, mode=mode)
        model = dtypes.mixed_bfloat16(model)
        trainables, _ = model.init(jax.random.key(1), tokens[:, :-1])
        direction = jax.tree.map(lambda leaf: 0.02 * jax.random.normal(jax.random.key(2), leaf.shape), trainables)

        def gradient(trainables: Any) -> Any:
            inputs = tokens[:, :-1], None, tokens[:, 1:]
            return jax.grad(lambda trainables: model.fwd(inputs, trainables)[0].mean())(trainables)

        _, change = jax.jit(lambda *args: jax.jvp(gradient, args[:1], args[1:]))(trainables, direction)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(change)])

    found, expected = second_derivatives("scan"), second_derivatives("unroll")
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 0.02  # of bfloat16; 0.19 if what is computed again has no derivative


@needs_mosaic
def test_a_block_of_gpt2_has_one_kernel_for_each_norm_and_its_gradient_and_sums_one_bias_apart(
    monkeypatch,
):
    assume_hopper(monkeypatch)
    block = dtypes.mixed_bfloat16(zoo.GPT2(width=128, heads=2, depth=1, vocabulary=64, positions=512).parts()["blocks"])
    x = jax.ShapeDtypeStruct((2, 512, 128), jnp.bfloat16)
    weights = jax.eval_shape(block.init, jax.random.key(0), x)[0]

    def gradient(weights: Any, x: Any) -> Any:
        return jax.grad(lambda weights: block.fwd(x, weights)[0].astype(np.float32).sum())(weights)

    text = lower_for_cuda(gradient, weights, x)
    assert text.count("custom_call @mosaic_gpu") == 6  # of two norms and a GELU
    bias_sums = [line for line in text.splitlines() if "stablehlo.reduce" in line and "x128xbf16>" in line]
    assert len(bias_sums) <= 1, bias_sums  # of the queries


@needs_mosaic
@pytest.mark.parametrize("classes", [1024, 1100, 2257])
def test_the_loss_kernel_leaves_the_label_and_the_padding_out_of_the_sum(monkeypatch, classes):
    interpret_kernels(monkeypatch)
    logits, labels = 8 * draw(0, 4, -(-classes // 128) * 128), jnp.asarray([0, 7, classes - 1, classes])
    top, others = ROWS.softmax_statistics_kernel(logits, labels, classes=classes)
    valid = np.asarray(logits[:, :classes], np.float64)
    np.testing.assert_array_equal(top, valid.max(1))
    is_other = np.arange(classes) != np.asarray(labels)[:, None]
    np.testing.assert_allclose(others, (is_other * np.exp(valid - valid.max(1, keepdims=True))).sum(1), rtol=1e-5)


@needs_mosaic
def test_the_loss_kernel_takes_logits_of_any_range(monkeypatch):
    interpret_kernels(monkeypatch)
    classes, labels = 2257, jnp.zeros(5, "int32")
    logits = 8 * draw(0, 5, 2304)
    logits = logits.at[0, 1500].set(1000).at[1, 2200].set(3e38)  # far above the first chunk, in the second and the last
    logits = logits.at[2, :1024].set(-jnp.inf).at[3, 5].set(500).at[4, 1300].set(jnp.nan)
    top, others = ROWS.softmax_statistics_kernel(logits, labels, classes=classes)
    valid = np.asarray(logits[:4, :classes], np.float64)
    np.testing.assert_array_equal(top[:4], valid.max(1))
    reference = np.exp(valid[:, 1:] - valid.max(1, keepdims=True)).sum(1)
    np.testing.assert_allclose(others[:4], reference, rtol=1e-5)
    assert np.isnan(others[4])


@needs_mosaic
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_gradient_kernel_writes_the_gradient_of_the_plain_form(monkeypatch, is_masked):
    interpret_kernels(monkeypatch)
    logits, labels, classes = 4 * draw(0, 4, 1280), jnp.asarray([0, 7, 1100, 1200]), 1201
    mask = jnp.asarray([True, False, True, True]) if is_masked else None
    logits = logits.at[1, 3].set(jnp.nan) if is_masked else logits
    grad = jnp.asarray([1.0, 0.5, -2.0, 1e-3])

    def loss(x: Any) -> Any:
        options = {"smoothing": 0.1, "z_loss": 1e-2, "mask": mask, "accum_dtype": "float32"}
        return (grad * ops.softmax_cross_entropy(x[:, :classes], labels, **options)).sum()

    x = logits[:, :classes].astype(np.float32)
    top = x.max(1)
    log_sum = jnp.log(jnp.exp(x - top[:, None]).sum(1))
    factors = grad * (1 + 2e-2 * (top + log_sum)), grad * 0.1 / classes, grad * 0.9
    y = ROWS.softmax_gradient_kernel(logits, labels, mask, top, log_sum, factors, classes=classes)
    np.testing.assert_allclose(y.astype(np.float32), jax.grad(loss)(logits).astype(np.float32), rtol=2**-7, atol=1e-5)


@needs_mosaic
def test_the_cross_entropy_and_its_gradient_are_one_kernel_each(monkeypatch):
    assume_hopper(monkeypatch)
    x, table = jax.ShapeDtypeStruct((2, 512, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1152, 128), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    loss = functools.partial(ops.tied_cross_entropy, accum_dtype="float32")
    gradient = jax.grad(lambda x, table, labels: loss(x, table, labels).sum(), argnums=(0, 1))
    lowered = lower_for_cuda(gradient, x, table, labels)
    assert lowered.count("custom_call @mosaic_gpu") == 2
    assert lowered.count("output_operand_aliases = [#") == 1  # the gradient takes the memory of the logits


@needs_mosaic
@pytest.mark.parametrize("activation", [ops.gelu, ops.exact_gelu])
def test_the_kernels_of_bias_and_gelu_compute_the_plain_form(monkeypatch, activation):
    interpret_kernels(monkeypatch)
    x, bias, dy = draw(0, 6, 1152), draw(1, 1152), draw(2, 6, 1152)
    wide = [each.astype(np.float32) for each in (x, bias)]
    y, pull_back = jax.vjp(lambda x, bias: activation(x + bias), *wide)
    options = {"approximate": activation is ops.gelu}
    np.testing.assert_allclose(ROWS.gelu_kernel(x, bias, **options).astype(np.float32), y, rtol=2**-8, atol=2**-9)
    gradients = ROWS.gelu_gradient_kernel(x, bias, dy, **options)
    for gradient, exact in zip(gradients, pull_back(dy.astype(np.float32)), strict=True):
        np.testing.assert_allclose(gradient.astype(np.float32), exact, rtol=2**-7, atol=2**-8)


@needs_mosaic
def test_a_linear_layer_with_gelu_adds_its_bias_inside_of_the_kernel(monkeypatch):
    assume_hopper(monkeypatch)
    layer, x = nn.Linear(256, activation=ops.gelu), jax.ShapeDtypeStruct((2, 512, 128), jnp.bfloat16)
    weights = jax.eval_shape(layer.init, jax.random.key(0), x)[0]
    gradient = jax.value_and_grad(lambda weights, x: layer.fwd(x, weights)[0].astype(np.float32).sum())
    assert count_kernels(gradient, weights, x) == 2


def draw(seed: int, *shape: int) -> Any:
    return normal(*shape, seed=seed, dtype=jnp.bfloat16)


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels by the interpreter of Pallas, with few blocks."""
    interpret(monkeypatch)
    monkeypatch.setattr(ROWS, "multiprocessors", lambda: 1)
    for name in ("FORWARD_BLOCKS", "BACKWARD_BLOCKS", "GELU_BLOCKS"):
        monkeypatch.setattr(ROWS, name, 2)


@needs_mosaic
def test_a_model_with_kernels_is_exported_for_a_cpu_and_a_gpu_at_once(monkeypatch):
    model = dtypes.mixed_bfloat16(zoo.GPT2(vocabulary=301, positions=256, width=128, depth=2, heads=2))
    tokens = jnp.ones((8, 256), jnp.int32)
    trainables, state = model.init(jax.random.key(0), tokens)

    def logits(tokens: Any) -> Any:
        return model.fwd(tokens, trainables, state, inference_mode=True)[0]

    expected = logits(tokens)
    with monkeypatch.context() as on_gpu:
        assume_hopper(on_gpu)
        on_gpu.setattr(jax, "default_backend", lambda: "gpu")
        exported = export.export(jax.jit(logits), platforms=["cpu", "cuda"])(tokens)
    assert "@mosaic_gpu" in exported.mlir_module()
    y = export.deserialize(exported.serialize()).call(tokens)
    np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), rtol=0, atol=0.03)


def test_a_branch_for_cuda_alone_is_batched_and_takes_what_it_closes_over():
    def double(x: Any) -> Any:
        offset = x.sum()  # a tracer, in what jit traces
        return lax.platform_dependent(x, cuda=cuda_branch(lambda x: 2 * x + offset), default=lambda x: 2 * x + offset)

    x = normal(3, 4)
    expected = jax.vmap(lambda x: 2 * x + x.sum())(x)
    np.testing.assert_allclose(jax.jit(jax.vmap(double))(x), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(cuda_branch(lambda x: 2 * x + x.sum()))(x), expected, rtol=1e-6)


def test_a_branch_for_cuda_alone_may_hold_what_no_other_platform_can_lower():
    double = Primitive("double_on_cuda")
    double.def_abstract_eval(lambda x: x)
    mlir.register_lowering(double, mlir.lower_fun(lambda x: 2 * x, multiple_results=False), platform="cuda")

    def lower(branch: Any) -> Any:
        function = jax.jit(lambda x: lax.platform_dependent(x, cuda=branch, default=lambda x: 3 * x))
        return export.export(function, platforms=["cpu", "cuda"])(x)

    x = normal(3, 4)
    with pytest.raises(NotImplementedError, match="double_on_cuda"):
        lower(double.bind)
    np.testing.assert_array_equal(lower(cuda_branch(double.bind)).call(x), 3 * x)


def test_a_branch_for_cuda_alone_keeps_its_effects():
    seen = []

    def tell(x: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x

    jax.jit(lambda x: (cuda_branch(tell)(x), x)[1])(1.0)  # which drops what has no effect, as the result is not used
    jax.effects_barrier()
    assert seen == [1.0]
