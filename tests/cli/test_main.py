import subprocess
import sys
import time

import pytest

import mlax
from mlax.cli import examples, main


def test_help_lists_every_command_without_importing_jax():
    code = "import sys, mlax.cli\ntry: mlax.cli.main(['--help'])\nfinally: print('jax' in sys.modules)"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - began < 5  # 0.1 s on an idle machine
    assert all(word in done.stdout for word in ("demo", "train", "launch", "doctor", "plot"))
    assert done.stdout.strip().endswith("False")


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mlax {mlax.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["launch", "script.py"],
        ["launch", "-n", "0", "script.py"],
        ["launch", "-n", "1", "--hang", "nan", "script.py"],
        ["launch", "-n", "1", "--restarts", "-1", "script.py"],
    ],
)
def test_an_invalid_command_exits_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as refused:
        main(argv)
    assert refused.value.code == 2
    assert "usage: mlax" in capsys.readouterr().err


def test_submodules_and_names_of_core_are_imported_on_first_use():
    assert mlax.Series is mlax.core.Series
    assert {"Series", "nn", "train"} <= set(dir(mlax))
    with pytest.raises(AttributeError, match="mlax has no 'Serie'; it has"):
        mlax.Serie  # noqa: B018


def test_help_lists_the_examples_and_explains_each_option_of_launch(capsys):
    for argv in (["demo", "--help"], ["launch", "--help"], ["plot", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(argv)
    words = " ".join(capsys.readouterr().out.split())
    assert all(name in words.replace("- ", "-") for name in examples())
    assert "Raise it if a single step, or loading a batch, may take longer" in words
    assert "Raise it if a checkpoint takes longer to write" in words
    assert "of any other metric the smallest and the largest value are shown" in words
