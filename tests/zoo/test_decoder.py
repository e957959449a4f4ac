import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import dtypes, nn, place, zoo

MODEL = zoo.GPT2(vocabulary=50, positions=32, width=16, depth=2, heads=2)


@pytest.fixture(scope="module")
def trainables():
    return MODEL.init(jax.random.key(0), MODEL.example_input())[0]


def test_a_decoder_continues_each_row_where_its_prompt_ended(trainables):
    tokens = jax.random.randint(jax.random.key(1), (3, 8), 0, 50)
    lengths = jnp.array([7, 4, 1])
    decoder, weights = mlax.unstack(zoo.decoder(MODEL, 12), trainables)
    _, state = decoder.init(jax.random.key(0), (tokens, lengths))
    logits, state = decoder.fwd((tokens, lengths), weights, state, inference_mode=True)
    following = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
    after, _ = decoder.fwd(following, weights, state, inference_mode=True)
    wanted, _ = MODEL.fwd(tokens, trainables, inference_mode=True)
    np.testing.assert_allclose(logits[:, 0], wanted[np.arange(3), lengths - 1], atol=1e-5)
    np.testing.assert_allclose(after[:, 0], wanted[np.arange(3), lengths], atol=1e-5)


def test_fields_of_decoding_are_set_through_wrappers():
    model = dtypes.mixed_bfloat16(mlax.wrap(MODEL, nn.Linear, lambda layer: nn.LoRA(layer, rank=2)))
    model = place.On(model, jax.devices()[0])
    decoder = zoo.decoder(model, 12)
    assert mlax.get(decoder, "blocks/stacked/attend").cache == 12
    assert mlax.get(decoder, "positions").decoding and decoder.layer.layer.last_only
    mamba = mlax.Series(nn.Embed(50, 16), nn.Mamba(16), nn.Linear(50))
    decoder = zoo.decoder(mamba, 12)
    assert decoder == mlax.override(mamba, nn.Mamba, decode=True)


@pytest.mark.parametrize("mixed", [False, True])
def test_caches_are_in_the_dtype_of_the_computation(trainables, mixed):
    model = dtypes.mixed_bfloat16(MODEL) if mixed else MODEL
    weights = trainables if mixed else dtypes.cast(trainables, "bfloat16")
    prompts = jnp.zeros((3, 5), "int32")
    generate = jax.jit(lambda weights: zoo.generate(model, weights, prompts, max_new_tokens=4).tokens)
    text = generate.lower(weights).as_text()
    assert "tensor<3x2x64x8xbf16>" in text and "tensor<3x2x64x8xf32>" not in text


def test_a_model_that_forgets_earlier_tokens_is_refused():
    with pytest.raises(ValueError, match="a language model attends with causal=True"):
        zoo.decoder(mlax.Series(nn.Embed(50, 16), nn.Linear(50)), 12)
