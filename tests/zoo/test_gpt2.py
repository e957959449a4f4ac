import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import zoo
from tests.zoo.reference import Reference


@pytest.fixture(scope="module")
def reference():
    return Reference("gpt2")


@pytest.fixture(scope="module")
def model(reference):
    return zoo.gpt2_from_config({**reference.config, "resid_pdrop": 0.0})


def test_logits_and_gradients_equal_those_of_transformers_with_padding(reference, model):
    state = reference.state()
    state["lm_head.weight"] = state["transformer.wte.weight"]
    trainables, _ = reference.check_round_trip(model, state)
    tokens, lengths = jnp.asarray(reference["tokens"], "int32"), jnp.asarray(reference["lengths"], "int32")
    is_token = np.float32(np.arange(tokens.shape[1]) < reference["lengths"][:, None])[:, :, None]
    weights = np.float32(np.random.default_rng(1).standard_normal(reference["logits"].shape)) * is_token

    def loss(trainables):
        logits, _ = model.fwd((tokens, lengths), trainables)
        return (logits * weights).sum(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    np.testing.assert_allclose(logits * is_token, reference["logits"], atol=2e-5)
    reference.check_gradients(model, gradient)

    last, _ = dataclasses.replace(model, last_only=True).fwd((tokens, lengths), trainables)
    np.testing.assert_allclose(last[:, 0], logits[np.arange(3), reference["lengths"] - 1], atol=1e-5)


def test_a_state_dict_without_the_prefix_and_the_tied_head_is_loaded(reference, model):
    state = {name.removeprefix("transformer."): array for name, array in reference.state().items()}
    del state["lm_head.weight"]
    trainables, _ = zoo.load_weights(model, state)
    np.testing.assert_array_equal(trainables["embed"]["table"], state["wte.weight"])


def test_missing_extra_misshapen_and_untied_entries_are_one_error(reference, model):
    state = reference.state()  # its head is not the embedding
    state["transformer.h.0.ln_9.weight"] = state.pop("transformer.h.0.ln_1.weight")
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"][:5]
    with pytest.raises(ValueError, match="the weights are not those of this model") as error:
        zoo.load_weights(model, state)
    text = str(error.value)
    assert "missing: transformer.h.0.ln_1.weight (is it transformer.h.0.ln_9.weight?)" in text
    assert "extra: transformer.h.0.ln_9.weight" in text
    assert "misshapen: transformer.wpe.weight (5, 32), not (24, 32)" in text
    assert "not tied: lm_head.weight, not equal to transformer.wte.weight" in text


def test_the_published_sizes_have_their_numbers_of_parameters():
    sizes = {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}
    for size, number in sizes.items():
        model = zoo.gpt2(size)
        trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        assert sum(leaf.size for leaf in jax.tree.leaves(trainables)) == number


def test_a_saved_folder_loads_again(tmp_path, reference, model):
    state = reference.state()
    del state["lm_head.weight"]
    trainables, _ = zoo.load_weights(model, state)
    zoo.save(tmp_path / "gpt2", model, trainables)
    loaded = zoo.load(tmp_path / "gpt2", dtype="bfloat16")
    assert loaded.model == model and loaded.non_trainables is None
    for ours, wanted in zip(jax.tree.leaves(loaded.trainables), jax.tree.leaves(trainables), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, wanted.astype("bfloat16"))
