import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import zoo
from tests.zoo.reference import Reference

TINY = {"vocabulary": 53, "positions": 24, "width": 32, "depth": 2, "heads": 4, "hidden": 80}
NAMES = ("bert", "bert_masked_lm", "bert_classifier", "roberta_masked_lm", "roberta_classifier")
OUTPUTS = {"hidden": "last_hidden_state", "pooled": "pooler_output"}


def load_reference(name):
    """A reference, its model, and its state dict with tied weights."""
    reference = Reference(name)
    model = zoo.bert_from_config({**reference.config, "hidden_dropout_prob": 0.0})
    if name == "bert":
        model = dataclasses.replace(model, pooler=True)
    state = reference.state()
    tied = json.loads(str(reference["tied"]))
    return reference, model, state | {each: state[other] for each, other in tied.items()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in ("bert_classifier", "roberta_masked_lm") else ())
        for name in NAMES  # the head of one is on the other, too
    ],
)
def test_outputs_and_gradients_equal_those_of_transformers_with_padding_and_segments(name):
    reference, model, state = load_reference(name)
    trainables, _ = reference.check_round_trip(model, state)
    x = tuple(jnp.asarray(reference[each], "int32") for each in ("tokens", "lengths", "segments"))
    is_token = np.float32(np.arange(x[0].shape[1]) < reference["lengths"][:, None])
    random, weights = np.random.default_rng(1), {}
    for each in OUTPUTS.values() if name == "bert" else ["logits"]:
        weights[each] = np.float32(random.standard_normal(reference[each].shape))

    def loss(trainables):
        y, _ = model.fwd(x, trainables)
        outputs = {OUTPUTS[each]: y[each] for each in y} if isinstance(y, dict) else {"logits": y}
        outputs = {each: y * is_token[:, :, None] if y.ndim == 3 else y for each, y in outputs.items()}
        return sum((y * weights[each]).sum() for each, y in outputs.items()), outputs

    gradient, outputs = jax.jit(jax.grad(loss, has_aux=True))(trainables)
    for each, y in outputs.items():
        np.testing.assert_allclose(y, reference[each], atol=2e-5)
    reference.check_gradients(model, gradient)


def test_names_without_the_prefix_names_from_tensorflow_and_weights_of_other_heads_are_loaded():
    _, model, state = load_reference("bert")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta", "bert.": ""}
    renamed = {"embeddings.position_ids": np.arange(24)[None], "cls.seq_relationship.bias": np.zeros(2)}
    for name, array in state.items():
        for new, old in names.items():
            name = name.replace(new, old)
        renamed[name] = array
    encoder = dataclasses.replace(model, pooler=False)
    assert "pooler.dense.weight" in renamed and "embeddings.LayerNorm.gamma" in renamed
    loaded, _ = zoo.load_weights(encoder, renamed)
    wanted, _ = zoo.load_weights(encoder, state)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, wanted))


def test_the_published_sizes_have_their_numbers_of_parameters():
    models = {
        dataclasses.replace(zoo.bert("base"), pooler=True): 109_482_240,
        dataclasses.replace(zoo.bert("large"), pooler=True): 335_141_888,
        zoo.BERTMaskedLM(zoo.roberta("base")): 124_697_433,
        zoo.BERTMaskedLM(zoo.roberta("large")): 355_412_057,
        dataclasses.replace(zoo.minilm(), pooler=True): 22_713_216,
    }
    for model, number in models.items():
        trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        assert sum(leaf.size for leaf in jax.tree.leaves(trainables)) == number


@pytest.mark.parametrize("padding", [None, 1])
def test_a_saved_folder_loads_again(tmp_path, padding):
    encoder = zoo.BERT(**TINY, padding=padding)
    for model in (encoder, zoo.BERTMaskedLM(encoder), zoo.BERTClassifier(encoder, classes=3)):
        trainables, _ = model.init(jax.random.key(0), model.example_input())
        zoo.save(tmp_path / type(model).__name__, model, trainables)
        loaded = zoo.load(tmp_path / type(model).__name__)
        assert loaded.model == model
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded.trainables, trainables))


def test_a_configuration_that_would_compute_something_else_is_refused():
    for change, words in {
        ("hidden_act", "relu"): "hidden_act is 'relu', but only 'gelu' is supported",
        ("position_embedding_type", "relative_key"): "only 'absolute' is supported",
        ("is_decoder", True): "is_decoder is True",
        ("architectures", ("BertForQuestionAnswering",)): "the architecture is",
    }.items():
        with pytest.raises(ValueError, match=words):
            zoo.bert_from_config({"model_type": "bert", change[0]: change[1]})


def test_texts_that_are_longer_than_the_positions_of_roberta_are_refused():
    model = zoo.BERT(**TINY, padding=1)
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 22), "int32"))
    with pytest.raises(ValueError, match="the texts have 23 tokens, but at most 22 are possible"):
        jax.eval_shape(model.fwd, jnp.zeros((1, 23), "int32"), trainables)


def test_a_padding_token_without_a_position_after_it_is_refused():
    with pytest.raises(ValueError, match="padding is 23, but must be a token from 0 to 22"):
        zoo.BERT(**TINY, padding=23)


def test_a_pooler_inside_of_a_model_with_a_head_is_refused():
    with pytest.raises(ValueError, match="the encoder has a pooler; pass one with pooler=False"):
        zoo.BERTClassifier(zoo.BERT(**TINY, pooler=True))


def test_a_saved_pooler_is_read_only_by_a_model_that_has_one(tmp_path):
    model = zoo.BERT(**TINY, pooler=True)
    trainables, _ = model.init(jax.random.key(0), model.example_input())
    zoo.save(tmp_path / "bert", model, trainables)
    loaded = zoo.load(tmp_path / "bert")
    assert not loaded.model.pooler and "pooler" not in loaded.trainables
    pooled = dataclasses.replace(loaded.model, pooler=True)
    again, _ = zoo.load_weights(pooled, tmp_path / "bert/model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, again, trainables)
