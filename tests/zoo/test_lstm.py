import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mlax
from mlax import zoo
from tests.zoo.reference import Reference


class Case:
    """A reference, its model and weights, and its input."""

    def __init__(self, name):
        self.reference = Reference(name)
        self.model = zoo.LSTMLanguageModel(**self.reference.config)
        state = self.reference.state()
        state = {**state, "decoder.weight": state["encoder.weight"]} if self.model.tied else state
        self.trainables, _ = self.reference.check_round_trip(self.model, state)
        self.x = tuple(jnp.asarray(self.reference[name], "int32") for name in ("tokens", "lengths"))


@pytest.fixture(scope="module", params=["lstm_lm", "lstm_lm_tied"])
def case(request):
    return Case(request.param)


def test_logits_and_gradients_equal_those_of_pytorch_with_padding(case):
    model, reference, (tokens, lengths) = case.model, case.reference, case.x
    is_token = np.float32(np.arange(tokens.shape[1]) < lengths[:, None])[:, :, None]
    weights = np.float32(np.random.default_rng(1).standard_normal(reference["logits"].shape)) * is_token

    def loss(trainables):
        logits, _ = model.fwd(case.x, trainables)
        return (logits * weights).sum(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(case.trainables)
    np.testing.assert_allclose(logits * is_token, reference["logits"], atol=1e-5)
    reference.check_gradients(model, gradient)


def test_greedy_tokens_after_prompts_of_different_lengths_are_those_of_pytorch(case):
    state = zoo.state_dict(case.model, case.trainables)
    state = {name: array * np.float32(0 if name == "decoder.bias" else 5) for name, array in state.items()}
    trainables, _ = zoo.load_weights(case.model, state)
    result = zoo.generate(case.model, trainables, *case.x, max_new_tokens=9)
    np.testing.assert_array_equal(result.tokens, case.reference["greedy"])


@pytest.mark.parametrize("case", ["lstm_lm_tied"], indirect=True)
def test_a_stateful_model_reads_a_long_text_in_pieces(case):
    tokens, _ = case.x
    stateful = mlax.override(case.model, mlax.Recurrent, stateful=True)
    _, state = jax.jit(stateful.init)(jax.random.key(0), tokens[:, :5])
    step, pieces = jax.jit(stateful.fwd), []
    for piece in (tokens[:, :5], tokens[:, 5:10]):
        logits, state = step(piece, case.trainables, state)
        pieces.append(logits)
    wanted, _ = jax.jit(case.model.fwd)(tokens[:, :10], case.trainables)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), wanted, atol=1e-5)


def test_the_published_sizes_have_their_numbers_of_parameters():
    for size, number in {"small": 4_653_200, "medium": 19_780_400, "large": 66_034_000}.items():
        model = zoo.lstm_lm(size)
        trainables, _ = jax.eval_shape(model.init, jax.random.key(0), model.example_input())
        assert mlax.count(trainables) == number


def test_invalid_descriptions_are_errors(case):
    with pytest.raises(ValueError, match="hidden is 9, but a tied output layer needs the width, 12"):
        dataclasses.replace(case.model, tied=True, hidden=9)
    with pytest.raises(ValueError, match="the size is 'huge', but must be one of small, medium, large"):
        zoo.lstm_lm("huge")
