"""Blocks that compute one token with kernels of their own, interpreted here, beside the blocks themselves."""

import contextlib
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import _gpu, dtypes, nn, ops, zoo
from mlax.core import Chain, find_layers
from mlax.zoo import (
    DecoderBlock,
    DecoderStack,
    PaddedEmbed,
    choose_fusion,
    find_obstacle,
    init_state,
    prepare_decoder,
)

MODEL = dtypes.mixed_bfloat16(zoo.GPT2(vocabulary=50, positions=80, width=64, depth=1, heads=2))
DEEP = dtypes.mixed_bfloat16(zoo.GPT2(vocabulary=50, positions=80, width=64, depth=2, heads=2))
ROWS = 64  # whose heads are as many programs as kernels for several rows need


def trainables_of(model: Any) -> Any:
    trainables, _ = model.init(jax.random.key(0), jnp.ones((1, 4), "int32"))
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 2 else leaf, trainables)


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


def widen(*arrays: Any) -> Any:
    return [array.astype(jnp.float32) for array in arrays]


def test_a_fused_linear_is_norm_product_gelu_and_residual():
    x, kernel, bias, scale, shift = normal(0, 1, 192), normal(1, 96, 192) / 16, normal(2, 96), *normal(3, 2, 192)
    residual = normal(4, 1, 96)
    y = _gpu.fused_linear(x, kernel, bias, norm=(scale, shift), residual=residual, gelu=True, interpret=True)
    plain = _gpu.fused_linear(x, kernel, bias, interpret=True)
    x, kernel, bias, scale, shift, residual = widen(x, kernel, bias, scale, shift, residual)
    reference = residual + jax.nn.gelu(ops.linear(ops.layer_norm(x, scale, shift), kernel.T, bias))
    np.testing.assert_allclose(y.astype(jnp.float32), reference, rtol=0.01, atol=0.03)
    np.testing.assert_allclose(plain.astype(jnp.float32), ops.linear(x, kernel.T, bias), rtol=0.01, atol=0.03)


@pytest.mark.parametrize("width", [64, 96])  # a power of two, and one that is not
def test_sum_and_norm_adds_partial_sums_and_a_bias_and_normalizes(width):
    x, scale, shift, bias = normal(0, 3, width), *normal(1, 2, width), normal(2, width)
    partial = jax.random.normal(jax.random.key(3), (4, 3, width))
    total, y = _gpu.sum_and_norm(x, scale, shift, partial, bias, interpret=True)
    reference = x.astype(jnp.float32) + partial.sum(0) + bias.astype(jnp.float32)
    np.testing.assert_array_equal(total, reference.astype(jnp.bfloat16))
    normed = ops.layer_norm(*widen(total, scale, shift))
    np.testing.assert_allclose(y.astype(jnp.float32), normed, rtol=0.01, atol=0.01)
    same, y = _gpu.sum_and_norm(total, scale, shift, interpret=True)
    np.testing.assert_array_equal(same, total)
    np.testing.assert_allclose(y.astype(jnp.float32), normed, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(("rows", "splits"), [(64, 1), (64, 3), (48, 1), (16, 2)])
def test_a_product_of_rows_has_a_bias_and_gelu_or_is_split_along_k(rows, splits):
    x, kernel, bias = normal(0, rows, 192), normal(1, 192, 96) / 16, normal(2, 96)
    y = _gpu.rows_linear(x, kernel, bias if splits == 1 else None, splits=splits, gelu=splits == 1, interpret=True)
    product = x.astype(jnp.float32) @ kernel.astype(jnp.float32)
    if splits == 1:
        reference = jax.nn.gelu(product + bias.astype(jnp.float32))
        np.testing.assert_allclose(y.astype(jnp.float32), reference, rtol=0.01, atol=0.01)
    else:
        assert y.shape == (splits, rows, 96) and y.dtype == jnp.float32
        np.testing.assert_allclose(y.sum(0), product, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="adds the bias and applies GELU"):
            _gpu.rows_linear(x, kernel, bias, splits=splits)


def test_products_of_few_rows_are_split_along_k_to_fill_a_gpu():
    shapes = {(768, 2304): 2, (768, 768): 4, (768, 3072): 1, (3072, 768): 4, (64, 64): 1}
    assert {shape: _gpu.fastest_split(64, *shape) for shape in shapes} == shapes
    assert _gpu.fastest_split(512, 768, 768) == 1


def test_decode_attention_reduces_the_partial_sums_of_a_product():
    qkv, keys, values, bias = normal(0, 3, 96), *normal(1, 2, 3, 2, 64, 16), normal(2, 96)
    attend = functools.partial(_gpu.decode_attention, heads=2, scale=0.25, interpret=True)
    count = jnp.array([5, 0, 63], "int32")
    partial = jnp.stack([qkv.astype(jnp.float32) / 4, qkv.astype(jnp.float32) * 3 / 4])
    for result, reference in zip(
        attend(partial, keys, values, count, bias), attend(qkv + bias, keys, values, count), strict=True
    ):
        np.testing.assert_array_equal(result, reference)


@pytest.mark.parametrize(("heads", "groups", "count"), [(4, 4, [0, 100, 70]), (4, 2, [65])])
def test_decode_attention_is_attention_to_the_filled_slots(heads, groups, count):
    b, slots, width = 3, 128, 16
    qkv, keys, values = normal(0, b, (heads + 2 * groups) * width), *normal(1, 2, b, groups, slots, width)
    counts = jnp.array(count, "int32")
    attend = functools.partial(_gpu.decode_attention, heads=heads, scale=0.25, interpret=True)
    y, new_keys, new_values = attend(qkv, keys, values, counts)
    q, k, v = jnp.split(qkv.reshape(b, -1, width), [heads, heads + groups], axis=1)
    counts = jnp.broadcast_to(counts, b)
    write = jax.vmap(lambda array, new, slot: array.at[:, slot].set(new))
    keys, values = write(keys, k, counts), write(values, v, counts)
    np.testing.assert_array_equal(new_keys, keys)
    np.testing.assert_array_equal(new_values, values)
    q, k, v = widen(q[:, None], keys.swapaxes(1, 2), values.swapaxes(1, 2))
    positions = (counts[:, None], jnp.broadcast_to(jnp.arange(slots)[None], (b, slots)))
    reference = ops.attention(q, k, v, causal=True, positions=positions, scale=0.25).reshape(b, -1)
    np.testing.assert_allclose(y.astype(jnp.float32), reference, rtol=0.01, atol=0.01)


def test_a_token_without_a_slot_gives_nan():
    keys = normal(0, 2, 1, 64, 16)
    y, _, values = _gpu.decode_attention(
        normal(1, 2, 48), keys, keys, jnp.array([64, 63], "int32"), heads=1, scale=1.0, interpret=True
    )
    assert jnp.isnan(y[0]).all()
    np.testing.assert_array_equal(values[0], keys[0])  # and destroys no other token
    assert not jnp.isnan(y[1]).any()


def count(state: Any) -> Any:
    return state["blocks"]["layers"]["0"]["attend"]["position"]["count"]


@pytest.mark.parametrize("length", [None, 0, 1])
def test_a_decoder_block_computes_a_token_as_the_block_does(length):
    trainables, prompts = trainables_of(MODEL), jnp.array([[1, 2, 3]])
    token = prompts[:, :1] if length is None else (prompts[:, :1], jnp.array([length]))
    results = []
    for fuse in ("projections", "interpreted"):
        decoder, weights = prepare_decoder(MODEL, 70, trainables, rows=1, fuse=fuse)
        assert bool(find_layers(decoder, DecoderBlock)) == (fuse == "interpreted")
        fwd = jax.jit(functools.partial(decoder.fwd, inference_mode=True))
        _, state = fwd(prompts, weights, init_state(decoder, prompts))
        results.append(fwd(token, weights, state))
    (y, state), (fused_y, fused_state) = results
    if length == 0:  # the output of padding has no meaning, and its slot is written again by the next token
        np.testing.assert_array_equal(count(fused_state), count(state))
        return
    np.testing.assert_allclose(fused_y, y, atol=0.01)
    assert jax.tree.structure(fused_state) == jax.tree.structure(state)
    for leaf, other in zip(jax.tree.leaves(fused_state), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(leaf.astype(jnp.float32), other.astype(jnp.float32), atol=0.02)


def test_a_decoder_stack_computes_a_token_of_many_rows_as_the_blocks_do():
    trainables, prompts = trainables_of(DEEP), jax.random.randint(jax.random.key(1), (ROWS, 3), 0, 50, "int32")
    is_token = jnp.arange(ROWS) % 2 > 0  # rows of length 0 do not advance
    token = (prompts[:, :1], is_token.astype(jnp.int32))
    results = []
    for fuse in ("projections", "interpreted"):
        decoder, weights = prepare_decoder(DEEP, 70, trainables, rows=ROWS, fuse=fuse)
        assert bool(find_layers(decoder, DecoderStack)) == (fuse == "interpreted")
        fwd = jax.jit(functools.partial(decoder.fwd, inference_mode=True))
        _, state = fwd(prompts, weights, init_state(decoder, prompts))
        results.append(fwd(token, weights, state))
    (y, state), (fused_y, fused_state) = results
    np.testing.assert_array_equal(count(fused_state), count(state))
    np.testing.assert_allclose(fused_y[is_token], y[is_token], atol=0.01)
    assert jax.tree.structure(fused_state) == jax.tree.structure(state)
    for leaf, other in zip(jax.tree.leaves(fused_state), jax.tree.leaves(state), strict=True):
        leaf, other = (each[is_token] if each.ndim > 1 else each for each in (leaf, other))
        np.testing.assert_allclose(leaf.astype(jnp.float32), other.astype(jnp.float32), atol=0.03)


def test_a_block_is_seven_kernels_with_many_rows_and_five_with_one():
    for rows, number in ((ROWS, 7), (1, 5)):
        decoder, weights = prepare_decoder(MODEL, 64, trainables_of(MODEL), rows=rows, fuse="interpreted")
        chain = dict(find_layers(decoder, Chain if rows == 1 else DecoderStack))["blocks"]
        state = init_state(decoder, jnp.ones((rows, 1), "int32"))["blocks"]
        fwd = functools.partial(chain.fwd, inference_mode=True)
        text = str(jax.make_jaxpr(fwd)(jnp.ones((rows, 1, 64), jnp.bfloat16), weights["blocks"], state))
        assert text.count("pallas_call[") == number


@pytest.mark.parametrize("rows", [1, ROWS])
def test_generation_with_kernels_gives_the_tokens_of_generation_without(rows):
    prompts = jax.random.randint(jax.random.key(1), (rows, 3), 0, 50, "int32")
    rest = (trainables_of(MODEL), None, prompts, None, (), {}, np.zeros(0, np.int32), None)
    settings = zoo.Settings(MODEL, 6, zoo.Greedy(), "right", 0, False, "projections")
    tokens = zoo.generate_tokens(settings, *rest).tokens
    settings = dataclasses.replace(settings, fuse="interpreted")
    assert "pallas_call" in str(jax.make_jaxpr(zoo.generate_tokens, static_argnums=0)(settings, *rest))
    is_equal = (zoo.generate_tokens(settings, *rest).tokens == tokens).all(axis=1)
    assert is_equal.mean() > 0.95  # in bfloat16 a row of 64 has two logits as likely as each other now and then


def test_the_padding_of_a_table_is_neither_a_token_nor_a_logit():
    embed = nn.Embed(50, 8)
    padded, x = PaddedEmbed(embed), jnp.ones((2, 8))
    trainables, _ = padded.init(jax.random.key(0), jnp.zeros(2, "int32"))
    own = {"table": trainables["table"][:50]}
    assert trainables["table"].shape == (128, 8)
    np.testing.assert_array_equal(padded.fwd(x, trainables)[0], embed.fwd(x, own)[0])
    tokens = jnp.array([3, 50, 127, -1])
    np.testing.assert_array_equal(padded.fwd(tokens, trainables)[0], embed.fwd(tokens, own)[0])


def test_what_the_kernels_cannot_compute_is_refused_by_name():
    decoder, _ = prepare_decoder(MODEL, 64, trainables_of(MODEL), rows=1, fuse="kernels")
    found = dict(find_layers(decoder, DecoderBlock))["blocks/layers/0"]
    block: Any = found.layer
    assert find_obstacle(block, 1) is None
    assert find_obstacle(Chain((block, block)), ROWS) is None
    assert "not Linear" in str(find_obstacle(nn.Linear(4), 1))
    assert "not Linear" in str(find_obstacle(Chain((nn.Linear(4),)), ROWS))
    assert "64 or more, not 48" in str(find_obstacle(block, 48))
    assert "multiple of 16 up to 256, not 65" in str(find_obstacle(block, ROWS + 1))
    attend: Any = dict(find_layers(block, nn.MultiHeadAttention))["attend"]
    assert "softcap=2.0" in str(
        find_obstacle(block.with_parts({"attend": dataclasses.replace(attend, softcap=2.0)}), 1)
    )
    assert "at most 768, not 1024" in str(find_obstacle(dataclasses.replace(block, width=1024, heads=8), 1))
    assert "one row" in str(found.find_refusal(jnp.zeros((2, 1, 64)), None, None))
    assert "not float32" in str(found.find_refusal(jnp.zeros((1, 1, 64)), None, None))


@pytest.mark.parametrize("rows", [1, ROWS])
def test_what_fails_to_compile_is_left_to_the_block(rows):
    decoder, weights = prepare_decoder(MODEL, 64, trainables_of(MODEL), rows=rows, fuse="kernels")
    x = jnp.ones((rows, 1), "int32")
    fwd = jax.jit(functools.partial(decoder.fwd, inference_mode=True))
    logits, _ = fwd(x, weights, init_state(decoder, x))  # a CPU cannot compile the kernels
    assert jnp.isfinite(logits).all()


def test_kernels_are_for_weights_on_one_gpu_of_hopper():
    for platform, capability, wanted in (
        ("gpu", "9.0", True),
        ("gpu", "8.0", False),
        ("gpu", "10.0", False),
        ("cpu", "", False),
    ):
        assert _gpu.is_hopper(types.SimpleNamespace(platform=platform, compute_capability=capability)) is wanted
    assert not _gpu.is_hopper("cpu")
    assert choose_fusion({"kernel": jnp.ones(2)}) == "projections"
    assert jax.jit(lambda x: choose_fusion(x) == "nothing")(jnp.ones(2))


def test_kernels_are_chosen_for_one_row_and_for_many(monkeypatch):
    monkeypatch.setattr(_gpu, "is_hopper", lambda device: True)
    trainables = trainables_of(MODEL)
    assert choose_fusion(trainables) == "kernels"
    assert "one row, or for a multiple of 16 up to 256, not 2" in zoo.decoding_backend(MODEL, trainables, batch=2)


def describe(*shape: int, dtype: Any = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


D = 192  # a width that is not a power of two, as that of GPT-2
CACHE = describe(3, 3, 96, 64)
KERNELS = {
    "fused_linear": (
        functools.partial(_gpu.fused_linear, gelu=True),
        (describe(1, D), describe(64, D), describe(64)),
        {"norm": (describe(D), describe(D)), "residual": describe(1, 64)},
    ),
    "rows_linear": (
        functools.partial(_gpu.rows_linear, gelu=True),
        (describe(16, D), describe(D, 64), describe(64)),
        {},
    ),
    "sum_and_norm": (
        _gpu.sum_and_norm,
        (describe(3, D), describe(D), describe(D), describe(2, 3, D, dtype="float32"), describe(D)),
        {},
    ),
    "decode_attention": (
        functools.partial(_gpu.decode_attention, heads=3, scale=0.1),
        (describe(2, 3, 3 * D, dtype="float32"), CACHE, CACHE, describe(3, dtype="int32"), describe(3 * D)),
        {},
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_lowered_for_a_gpu_without_a_warning(name):
    kernel, arrays, named = KERNELS[name]
    with on_hopper():
        text = jax.jit(kernel).trace(*arrays, **named).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text


def on_hopper() -> Any:
    """A context in which JAX from 0.11 on lowers kernels for a GPU that is not there."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
