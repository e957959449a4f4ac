"""The digits example, run for a few epochs."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

FILE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.fixture(scope="module")
def digits():
    spec = importlib.util.spec_from_file_location("digits", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    """Where a run of six epochs wrote, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "new" / "digits"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        digits.main(["--epochs", "6", "--seed", "1", "--out", str(out)])
    return out, printed.getvalue()


def test_a_few_epochs_read_most_test_images_rightly(run):
    _, printed = run
    (accuracy,) = re.findall(r"^test accuracy ([\d.]+)% in [\d.]+ s$", printed, re.MULTILINE)
    assert float(accuracy) > 94


def test_the_report_names_the_accuracy_that_was_printed_and_links_files_that_exist(run):
    out, printed = run
    report = (out / "report.md").read_text()
    (accuracy,) = re.findall(r"test accuracy ([\d.]+%)", printed)
    assert f"Test accuracy **{accuracy}**" in report
    assert re.findall(r"\]\((.+)\)", report) == ["curves.png", "predictions.png"]


@pytest.mark.parametrize("name", ["curves.png", "predictions.png"])
def test_a_picture_is_a_png_with_something_on_it_and_its_path_is_printed(run, name):
    out, printed = run
    picture = imread(out / name, format="png")
    assert picture.shape[1] == 1500
    assert np.std(picture[..., :3]) > 0.05
    assert f"{out / name}\n" in printed


def test_without_a_terminal_progress_is_plain_lines(run):
    _, printed = run
    assert re.search(r"^step 126/126  loss [\d.]+  train [\d.]+%  test [\d.]+%  0:00:00 left$", printed, re.MULTILINE)
    assert "\x1b" not in printed


def test_the_test_images_are_a_quarter_of_each_digit_and_none_is_trained_on(digits):
    (images, labels), (test_images, test_labels) = digits.load()
    assert np.abs(np.bincount(test_labels) - np.bincount(labels) / 3).max() < 1
    seen = {image.tobytes() for image in np.asarray(images)}
    assert not any(image.tobytes() in seen for image in np.asarray(test_images))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epochs", "0"], "argument --epochs: must be at least 1, not 0"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--seed", "-1"], "argument --seed: must be from 0 to 4294967295, not -1"),
        (["--out", str(FILE)], "argument --out: cannot be made a folder"),
    ],
)
def test_a_bad_argument_ends_the_program_with_a_message_that_names_it(
    digits, capsys, monkeypatch, tmp_path, argv, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        digits.main(argv)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
