import re
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
    assert all(word in done.stdout for word in ("demo", "train", "launch", "inspect", "doctor", "plot", "cache"))
    assert done.stdout.strip().endswith("False")


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mlax {mlax.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["train"],
        ["train", "--steps", "3", "script.py"],
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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plto"], "there is no command 'plto'; did you mean plot?"),
        (["train"], "which script?"),
        (["train", "--steps", "3", "c.py"], "the script comes first, then its options: mlax train c.py --steps 3"),
    ],
)
def test_an_invalid_command_is_refused_with_the_one_to_type(argv, words, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert words in capsys.readouterr().err


def test_mlax_alone_prints_its_help(capsys):
    assert main([]) == 0
    assert "usage: mlax" in capsys.readouterr().out


def test_submodules_and_names_of_core_are_imported_on_first_use():
    assert mlax.Series is mlax.core.Series
    assert {"Series", "nn", "train"} <= set(dir(mlax))
    with pytest.raises(AttributeError, match="mlax has no 'Serie'; it has"):
        mlax.Serie  # noqa: B018


def help_of(capsys, *argv):
    with pytest.raises(SystemExit, match="0"):
        main([*argv, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [(), ("demo",), ("train",)])
def test_help_lists_every_example_with_what_it_does(argv, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = help_of(capsys, *argv)
    assert max(map(len, printed.splitlines())) <= 80
    assert [name for name in re.findall(r"^  (\w+) +[A-Z]", printed, re.M) if name in examples()] == list(examples())
    assert "digits           Train a convolutional network on scikit-learn's 1,797\n" in printed


@pytest.mark.parametrize("command", ["demo", "train", "launch", "inspect", "doctor", "plot", "cache"])
def test_help_of_every_command_shows_a_call(command, capsys):
    assert re.search(rf"^  mlax {command}\b", help_of(capsys, command), re.M)


def test_help_says_where_results_are_written(capsys):
    assert "weights to runs/digits" in help_of(capsys)
    assert "pictures to\nruns/NAME" in help_of(capsys, "demo")
    assert str(next(iter(examples().values())).parent) in help_of(capsys, "demo")
    assert "`run` folder of train.fit" in " ".join(help_of(capsys, "train").split())
    assert "curves.png" in help_of(capsys, "plot")


def test_help_explains_each_option_of_launch_and_what_plot_calls_the_best(capsys):
    words = " ".join((help_of(capsys, "launch") + help_of(capsys, "plot")).split())
    assert "Raise it if a single step, or loading a batch, may take longer" in words
    assert "Raise it if a checkpoint takes longer to write" in words
    assert "of any other metric the smallest and the largest value are shown" in words
