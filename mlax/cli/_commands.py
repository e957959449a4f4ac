"""The commands `mlax demo`, `mlax train` and `mlax cache`."""

import ast
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlax
from mlax._compilation_cache import (
    clear_compilation_cache,
    compilation_cache_root,
    compilation_cache_size,
    enable_compilation_cache,
)
from mlax._malloc import keep_freed_memory
from mlax._supervision import STEP_FOLDER
from mlax.cli._script import config_type, load_script, parse_config, run_script, takes_config

FOLDER_FIELDS = ("run", "out")  # the names that examples give to their output folder


def demo(name: str, list: bool, args: Sequence[str]) -> int:
    """Run an example in a folder where it overwrites nothing, or list all examples."""
    found = examples()
    if list:
        print("\n".join(example_lines()))
        return 0
    if name not in found:
        raise SystemExit(f"mlax demo: there is no example {name!r}; there are {', '.join(found) or 'none'}.")
    _prepare_process()
    path = found[name]
    if not takes_config(path):
        run_script(path, args)
        return 0
    module = load_script(path)
    module.main(parse_config(module, f"mlax demo {name}", args, _default_folder(config_type(module), args)))
    return 0


def examples() -> dict[str, Path]:
    """The examples by name."""
    return {file.stem: file for file in sorted(examples_folder().glob("*.py")) if not file.stem.startswith("_")}


def examples_folder() -> Path:
    """Where the examples are: inside the package in a wheel, beside it in the repository."""
    package = Path(mlax.__file__).parent
    return package / "examples" if (package / "examples").is_dir() else package.parent / "examples"


def example_lines() -> list[str]:
    """A line for each example: its name and what it does."""
    found = examples()
    width = max(map(len, found), default=0) + 2
    return [f"{name:{width}}{_first_sentence(path)}" for name, path in found.items()]


def _default_folder(kind: Any, args: Sequence[str]) -> dict[str, Any]:
    """The config field of the output folder, set to a free folder, unless the user has chosen one."""
    options = ("-h", "--help", *(f"--{name}" for name in FOLDER_FIELDS))
    if any(arg.split("=")[0] in options for arg in args):
        return {}
    for field in dataclasses.fields(kind):
        if field.name in FOLDER_FIELDS and isinstance(field.default, str | Path):
            folder, message = free_folder(Path(field.default))
            if message:
                print(message, flush=True)
            return {field.name: type(field.default)(folder)}
    return {}


def _first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return " ".join(docstring.split(". ")[0].split("\n\n")[0].split()).rstrip(".:") + "."


def free_folder(folder: Path) -> tuple[Path, str]:
    """The folder, if it is new or holds an unfinished run, else a new one beside it; and a message about it."""
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not candidate.exists() or not any(candidate.iterdir()):
            return candidate, f"{folder} holds a finished run; this one is saved in {candidate}" * (number > 1)
        runs = [each for each in (candidate, *sorted(candidate.iterdir())) if planned_steps(each) is not None]
        for run in runs:
            reached, steps = last_saved_step(run) or 0, planned_steps(run) or 0
            if reached < steps:
                start = (
                    f"resuming from step {reached} of {steps}" if reached else "starting again, as nothing was saved"
                )
                return candidate, f"{run} holds an unfinished run: {start}"
        if not runs and (candidate / "checkpoints").is_dir():
            return candidate, f"resuming from the checkpoints in {candidate}"
    raise AssertionError("there is always another number")


def last_saved_step(run: Path) -> int | None:
    """The last step saved in the folder of a run."""
    names = [each.parent.name for each in run.glob("checkpoints/step-*/manifest.json")]
    return max((int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name))), default=None)


def planned_steps(run: Path) -> int | None:
    """How many steps the run in a folder was configured for; None if that is unknown."""
    try:
        steps = json.loads((run / "config.json").read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return steps if isinstance(steps, int) else None


def train(script: str, args: Sequence[str]) -> int:
    """Run a script in this process."""
    _prepare_process()
    run_script(script, args)
    return 0


def _prepare_process() -> None:
    """What makes training start and run faster, before JAX is imported."""
    enable_compilation_cache()
    keep_freed_memory()


def cache(clear: bool) -> int:
    """Say where compiled programs are kept and how large they are, or delete them."""
    (count, size), root = compilation_cache_size(), compilation_cache_root()
    if clear:
        clear_compilation_cache()
    programs = f"{count} compiled program{'s' * (count != 1)}, {size / 2**20:,.1f} MiB"
    print(f"deleted {programs}: {root}" if clear else f"{root}: {programs}; delete them by mlax cache --clear")
    return 0
