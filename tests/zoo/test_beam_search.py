import json

import numpy as np
import pytest

from mlax import zoo
from tests.zoo.decoders import with_nan
from tests.zoo.reference import Reference

STOPPING = {False: "heuristic", True: "first", "never": "never"}


@pytest.fixture(scope="module")
def gpt2():
    reference = Reference("generation_gpt2")
    state = reference.state()
    state["lm_head.weight"] = state["transformer.wte.weight"]
    model = zoo.gpt2_from_config({**reference.config, "resid_pdrop": 0.0})
    return reference, model, zoo.load_weights(model, state)[0]


@pytest.fixture(scope="module")
def llama():
    reference = Reference("generation_llama")
    model = zoo.llama_from_config(reference.config)
    return reference, model, zoo.load_weights(model, reference.state())[0]


def options(reference):
    prompts, lengths = reference["prompts"], reference["lengths"]
    return {"prompts": prompts, "lengths": lengths, "padding": "left", "max_new_tokens": 20, "pad": 52}


def check_beams(reference, model, trainables, chosen):
    settings = json.loads(str(reference["beams"]))
    for index in chosen:
        beams, penalty, early = settings[index]
        result = zoo.beam_search(
            model,
            trainables,
            **options(reference),
            stop=reference["stop"].tolist(),
            beams=beams,
            length_penalty=penalty,
            early_stopping=STOPPING[early],
        )
        np.testing.assert_array_equal(result.tokens, reference[f"beams {index}"], err_msg=str(settings[index]))
        is_padding = np.arange(20) >= np.asarray(result.lengths)[:, None]
        np.testing.assert_array_equal(result.tokens == 52, is_padding)


def check_greedy(reference, model, trainables):
    result = zoo.generate(model, trainables, **options(reference), stop=reference["stop"].tolist())
    np.testing.assert_array_equal(result.tokens, reference["greedy"])


def test_greedy_tokens_of_gpt2_equal_those_of_transformers(gpt2):
    check_greedy(*gpt2)


def test_beams_of_gpt2_equal_those_of_transformers(gpt2):
    check_beams(*gpt2, [1, 2, 3])


@pytest.mark.thorough
def test_beams_of_gpt2_equal_those_of_transformers_for_other_numbers_and_without_early_stopping(gpt2):
    check_beams(*gpt2, [0, 4, 5])


def test_greedy_tokens_of_llama_equal_those_of_transformers(llama):
    check_greedy(*llama)


@pytest.mark.thorough
def test_beams_of_llama_equal_those_of_transformers(llama):
    check_beams(*llama, [0, 1, 2, 3, 4, 5])


def test_several_texts_are_returned_the_best_one_first(gpt2):
    reference, model, trainables = gpt2
    stop = reference["stop"].tolist()
    result = zoo.beam_search(model, trainables, **options(reference), stop=stop, beams=4, returned=3)
    assert result.tokens.shape == (3, 3, 20) and result.lengths.shape == (3, 3)
    np.testing.assert_array_equal(result.tokens[:, 0], reference["beams 1"])
    assert (np.diff(result.log_probs, axis=1) <= 0).all()
    invalid = zoo.beam_search(model, with_nan(trainables), **options(reference), stop=stop, beams=4)
    assert invalid.tokens[:, :2].tolist() == [[-1, 52]] * 3 and invalid.lengths.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beams": 0}, "beams is 0, but must be an integer of at least 1"),
        ({"beams": 2, "returned": 3}, "returned is 3, but must be between 1 and the 2 beams"),
        ({"beams": 2, "early_stopping": True}, "early_stopping is True, but must be heuristic, first or never"),
    ],
)
def test_wrong_arguments_are_refused(gpt2, wrong, message):
    reference, model, trainables = gpt2
    with pytest.raises(ValueError, match=message):
        zoo.beam_search(model, trainables, **options(reference), **wrong)
