"""The two language models, small and trained for a few steps."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from mlax import train
from tests.asserts import compilations
from tests.examples.example_modules import load_example

SMALL = {"steps": 30, "batch": 8, "context": 32, "width": 32, "depth": 2, "sample": 40}
MODELS = ["characters", "characters_lstm"]


@pytest.fixture(scope="module")
def text():
    """A small part of the corpus, so that a test takes seconds."""
    whole, unseen = load_example("characters").corpus(limit=200_000)
    return whole, unseen[:3_000]


@pytest.fixture(scope="module", params=MODELS)
def run(request, tmp_path_factory, text):
    """The folder of a short run, its scores, and its step."""
    module, folder, steps = load_example(request.param), tmp_path_factory.mktemp("runs") / request.param, []
    make = train.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_example("characters"), "corpus", lambda: text)
        patch.setattr(train, "step", lambda *given: steps.append(make(*given)) or steps[-1])
        scores = module.main(module.Config(**SMALL, run=str(folder)))
    (step,) = steps
    return folder, scores, step


def test_a_few_steps_learn_byte_frequencies(run):
    _, scores, _ = run
    assert scores["bits_per_byte"] < 6
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / np.log(2), rel=1e-5)


def test_the_run_folder_has_the_metrics_of_every_step(run):
    folder, _, _ = run
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, SMALL["steps"] + 1))


def test_the_step_and_the_evaluation_are_compiled_once_each(run):
    _, _, step = run
    assert len(step.aot.compiled) == 1
    assert len(step.evaluation.aot.compiled) == 1


@functools.cache
def small(name):
    """A module, a small model of it, and its weights."""
    module = load_example(name)
    model = module.LanguageModel(16, 2, 2) if name == "characters" else module.LanguageModel(16, 2)
    trainables, _ = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    return module, model, trainables


def fwd(model, *args):
    return jax.jit(model.fwd, static_argnames="inference_mode")(*args, inference_mode=True)


def test_logits_with_the_cache_equal_those_without():
    _, model, trainables = small("characters")
    x = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    whole, _ = fwd(model, x, trainables)
    decoder, parts = dataclasses.replace(model, cache=12), []
    _, cache = jax.jit(decoder.init)(jax.random.key(0), x[:, :5])
    for part in (x[:, :5], *(x[:, i : i + 1] for i in range(5, 12))):
        logits, cache = fwd(decoder, part, trainables, cache)
        parts.append(logits)
    assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=1e-4, atol=1e-5)


def test_logits_with_a_carry_equal_those_without():
    _, model, trainables = small("characters_lstm")
    x = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    whole, _ = fwd(model, x, trainables)
    reader = dataclasses.replace(model, carry=True)
    (memories, first), _ = fwd(reader, (model.start(2), x[:, :6]), trainables)
    (_, rest), _ = fwd(reader, (memories, x[:, 6:]), trainables)
    assert_allclose(jnp.concatenate([first, rest], axis=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_sampling_equals_full_forward_passes_and_again_compiles_nothing(name):
    module, model, trainables = small(name)
    prompt = jnp.asarray([[100, 101, 102]], jnp.int32)
    written = module.generate(model, trainables, prompt, jax.random.key(2), 6, temperature=1e-4)
    text = jnp.concatenate([prompt, written], axis=1)
    logits, _ = fwd(model, text, trainables)
    assert_allclose(written, logits[:, 2:-1].argmax(-1))  # at temperature 0 the most likely byte is sampled
    other, rng = prompt + 1, jax.random.key(3)
    with compilations() as found:
        module.generate(dataclasses.replace(model), trainables, other, rng, 6, temperature=0.7)
    assert not found


def test_the_corpus_is_deterministic_and_excludes_the_held_out_files():
    characters = load_example("characters")
    (text, unseen), (again, _) = characters.corpus(500_000), characters.corpus(500_000)
    assert np.array_equal(text, again)
    assert text.dtype == np.uint8 and len(text) == 500_000 and len(unseen) == 12_500
    assert unseen[:2_000].tobytes() not in characters.corpus()[0].tobytes()


def test_windows_overlap_by_one_byte_the_last_target_of_one_and_first_input_of_the_next():
    rows = load_example("characters").windows(np.arange(11, dtype=np.uint8), 3)
    assert rows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "bits"), [("characters", 1.80), ("characters_lstm", 1.79)])
def test_a_full_run_reaches_its_bits_per_byte(name, bits, tmp_path):
    module = load_example(name)
    assert module.main(module.Config(run=str(tmp_path)))["bits_per_byte"] < bits
