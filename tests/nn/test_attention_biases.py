"""The biases of MultiHeadAttention that a GPU does without: the same function and gradients as with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import _gpu, nn, zoo

X = jax.random.normal(jax.random.key(0), (2, 6, 16))


@pytest.mark.parametrize(
    ("fields", "inputs", "folded"),
    [
        ({"causal": True}, {}, {"key", "value"}),
        ({"kv_heads": 2, "out_bias": False}, {}, {"key", "value"}),
        ({"rotary": nn.Rotary()}, {}, {"value"}),
        ({"qk_norm": nn.RMSNorm()}, {}, {"value"}),
        ({}, {"lengths": jnp.asarray([0, 4])}, {"key"}),
        ({"causal": True, "window": 2}, {"positions": None}, {"key", "value"}),
        ({"softcap": 5.0}, {}, set()),
        ({"sinks": True}, {}, set()),
        ({"fused": True}, {}, set()),
    ],
)
def test_attention_without_the_biases_of_keys_and_values_is_the_same_function(monkeypatch, fields, inputs, folded):
    layer, x = nn.MultiHeadAttention(4, **fields), {"x": X, **inputs}
    weights = draw_like(layer.init(jax.random.key(1), x)[0])
    expected = run(layer, weights, x)
    monkeypatch.setattr(_gpu, "prefers_kernels", lambda x: True)
    found = run(layer, weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert {part for part in ("key", "value") if part in weights and is_folded(layer, weights, x, part)} == folded


def test_dropout_of_attention_weights_keeps_the_bias_of_the_values(monkeypatch):
    layer = nn.MultiHeadAttention(4, dropout=0.5)
    weights = draw_like(layer.init(jax.random.key(1), X)[0])
    expected = layer.fwd(X, weights, rng=jax.random.key(2))[0]
    monkeypatch.setattr(_gpu, "prefers_kernels", lambda x: True)
    np.testing.assert_allclose(layer.fwd(X, weights, rng=jax.random.key(2))[0], expected, rtol=1e-4, atol=1e-5)


def is_folded(layer: nn.MultiHeadAttention, weights: Any, x: Any, part: str) -> bool:
    return "bias" not in layer._fold_biases(x, weights, False)[1][part]


def run(layer: mlax.Layer, weights: Any, x: Any) -> Any:
    """The output, and the gradients of a function of it."""

    def loss(weights: Any) -> Any:
        y = layer.fwd(x, weights)[0]
        return jnp.sin(y).sum(), y

    return jax.grad(loss, has_aux=True)(weights)


def draw_like(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noise = [0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return structure.unflatten([leaf + more for leaf, more in zip(leaves, noise, strict=True)])


def test_a_norm_adds_the_bias_of_the_branch_after_it_to_the_residual_stream(monkeypatch):
    block = zoo.GPT2(width=16, heads=4, depth=2, vocabulary=32, positions=6).parts()["blocks"]
    weights = draw_like(block.init(jax.random.key(1), X)[0])
    expected = run(block, weights, X)
    monkeypatch.setattr(_gpu, "prefers_kernels", lambda x: True)
    found = run(block, weights, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
