import ast
import inspect
import json
import sys

import pytest

from mlax.cli import examples, free_folder, main


def run(folder, steps, *saved):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": steps}))
    for step in saved:
        (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()


def test_examples_are_listed_with_their_descriptions(capsys):
    assert main(["demo", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(examples())
    assert any(line.startswith("digits") and "handwritten digits" in line for line in lines)


def test_an_unknown_example_is_an_error_that_lists_the_known_ones():
    with pytest.raises(SystemExit, match=r"there is no example 'digit'; there are .*digits"):
        main(["demo", "digit"])


def test_a_new_or_empty_folder_is_used(tmp_path):
    assert free_folder(tmp_path / "digits") == (tmp_path / "digits", "")
    (tmp_path / "digits").mkdir()
    assert free_folder(tmp_path / "digits") == (tmp_path / "digits", "")


def test_a_finished_run_is_kept_and_the_next_gets_a_new_folder(tmp_path):
    run(tmp_path / "digits", 20, 10, 20)
    folder, words = free_folder(tmp_path / "digits")
    assert folder == tmp_path / "digits-2" and "finished" in words and "digits-2" in words
    run(tmp_path / "digits-2", 20, 20)
    assert free_folder(tmp_path / "digits")[0] == tmp_path / "digits-3"


def test_an_unfinished_run_is_resumed(tmp_path):
    run(tmp_path / "digits", 20, 5, 10)
    folder, words = free_folder(tmp_path / "digits")
    assert folder == tmp_path / "digits" and "resuming from step 10 of 20" in words


def test_a_folder_of_several_runs_is_resumed_if_one_is_unfinished(tmp_path):
    run(tmp_path / "mixed" / "float32", 20, 20)
    run(tmp_path / "mixed" / "bfloat16", 20)
    folder, words = free_folder(tmp_path / "mixed")
    assert folder == tmp_path / "mixed" and "bfloat16 holds an unfinished run" in words


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "thesis.tex").touch()
    assert free_folder(tmp_path / "digits")[0] == tmp_path / "digits-2"


@pytest.fixture
def demo(tmp_path, monkeypatch, capsys):
    """Run an example whose default folder is `tmp_path / "digits"`; returns the lines that it printed."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as it was")
    (tmp_path / "digits.py").write_text(
        "'Train.\\n\\n    python examples/digits.py [--steps 20]'\n"
        "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    steps: int = 20\n"
        f"    run: str = {str(tmp_path / 'digits')!r}\n"
        "def main(config: Config):\n    print(config.steps, config.run)\n"
    )
    monkeypatch.setattr(inspect.getmodule(examples), "examples", lambda: {"digits": tmp_path / "digits.py"})

    def run_demo(*args):
        assert main(["demo", *args]) == 0
        return capsys.readouterr().out.replace(str(tmp_path), "").splitlines()

    return run_demo


def test_a_demo_after_a_finished_one_prints_its_new_folder(demo, tmp_path):
    assert demo() == ["20 /digits"]
    run(tmp_path / "digits", 20, 20)
    printed = ["/digits holds a finished run; this one is saved in /digits-2", "30 /digits-2"]
    assert demo("digits", "--steps", "30") == printed


def test_options_without_a_name_are_those_of_the_default_example(demo):
    assert demo("--steps", "30") == demo("digits", "--steps", "30") == ["30 /digits"]
    assert demo("--steps=30", "--run", "here") == ["30 here"]


def test_a_folder_that_the_user_chooses_is_used(demo, tmp_path):
    run(tmp_path / "digits", 20, 20)
    assert demo("digits", "--run", "here") == ["20 here"]


def test_help_for_an_example_shows_the_command_that_was_typed(demo, capsys):
    with pytest.raises(SystemExit, match="0"):
        demo("digits", "--help")
    printed = capsys.readouterr().out
    assert "usage: mlax demo digits [" in printed
    assert "    mlax demo digits [--steps 20]" in printed


def test_an_example_may_import_its_neighbours(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "a_neighbour.py").write_text("STEPS = 7\n")
    script = tmp_path / "digits.py"
    script.write_text("import a_neighbour\n" + script.read_text().replace("= 20\n", "= a_neighbour.STEPS\n"))
    assert demo("digits") == ["7 /digits"]


def test_every_option_of_an_example_is_explained():
    for path in examples().values():
        config = next(node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "Config")
        fields = [node for node in config.body if isinstance(node, ast.AnnAssign)]
        lines = path.read_text().splitlines()
        assert all("  # " in lines[field.lineno - 1] for field in fields), path
