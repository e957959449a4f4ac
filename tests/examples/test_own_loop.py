"""The custom loop: it learns, resumes, and compiles once."""

import pytest

from mlax import files
from tests.asserts import unequal_leaves
from tests.examples.example_modules import compilations_after_the_first_step, load_example

own_loop = load_example("own_loop")


def last_checkpoint(folder):
    (file,) = sorted(folder.glob("step-*"))[-1].glob("arrays-*.safetensors")
    return files.load(file)


@pytest.fixture(scope="module")
def run(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("runs") / "own_loop"
    scores = own_loop.main(own_loop.Config(epochs=8, run=str(folder)))
    return folder, scores, list(events)


def test_eight_epochs_reach_an_accuracy_of_0_95(run):
    assert run[1]["accuracy"] > 0.95


def test_nothing_is_compiled_after_the_first_step(run):
    assert compilations_after_the_first_step(run[2]) == 0


def test_an_interrupted_run_resumes_to_bitwise_equal_weights(run, tmp_path, monkeypatch):
    config = own_loop.Config(epochs=8, run=str(tmp_path / "interrupted"))

    def interrupt(words, **_):
        if words.startswith("66/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(own_loop, "print", interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        own_loop.main(config)
    monkeypatch.undo()
    assert own_loop.main(config) == run[1]
    assert not unequal_leaves(last_checkpoint(tmp_path / "interrupted"), last_checkpoint(run[0]))


def test_a_finished_run_returns_its_scores_again(run):
    folder, scores, _ = run
    assert own_loop.main(own_loop.Config(epochs=8, run=str(folder))) == scores


@pytest.mark.thorough
def test_the_accuracy_of_a_full_run_is_above_0_975(tmp_path):
    assert own_loop.main(own_loop.Config(run=str(tmp_path)))["accuracy"] > 0.975
