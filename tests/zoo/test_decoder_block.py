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

from mlax import dtypes, nn, ops, zoo
from mlax.core import find_layers
from mlax.zoo import DecoderBlock, choose_fusion, find_obstacle, has_kernels, init_state, prepare_decoder

MODEL = dtypes.mixed_bfloat16(zoo.GPT2(vocabulary=50, positions=80, width=64, depth=1, heads=2))


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
    y = ops.fused_linear(x, kernel, bias, norm=(scale, shift), residual=residual, gelu=True, interpret=True)
    plain = ops.fused_linear(x, kernel, bias, interpret=True)
    x, kernel, bias, scale, shift, residual = widen(x, kernel, bias, scale, shift, residual)
    reference = residual + jax.nn.gelu(ops.linear(ops.layer_norm(x, scale, shift), kernel.T, bias))
    np.testing.assert_allclose(y.astype(jnp.float32), reference, rtol=0.01, atol=0.03)
    np.testing.assert_allclose(plain.astype(jnp.float32), ops.linear(x, kernel.T, bias), rtol=0.01, atol=0.03)


@pytest.mark.parametrize(("heads", "groups", "count"), [(4, 4, [0, 100, 70]), (4, 2, [65])])
def test_decode_attention_is_attention_to_the_filled_slots(heads, groups, count):
    b, slots, width = 3, 128, 16
    qkv, keys, values = normal(0, b, (heads + 2 * groups) * width), *normal(1, 2, b, groups, slots, width)
    counts = jnp.array(count, "int32")
    attend = functools.partial(ops.decode_attention, heads=heads, scale=0.25, interpret=True)
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
    y, _, values = ops.decode_attention(
        normal(1, 2, 48), keys, keys, jnp.array([64, 63], "int32"), heads=1, scale=1.0, interpret=True
    )
    assert jnp.isnan(y[0]).all()
    assert jnp.isnan(values[0, 0, -1]).all()
    assert not jnp.isnan(y[1]).any()


def count(state: Any) -> Any:
    return state["blocks"]["layers"]["0"]["attend"]["position"]["count"]


@pytest.mark.parametrize("length", [None, 0, 1])
def test_a_decoder_block_computes_a_token_as_the_block_does(length):
    trainables, prompts = trainables_of(MODEL), jnp.array([[1, 2, 3]])
    token = prompts[:, :1] if length is None else (prompts[:, :1], jnp.array([length]))
    results = []
    for fuse in ("projections", "interpreted"):
        decoder, weights = prepare_decoder(MODEL, 70, trainables, fuse=fuse)
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


def test_generation_with_kernels_gives_the_tokens_of_generation_without():
    rest = (trainables_of(MODEL), None, jnp.array([[1, 2, 3]]), None, (), {}, np.zeros(0, np.int32), None)
    settings = zoo.Settings(MODEL, 6, zoo.Greedy(), "right", 0, False, "projections")
    tokens = zoo.generate_tokens(settings, *rest).tokens
    settings = dataclasses.replace(settings, fuse="interpreted")
    assert "pallas_call" in str(jax.make_jaxpr(zoo.generate_tokens, static_argnums=0)(settings, *rest))
    np.testing.assert_array_equal(zoo.generate_tokens(settings, *rest).tokens, tokens)


def test_what_the_kernels_cannot_compute_is_refused_by_name():
    decoder, _ = prepare_decoder(MODEL, 64, trainables_of(MODEL), fuse="kernels")
    found = dict(find_layers(decoder, DecoderBlock))["blocks/layers/0"]
    block: Any = found.layer
    assert find_obstacle(block) is None
    assert "not Linear" in str(find_obstacle(nn.Linear(4)))
    attend: Any = dict(find_layers(block, nn.MultiHeadAttention))["attend"]
    assert "softcap=2.0" in str(find_obstacle(block.with_parts({"attend": dataclasses.replace(attend, softcap=2.0)})))
    assert "width of 1024" in str(find_obstacle(dataclasses.replace(block, width=1024)))
    assert "one row" in str(found.find_refusal(jnp.zeros((2, 1, 64)), None, None))
    assert "not float32" in str(found.find_refusal(jnp.zeros((1, 1, 64)), None, None))


def test_what_fails_to_compile_is_left_to_the_block():
    decoder, weights = prepare_decoder(MODEL, 64, trainables_of(MODEL), fuse="kernels")  # which a CPU cannot compile
    x = jnp.ones((1, 1), "int32")
    fwd = jax.jit(functools.partial(decoder.fwd, inference_mode=True))
    logits, _ = fwd(x, weights, init_state(decoder, x))
    assert jnp.isfinite(logits).all()


def test_kernels_are_for_weights_on_one_gpu_of_hopper():
    for platform, capability, wanted in (("gpu", "9.0", True), ("gpu", "8.0", False), ("cpu", "", False)):
        assert has_kernels(types.SimpleNamespace(platform=platform, compute_capability=capability)) is wanted
    assert not has_kernels("cpu")
    assert choose_fusion({"kernel": jnp.ones(2)}) == "projections"
    assert jax.jit(lambda x: choose_fusion(x) == "nothing")(jnp.ones(2))


def test_kernels_are_lowered_for_a_gpu_without_a_warning():
    shapes = (1, 64), (64, 64), (64,)
    x, kernel, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    with on_hopper():
        traced = jax.jit(functools.partial(ops.fused_linear, gelu=True)).trace(x, kernel, bias)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text


def on_hopper() -> Any:
    """A context in which JAX from 0.11 on lowers kernels for a GPU that is not there."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, "cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
