"""Donated arrays used again are named, with what to use instead; other errors of a step keep their words."""

import jax
import jax.numpy as jnp
import optax
import pytest

from mlax import files, nn, optim, train
from tests.train.tasks import batch, feed

SGD = optim.SGD(0.1)


def doubled(batch, trainables, non_trainables, rng=None, inference_mode=False):
    return 2 * trainables["w"] * batch["x"][:, 0], non_trainables


@pytest.fixture(scope="module")
def donated():
    """A step, the variables and the state that it consumed, and the state that it returned."""
    step = train.step(doubled, SGD)
    variables = {"w": jnp.ones(())}
    state = step.init(jax.random.key(0), variables)
    new, _ = step(state, batch())
    return step, variables, state, new


STATE = r"state/step was donated to an earlier call.*use the one that they returned.*result\.state.*To run a cell again"
CASES = {
    "step": (lambda step, variables, state, folder: step(state, batch()), STATE),
    "step with a rate": (lambda step, variables, state, folder: step(state, batch(), rate=0.1), STATE),
    "an uncompiled step": (lambda step, variables, state, folder: train.step(doubled, SGD)(state, batch()), STATE),
    "evaluation": (lambda step, variables, state, folder: step.evaluation(state, [batch()]), STATE),
    "fit": (lambda step, variables, state, folder: train.fit(step, state, feed(), steps=2, show=False), STATE),
    "step.init": (
        lambda step, variables, state, folder: step.init(jax.random.key(0), variables),
        r"step\.init: trainables/w was donated to an earlier call.*call `model\.init` again, or pass copies",
    ),
    "update": (
        lambda step, variables, state, folder: SGD.update({"w": jnp.ones(())}, state.optimizer, variables),
        r"SGD\(0\.1\): state/step was donated to an earlier call.*`donate_argnums`.*use those that they returned",
    ),
    "update by Optax": (
        lambda step, variables, state, folder: optim.from_optax(optax.sgd(0.1)).init(variables),
        "trainables/w was donated to an earlier call",
    ),
    "optimizer.init": (lambda step, variables, state, folder: SGD.init(variables), "trainables/w was donated"),
    "eval_variables": (lambda step, variables, state, folder: state.eval_variables(SGD), "state/step was donated"),
    "a layer": (
        lambda step, variables, state, folder: nn.Linear(3, bias=False).fwd(
            jnp.ones((2, 1)), {"kernel": variables["w"]}
        ),
        "Linear: trainables/kernel was donated to an earlier call",
    ),
    "files.save": (
        lambda step, variables, state, folder: files.save(folder.with_suffix(".safetensors"), variables),
        r"files\.save: tree/w was donated to an earlier call",
    ),
    "Checkpoints.save": (
        lambda step, variables, state, folder: train.Checkpoints(folder).save(1, state),
        r"Checkpoints\.save: tree/step was donated to an earlier call",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_donated_arrays_used_again_are_named_with_what_to_use_instead(case, donated, tmp_path):
    step, variables, state, _ = donated
    call, words = CASES[case]
    with pytest.raises(ValueError, match=words):
        call(step, variables, state, tmp_path / "checkpoints")


def test_a_state_of_which_only_some_arrays_were_donated_is_named_by_them(donated):
    step, _, state, new = donated
    with pytest.raises(ValueError, match="state/trainables/w was donated") as caught:
        step(new._replace(trainables=state.trainables), batch())
    assert caught.value.__cause__ is not None


def test_a_runtime_error_inside_of_a_step_keeps_its_words():
    def fail(x):
        raise RuntimeError("the disk is on fire")

    def failing(batch, trainables, non_trainables, rng=None, inference_mode=False):
        value = jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), batch["x"])
        return trainables["w"] * value, non_trainables

    step = train.step(failing, SGD)
    with pytest.raises(RuntimeError, match="the disk is on fire") as caught:
        jax.block_until_ready(step(step.init(jax.random.key(0), {"w": jnp.ones(())}), batch()))
    assert any("resume from the last checkpoint" in note for note in getattr(caught.value, "__notes__", []))
