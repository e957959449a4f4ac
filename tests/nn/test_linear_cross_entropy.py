"""The output layer fused with its loss, and heads and language models that compute it."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mlax
from mlax import dtypes, nn, ops, zoo
from tests.asserts import assert_close
from tests.gpu import assume_hopper, lower_for_cuda, needs_mosaic

HEAD = inspect.getmodule(inspect.unwrap(ops.linear_cross_entropy))
CLASSES = 133  # padded to 256 on a GPU
OPTIONS = {"smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}


@pytest.fixture(params=["cpu", "gpu"])
def form(request, monkeypatch):
    """Each form of the functions, whatever the device."""
    if request.param == "gpu":
        monkeypatch.setattr(HEAD, "is_cpu", lambda: False)
    return request.param


def make_arrays(dtype, tokens=(2, 6), width=5):
    draws = np.random.default_rng(0)
    x, kernel, bias, grad = (
        jnp.asarray(draws.normal(size=shape), dtype)
        for shape in ((*tokens, width), (width, CLASSES), (CLASSES,), tokens)
    )
    labels = jnp.asarray(draws.integers(0, CLASSES, tokens), np.int32)
    return x, kernel, bias, labels, jnp.asarray(draws.random(tokens) < 0.7), grad


def plain_loss(x, kernel, bias, labels, *, softcap=None, **options):
    logits = ops.linear(x, kernel, bias)
    return ops.softmax_cross_entropy(logits if softcap is None else ops.soft_cap(logits, softcap), labels, **options)


def fused_loss(x, kernel, bias, labels, **options):
    return ops.linear_cross_entropy(x, kernel, labels, bias=bias, **options)


def tied_loss(x, kernel, bias, labels, **options):
    return ops.tied_cross_entropy(x, kernel.T, labels, bias=bias, **options)


def losses_and_gradients(loss, arrays, grads, **options):
    """The losses, and for each of `grads` the gradients of x, kernel and bias."""

    @jax.jit
    def run(arrays, grads):
        losses, pull_back = jax.vjp(lambda *primals: loss(*primals, *arrays[3:], **options), *arrays[:3])
        return losses, [pull_back(grad) for grad in grads]

    return run(arrays, grads)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all options"])
def test_losses_and_gradients_are_those_of_the_plain_form_in_float64(form, options):
    """Whole and by chunks that do and do not divide the tokens, with equal and with different cotangents."""
    with jax.enable_x64(True):
        *arrays, mask, grad = make_arrays("float64")
        grads, options = [jnp.full_like(grad, 0.3), grad], {**options, "mask": mask} if options else {}
        wanted = losses_and_gradients(plain_loss, arrays, grads, **options)
        for loss, chunks in ((fused_loss, 1), (tied_loss, 1), (fused_loss, 4), (tied_loss, 3)):
            assert_close(losses_and_gradients(loss, arrays, grads, chunks=chunks, **options), wanted, 1e-12, 1e-12)


@pytest.mark.parametrize("chunks", [1, 3])
def test_narrow_losses_with_float32_sums_are_those_of_float32_logits_within_rounding(form, chunks):
    *arrays, _, grad = make_arrays("bfloat16", width=64)
    wide = [array.astype(np.float32) if array.dtype == jnp.bfloat16 else array for array in arrays]
    options = {"chunks": chunks, "accum_dtype": "float32"}
    losses, (found,) = losses_and_gradients(fused_loss, arrays, [grad.astype(np.float32)], **options)
    wanted_losses, (wanted,) = losses_and_gradients(plain_loss, wide, [grad.astype(np.float32)])
    assert losses.dtype == np.float32 and {array.dtype for array in found} == {jnp.dtype("bfloat16")}
    assert_close(losses, wanted_losses, 1e-2, 0.1)
    for each, reference in zip(found, wanted, strict=True):
        error = np.linalg.norm(each.astype(np.float32) - reference) / np.linalg.norm(reference)
        assert error < 0.02


def test_derivatives_in_forward_mode_and_of_second_order_are_those_of_the_plain_form(form):
    with jax.enable_x64(True):
        x, kernel, bias, labels, *_ = make_arrays("float64", (3,), 2)

        @jax.jit
        def derivatives(x):
            def of(loss):
                return jax.jacfwd(loss)(x), jax.hessian(lambda x: loss(x).sum())(x)

            fused = [functools.partial(fused_loss, chunks=chunks) for chunks in (1, 3)]
            return [of(lambda x, f=f: f(x, kernel, bias, labels, **OPTIONS)) for f in (plain_loss, *fused)]

        wanted, *found = derivatives(x)
        assert_close(found, [wanted, wanted], 1e-10, 1e-10)


def test_chunks_may_be_mapped_over_tokens_and_weights(form):
    with jax.enable_x64(True):
        x, kernel, bias, labels, *_ = make_arrays("float64", (2, 4, 3))
        kernels = jnp.stack([kernel, 2 * kernel])

        def gradients(loss):
            def total(x, kernel, labels):
                return jnp.sum(loss(x, kernel, bias, labels) * jnp.arange(4.0)[:, None])

            return jax.jit(jax.vmap(jax.value_and_grad(total, (0, 1))))(x, kernels, labels)

        assert_close(gradients(functools.partial(fused_loss, chunks=3)), gradients(plain_loss), 1e-12, 1e-12)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_rows_may_be_sharded_over_a_mesh_or_by_shard_map(form, kind, chunks):
    x, kernel, bias, labels, _, grad = make_arrays("float32", (4, 4))
    wanted = losses_and_gradients(plain_loss, (x, kernel, bias, labels), [grad])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    rows, run = PartitionSpec("data"), functools.partial(losses_and_gradients, fused_loss, chunks=chunks)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, rows)) for array in (x, labels, grad)]
        found = run((placed[0], kernel, bias, placed[1]), [placed[2]])
        assert_close(found, wanted, 1e-5, 1e-6)
    if kind == AxisType.Auto:
        specs = (rows, PartitionSpec(), PartitionSpec(), rows)
        mapped = jax.shard_map(
            lambda arrays, grad: run(arrays, [grad]),
            mesh=mesh,
            in_specs=(specs, rows),
            out_specs=(rows, [(rows, PartitionSpec(), PartitionSpec())]),
        )
        assert_close(mapped((x, kernel, bias, labels), grad), wanted, 1e-5, 1e-6)


@needs_mosaic
@pytest.mark.parametrize("chunks", [1, 2])
def test_on_a_gpu_the_loss_is_three_products_and_two_kernels(monkeypatch, chunks):
    """By chunks, they stand in the loop of the forward pass, and in that for other cotangents, which computes no x."""
    monkeypatch.setattr(HEAD, "is_cpu", lambda: False)
    assume_hopper(monkeypatch)
    shapes = ((2, 2048, 128), jnp.bfloat16), ((128, 2257), jnp.bfloat16), ((2, 2048), np.int32)
    x, kernel, labels = (jax.ShapeDtypeStruct(*each) for each in shapes)

    def mean(x, kernel, labels):
        return ops.linear_cross_entropy(x, kernel, labels, chunks=chunks, accum_dtype="float32").mean()

    text = lower_for_cuda(jax.grad(mean, (0, 1)), x, kernel, labels)
    assert text.count("custom_call @mosaic_gpu") == 2 * chunks
    assert text.count("dot_general") == 3 * chunks


def test_the_backward_pass_keeps_logits_in_their_own_dtype():
    *arrays, _, _ = make_arrays("bfloat16")
    for options in ({}, {"chunks": 2}):
        loss = functools.partial(fused_loss, accum_dtype="float32", **options)
        _, pull_back = jax.vjp(lambda *primals: loss(*primals, arrays[3]), *arrays[:3])
        logits = arrays[3].size * CLASSES
        large = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.size >= logits]
        assert [leaf.dtype for leaf in large] == ([] if options else [jnp.dtype("bfloat16")])


def test_chunks_hold_the_logits_of_one_chunk_and_take_no_gradients_unless_differentiated():
    x, kernel, labels = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4, 512, 8), "float32"), ((8, 4096), "float32"), ((4, 512), "int32"))
    )

    def total(x, kernel, labels, chunks):
        return ops.linear_cross_entropy(x, kernel, labels, chunks=chunks).mean()

    def compile(function, chunks):
        return jax.jit(functools.partial(function, chunks=chunks)).lower(x, kernel, labels).compile()

    logits = 4 * 512 * 4096 * 4
    gradient = compile(jax.grad(total, (0, 1)), 16)
    assert gradient.memory_analysis().temp_size_in_bytes < logits / 4
    assert compile(total, 16).cost_analysis()["flops"] < gradient.cost_analysis()["flops"] / 2


T5 = zoo.T5(vocabulary=50, width=8, depth=1, heads=2, head_width=4, hidden=16)
MODELS = {
    "GPT-2": zoo.GPT2(vocabulary=50, positions=8, width=8, depth=1, heads=2),
    "capped Llama": zoo.Llama(vocabulary=50, width=8, hidden=16, depth=1, heads=2, logit_softcap=3.0),
    "tied Llama": zoo.Llama(vocabulary=50, width=8, hidden=16, depth=1, heads=2, tied=True),
    "LSTM": zoo.LSTMLanguageModel(vocabulary=50, width=8, depth=1),
    "tied LSTM": zoo.LSTMLanguageModel(vocabulary=50, width=8, depth=1, tied=True),
    "T5": T5,
    "untied T5": dataclasses.replace(T5, tied=False),
}
RARELY = ("tied Llama", "LSTM", "T5", "untied T5")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in RARELY)) for name in MODELS]
)
def test_a_language_model_given_labels_returns_the_losses_of_its_logits(name):
    """Those of padding and of negative labels are 0."""
    model = MODELS[name]
    text = jnp.asarray(np.random.default_rng(0).integers(0, 50, (3, 7)), np.int32)
    tokens, labels, lengths = text[:, :-1], text[:, 1:].at[0, 2].set(-100), jnp.int32([6, 2, 4])
    inputs = (tokens, lengths, tokens, None) if "T5" in name else (tokens, lengths)
    mask = (jnp.arange(6) < lengths[:, None]) & (labels >= 0)

    @jax.jit
    def run(rng):
        trainables, _ = model.init(rng, inputs)
        return [model.fwd(each, trainables)[0] for each in (inputs, (*inputs, labels))]

    logits, losses = run(jax.random.key(0))
    assert_close(losses, ops.softmax_cross_entropy(logits, labels, mask=mask), 1e-5, 1e-5)
    assert not losses[~mask].any()


def test_losses_of_a_model_in_mixed_precision_are_float32_and_chunks_are_a_field_of_its_head():
    text = jnp.asarray(np.random.default_rng(0).integers(0, 50, (3, 9)), np.int32)
    mixed = dtypes.mixed_bfloat16(MODELS["GPT-2"])
    chunked = mlax.override(mixed, nn.CrossEntropyHead, chunks=4)
    trainables, _ = mixed.init(jax.random.key(0), text[:, :-1])

    @jax.jit
    def run(trainables):
        def mean(trainables, model):
            losses, _ = model.fwd((text[:, :-1], None, text[:, 1:]), trainables)
            return losses.mean(), losses

        return [jax.value_and_grad(mean, has_aux=True)(trainables, model) for model in (mixed, chunked)]

    ((_, losses), gradients), ((_, by_chunks), same) = run(trainables)
    assert losses.dtype == np.float32
    assert_close(by_chunks, losses, 1e-6, 1e-6)
    flat, wanted = (ravel_pytree(each)[0] for each in (same, gradients))
    assert np.linalg.norm(flat - wanted) <= 0.02 * np.linalg.norm(wanted)


def test_a_head_around_any_other_layer_computes_its_logits():
    head = nn.CrossEntropyHead(nn.LoRA(nn.Linear(5), rank=2), softcap=2.0, smoothing=0.1)
    x, labels = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), np.float32), jnp.int32([0, 4, 2])
    trainables, _ = head.init(jax.random.key(0), {"x": x, "labels": labels})
    losses, _ = head.fwd({"x": x, "labels": labels}, trainables)
    logits, _ = head.fwd(x, trainables)
    assert_close(losses, ops.softmax_cross_entropy(logits, labels, smoothing=0.1), 1e-6, 1e-6)


def test_wrong_arguments_are_errors_that_say_what_to_do():
    x, kernel, _, labels, *_ = make_arrays("float32")
    with pytest.raises(ValueError, match="chunks is 0"):
        ops.linear_cross_entropy(x, kernel, labels, chunks=0)
    with pytest.raises(TypeError, match="kernel is bfloat16"):
        ops.linear_cross_entropy(x, kernel.astype(jnp.bfloat16), labels)
    head = nn.CrossEntropyHead(nn.Linear(5))
    with pytest.raises(ValueError, match="has x, but must be an array, or a dict of x, labels"):
        head.init(jax.random.key(0), {"x": x})


@pytest.mark.parametrize("fields", [{"chunks": 0}, {"smoothing": 2.0}])
def test_a_head_refuses_fields_out_of_range_when_it_is_built(fields):
    with pytest.raises(
        ValueError, match=f"CrossEntropyHead: {next(iter(fields))} is {next(iter(fields.values()))}, but"
    ):
        nn.CrossEntropyHead(nn.Linear(7), **fields)
