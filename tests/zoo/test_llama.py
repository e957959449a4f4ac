import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import nn, zoo
from tests.zoo.reference import Reference

VARIATIONS = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mixtral", "phi3")


def cases(*everyday):
    """Over these variations, and over all others only with `--thorough`."""
    others = [pytest.param(name, marks=pytest.mark.thorough) for name in VARIATIONS if name not in everyday]
    return pytest.mark.parametrize("case", [*everyday, *others], indirect=True)


@pytest.fixture(scope="module")
def case(request):
    """A variation: its reference, the model, and weights that came back bitwise."""
    reference = Reference(f"llama/{request.param}")
    model = zoo.llama_from_config(reference.config)
    state = reference.state()
    if model.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return reference, model, reference.check_round_trip(model, state, names(model))[0]


def names(model):
    """Of the modules of transformers, whose experts are fused, unlike those in files."""
    return "modules" if model.experts else None


@cases("llama3", "qwen2", "gemma2", "gemma3", "mixtral", "phi3")
def test_logits_and_gradients_equal_those_of_transformers_with_padding(case):
    reference, model, trainables = case
    tokens, lengths = jnp.asarray(reference["tokens"], "int32"), jnp.asarray(reference["lengths"], "int32")
    is_token = np.float32(np.arange(tokens.shape[1]) < reference["lengths"][:, None])[:, :, None]
    weights = np.float32(np.random.default_rng(1).standard_normal(reference["logits"].shape)) * is_token

    def loss(trainables):
        logits, _ = model.fwd((tokens, lengths), trainables)
        return (logits * weights).sum(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    np.testing.assert_allclose(logits * is_token, reference["logits"], atol=5e-5)
    reference.check_gradients(model, gradient, names=names(model))


@cases("qwen2", "gemma3", "mixtral")
def test_decoding_token_by_token_gives_the_logits_of_transformers(case):
    reference, model, trainables = case
    tokens = jnp.asarray(reference["tokens"][:1], "int32")  # the row without padding
    time = tokens.shape[1]
    decoder = zoo.decoder(model, time)
    scaling = model.rotary.scaling
    if isinstance(scaling, nn.DynamicNTKScaling):  # which must know how long the sequence will be
        decoder = mlax.override(decoder, nn.Rotary, scaling=dataclasses.replace(scaling, time=time))
    _, cache = jax.eval_shape(decoder.init, jax.random.key(0), tokens[:, :1])
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)

    @jax.jit
    def decode(trainables, cache):
        def step(cache, token):
            logits, cache = decoder.fwd(token, trainables, cache, inference_mode=True)
            return cache, logits[:, 0]

        return jax.lax.scan(step, cache, tokens.T[:, :, None])[1]

    np.testing.assert_allclose(decode(trainables, cache)[:, 0], reference["logits"][0], atol=5e-5)
