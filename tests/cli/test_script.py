import sys

import pytest

from mlax.cli import main

CONFIG = '''
"""Train something."""
from __future__ import annotations
import dataclasses

@dataclasses.dataclass(frozen=True)
class Config:
    """What can be chosen."""
    steps: int = 3  # how many
    rate: float = 0.1

def main(config: Config):
    print("trained", config)

if __name__ == "__main__":
    raise RuntimeError("this is not run")
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as it was")

    def write(text):
        (tmp_path / "script.py").write_text(text)
        return str(tmp_path / "script.py")

    return write


def test_the_fields_of_a_dataclass_become_options(script, capsys):
    assert main(["train", script(CONFIG), "--steps", "7"]) == 0
    assert capsys.readouterr().out == "trained Config(steps=7, rate=0.1)\n"


def test_help_for_a_script_lists_its_options(script, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", script(CONFIG), "--help"])
    words = capsys.readouterr().out
    assert all(word in words for word in ("Train something.", "--steps", "how many", "--rate", "0.1"))


def test_a_script_without_config_runs_as_under_python(script, capsys):
    text = "import sys\nassert __name__ == '__main__'\nprint(sys.argv[1:])"
    assert main(["train", script(text), "--steps", "7"]) == 0
    assert capsys.readouterr().out == "['--steps', '7']\n"


@pytest.mark.parametrize("argument", ["config", "steps: int = 3"])
def test_a_script_that_never_calls_its_main_is_refused(argument, script):
    text = f"class Config:\n    steps = 3\n\ndef main({argument}):\n    print('trained')\n"
    with pytest.raises(SystemExit, match=r"defines `main\(.*\)` but does not call it; .* `def main\(config: Config\)`"):
        main(["train", script(text), "--steps", "4"])


def test_a_script_that_calls_its_main_with_a_plain_value_runs_as_under_python(script, capsys):
    text = "def main(steps: int = 3):\n    print('trained', steps)\n\nif __name__ == '__main__':\n    main(5)\n"
    assert main(["train", script(text)]) == 0
    assert capsys.readouterr().out == "trained 5\n"


def test_a_script_that_would_run_twice_is_refused(script, capsys):
    text = CONFIG.partition("if __name__")[0] + "main(Config())\n"
    with pytest.raises(SystemExit, match=r"line 15 of .* calls main .*it would run twice; put the call below"):
        main(["train", script(text)])
    assert capsys.readouterr().out == ""


def test_a_missing_script_is_reported(tmp_path):
    with pytest.raises(SystemExit, match=r"there is no script .*nowhere\.py"):
        main(["train", str(tmp_path / "nowhere.py")])
