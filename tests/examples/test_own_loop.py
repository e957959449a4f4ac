"""The loop of one's own: it learns, goes on after it was stopped, and compiles once."""

import numpy as np
import pytest

from mlax import files
from tests.examples.conftest import compilations_after_the_first_step, loaded

own_loop = loaded("own_loop")


def weights(folder):
    (file,) = sorted(folder.glob("step-*"))[-1].glob("arrays-*.safetensors")
    return {"/".join(path): leaf for path, leaf in leaves(files.load(file))}


def leaves(tree, path=()):
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [leaf for name, branch in tree.items() for leaf in leaves(branch, (*path, name))]


@pytest.fixture(scope="module")
def run(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("runs") / "own_loop"
    scores = own_loop.main(own_loop.Config(epochs=8, run=str(folder)))
    return folder, scores, list(events)


def test_eight_epochs_read_most_test_images_rightly(run):
    assert run[1]["accuracy"] > 0.95


def test_nothing_is_compiled_after_the_first_step(run):
    assert compilations_after_the_first_step(run[2]) == 0


def test_a_run_that_was_broken_off_ends_with_the_same_weights_to_the_bit(run, tmp_path, monkeypatch):
    config = own_loop.Config(epochs=8, run=str(tmp_path / "broken"))

    def interrupted(words, **_):
        if words.startswith("66/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(own_loop, "print", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        own_loop.main(config)
    monkeypatch.undo()
    assert own_loop.main(config) == run[1]
    broken, whole = weights(tmp_path / "broken"), weights(run[0])
    assert broken.keys() == whole.keys()
    for name, leaf in whole.items():
        np.testing.assert_array_equal(broken[name], leaf, err_msg=name)


def test_a_finished_run_gives_its_scores_again(run):
    folder, scores, _ = run
    assert own_loop.main(own_loop.Config(epochs=8, run=str(folder))) == scores


@pytest.mark.thorough
def test_975_in_a_thousand_test_images_are_read_rightly(tmp_path):
    assert own_loop.main(own_loop.Config(run=str(tmp_path)))["accuracy"] > 0.975
