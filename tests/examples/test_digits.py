"""The digits example: for six epochs, and as the demo runs it with `--thorough`."""

import numpy as np
import pytest
from matplotlib.image import imread

from tests.examples.example_modules import compilations_after_the_first_step, load_example

digits = load_example("digits")


@pytest.fixture(scope="module")
def run(tmp_path_factory, events):
    """The folder of a run of six epochs, its scores, and its events."""
    folder = tmp_path_factory.mktemp("runs") / "new" / "digits"
    scores = digits.main(digits.Config(steps=132, run=str(folder)))
    return folder, scores, list(events)


def test_six_epochs_reach_an_accuracy_of_0_96(run):
    _, scores, _ = run
    assert scores["accuracy"] > 0.96


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_the_accuracy_of_a_full_run_is_above_0_985(tmp_path, seed):
    assert digits.main(digits.Config(seed=seed, run=str(tmp_path)))["accuracy"] > 0.985


def test_nothing_is_compiled_after_the_first_step_although_the_last_batch_of_an_epoch_is_smaller(run):
    data, _ = digits.load()
    assert len(data["digit"]) % digits.Config().batch
    assert compilations_after_the_first_step(run[2]) == 0


@pytest.mark.parametrize("name", ["curves.png", "predictions.png"])
def test_a_plot_is_a_png_that_is_not_blank(run, name):
    picture = imread(run[0] / name, format="png")
    assert picture.shape[1] >= 1000
    assert np.std(picture[..., :3]) > 0.05


def test_the_report_gives_the_accuracy_and_links_the_plots(run):
    folder, scores, _ = run
    report = (folder / "report.md").read_text()
    assert f"{scores['accuracy']:.4g}" in report
    assert "](curves.png)" in report


def test_the_test_set_is_a_quarter_of_each_digit_and_disjoint_from_the_training_set():
    data, test = digits.load()
    assert np.abs(np.bincount(test["digit"]) - np.bincount(data["digit"]) / 3).max() < 1
    seen = {image.tobytes() for image in data["image"]}
    assert not any(image.tobytes() in seen for image in test["image"])
