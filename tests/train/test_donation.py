"""Donated arrays used again are named, with what to use instead; other errors of a step keep their words."""

import sys

import jax
import jax.numpy as jnp
import optax
import pytest

from mlax import files, nn, optim, place, train
from tests.asserts import unequal_leaves
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


STATE = r"state/step was donated to an earlier call.*use the state that it returned, `result\.state`.*first run the one"
CASES = {
    "step": (lambda step, variables, state, folder: step(state, batch()), STATE),
    "step with a rate": (lambda step, variables, state, folder: step(state, batch(), rate=0.1), STATE),
    "an uncompiled step": (lambda step, variables, state, folder: train.step(doubled, SGD)(state, batch()), STATE),
    "evaluation": (lambda step, variables, state, folder: step.evaluation(state, [batch()]), STATE),
    "fit": (lambda step, variables, state, folder: train.fit(step, state, feed(), steps=2, show=False), STATE),
    "Plan.place": (lambda step, variables, state, folder: place.single().place(variables), "variables/w was donated"),
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


VARIABLES_CELL = "variables = {'w': jnp.ones(())}, None"
STATE_CELL = "state = step.init(jax.random.key(1), *variables)"
FIT_CELL = "result = train.fit(step, state, feed, steps=4, run=run, show=run is not None)"


def run_notebook(step, run):
    """The names of a notebook whose cells were each run once."""
    names = {"train": train, "jax": jax, "jnp": jnp, "step": step, "feed": feed(), "run": run}
    for cell in (VARIABLES_CELL, STATE_CELL, FIT_CELL):
        exec(cell, names)
    return names


@pytest.fixture(scope="module")
def step():
    return train.step(doubled, SGD)


def test_a_notebooks_cell_that_is_run_twice_says_what_happened_in_one_sentence(step):
    names = run_notebook(step, None)
    cells = {FIT_CELL: "first run the one that makes the state", STATE_CELL: "call `model.init` again"}
    for cell, way_out in cells.items():
        with pytest.raises(ValueError, match="was donated to an earlier call, which reused its memory; ") as caught:
            exec(cell, names)
        message = str(caught.value)
        assert way_out in message
        assert message.endswith(".")
        assert ". " not in message
        assert len(message) < 300
    for cell in (VARIABLES_CELL, STATE_CELL, FIT_CELL):  # the way out
        exec(cell, names)


def test_with_a_run_folder_a_cell_that_is_run_twice_returns_the_result_again(step, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # takes a second to import
    run = tmp_path / "run"
    names = run_notebook(step, run)
    first = names["result"]
    capsys.readouterr()
    exec(FIT_CELL, names)
    assert f"already trained: {run} holds step 4 of 4, which fit returns; pass more" in capsys.readouterr().out
    assert names["result"].step == 4
    assert not unequal_leaves(names["result"].state, first.state)
    longer = FIT_CELL.replace("steps=4", "steps=6")
    exec(longer, names)  # continues, although the state was donated
    assert names["result"].step == 6
    with pytest.raises(ValueError, match="donated"):
        exec(FIT_CELL.replace("run=run", "run=run, resume='restart'"), names)
    assert not list(tmp_path.glob("run-before-*"))  # refused before anything was moved
    exec(f"{VARIABLES_CELL}; {STATE_CELL}".replace("key(1)", "key(2)"), names)
    with pytest.raises(ValueError, match="the key of the state"):  # the key of the first run was kept
        exec(longer, names)
