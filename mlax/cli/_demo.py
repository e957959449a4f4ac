"""`mlax demo`: an example from the repository, or from the installed package."""

import ast
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlax
from mlax.cli._cache import keep_compiled
from mlax.cli._folders import free_folder
from mlax.cli._script import config_type, loaded, parsed, run_script, takes_config

FIELDS = ("run", "out")  # what examples call the folder that they fill


def run(name: str, list: bool, args: Sequence[str]) -> int:
    """Run an example in a folder where nothing is lost, or list all examples."""
    found = examples()
    if list:
        width = max(map(len, found), default=0) + 2
        print("\n".join(f"{each:{width}}{_first_sentence(path)}" for each, path in found.items()))
        return 0
    if name not in found:
        raise SystemExit(f"mlax demo: there is no example {name!r}; there are {', '.join(found) or 'none'}.")
    keep_compiled()
    path = found[name]
    if not takes_config(path):
        run_script(path, args)
        return 0
    module = loaded(path)
    module.main(parsed(module, path, args, _free(config_type(module), args)))
    return 0


def examples() -> dict[str, Path]:
    """The examples by name: in the wheel they lie in the package, in the repository beside it."""
    package = Path(mlax.__file__).parent
    folder = next((each for each in (package / "examples", package.parent / "examples") if each.is_dir()), None)
    files = sorted(folder.glob("*.py")) if folder else []
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def _free(kind: Any, args: Sequence[str]) -> dict[str, Any]:
    """The field for the folder with a folder that may be filled, unless the user has said which one."""
    given = [arg for arg in args if arg in ("-h", "--help") or arg.split("=")[0] in [f"--{name}" for name in FIELDS]]
    for field in () if given else dataclasses.fields(kind):
        if field.name in FIELDS and isinstance(field.default, str | Path):
            folder, words = free_folder(Path(field.default))
            if words:
                print(words, flush=True)
            return {field.name: type(field.default)(folder)}
    return {}


def _first_sentence(path: Path) -> str:
    words = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return " ".join(words.split(". ")[0].split("\n\n")[0].split()).rstrip(".:") + "."
