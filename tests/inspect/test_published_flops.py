"""The FLOPs of ResNet-50, BERT-base and GPT-2 are those that others have published, and those that XLA counts."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mlax
from mlax import inspect
from mlax.core import variable_shapes
from tests.inspect import models

# FLOPs of matrix products and convolutions in the forward pass; two for each multiply-accumulate (MAC).
PUBLISHED = {
    # 4.089 G MACs: torchvision, ResNet50_Weights.IMAGENET1K_V2, of convolutions and the head
    "resnet50": (models.resnet50, 2 * 4.089e9, 25_557_032),
    # 22.5 G FLOPs of BERT-base for 128 tokens: https://arxiv.org/abs/1909.10351, Table 1
    "bert128": (lambda: models.bert(128), 22.5e9, None),
    # 2 N for each token, N the weights of the blocks, and 4 L T d for the scores: the formula of
    # https://arxiv.org/abs/2204.02311, Appendix B, without its factor of 3 for training
    "bert512": (lambda: models.bert(512), 512 * (2 * 12 * 12 * 768**2 + 4 * 12 * 512 * 768), None),
    # nanoGPT's transformer_sizing.ipynb, forward_total; all scores count, masked ones too
    "gpt2": (lambda: models.gpt2(implementation="xla"), 291_648_307_200, 124_439_808),
}


@pytest.mark.parametrize("name", ["resnet50", "bert128", pytest.param("bert512", marks=pytest.mark.thorough), "gpt2"])
def test_the_layers_sum_to_the_published_count_and_to_that_of_xla(name):
    build, published, parameters = PUBLISHED[name]
    model, x = build()

    def forward(trainables, non_trainables, x):
        return model.fwd(x, trainables, non_trainables, inference_mode=True)[0]

    variables = variable_shapes(model, x)
    assert parameters in (None, mlax.count(variables[0]))
    traced = jax.jit(forward).trace(*variables, x)
    layers = collections.Counter()
    for operation in inspect.operations(traced.jaxpr):
        layers[operation.path] += operation.flops
    assert not layers[""] and sum(layers.values()) == pytest.approx(published, rel=0.01)
    assert sum(layers.values()) == pytest.approx(traced.lower().cost_analysis()["flops"], rel=0.05)


def test_the_summary_of_gpt2_counts_the_tiles_of_causal_attention_and_allocates_nothing():
    model, x = models.gpt2()
    before = len(jax.live_arrays())
    found = inspect.summary(model, x)
    assert len(jax.live_arrays()) == before
    dense = 291_648_307_200
    scores = 12 * 4 * 1024**2 * 768
    # causal attention in tiles of 512 x 512 skips one of four; its backward pass computes the scores again
    assert found.total.forward_flops == dense - scores // 4
    assert found.total.backward_flops == 2 * (dense - scores) + 5 * scores // 2 * 3 // 4


def test_a_loop_counts_as_often_as_it_runs_if_its_bounds_are_known():
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    once = 2 * 8**3

    def triangle(a):
        def row(carry, i):
            return lax.fori_loop(0, i + 1, lambda j, a: a @ a, carry), None

        return lax.scan(row, a, jnp.arange(5))[0]

    assert inspect.flops(jax.make_jaxpr(triangle)(square)) == (1 + 2 + 3 + 4 + 5) * once
    nested = mlax.Repeat(mlax.F(triangle), 3, mode="scan")
    assert inspect.flops(jax.make_jaxpr(lambda a: nested.fwd(a, None)[0])(square)) == 3 * 15 * once

    def until(a, n):
        return lax.while_loop(lambda carry: carry[0] < n, lambda carry: (carry[0] + 2, carry[1] @ a), (0, a))

    assert inspect.flops(jax.make_jaxpr(lambda a: until(a, 8))(square)) == once  # it does not count by one
    assert inspect.flops(jax.make_jaxpr(lambda a, n: lax.fori_loop(0, n, lambda i, b: b @ a, a))(square, 3)) == once
