"""Run a Python script, with options from the dataclass that its main(config) takes."""

import ast
import builtins
import faulthandler
import importlib.util
import os
import runpy
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def run_script(path: str | os.PathLike[str], args: Sequence[str]) -> None:
    """Run a script with these arguments."""
    path = Path(path)
    if not path.is_file():
        raise SystemExit(f"mlax: there is no script {path}.")
    if not faulthandler.is_enabled():
        faulthandler.enable()
    if takes_config(path):
        module = load_script(path)
        module.main(parse_config(module, f"mlax train {path}", args))
    else:
        sys.path.insert(0, str(path.resolve().parent))
        _check_runs_main(path)
        sys.argv = [str(path), *args]
        runpy.run_path(str(path), run_name="__main__")


def takes_config(path: Path) -> bool:
    """Whether the script defines main with one argument, annotated with a class. The script is parsed, not run."""
    tree = _parse(path)
    if not any(_is_config_main(each) for each in _mains(tree)):
        return False
    for line in _calls_of_main(tree):
        raise SystemExit(
            f"mlax: line {line} of {path} calls main as soon as the script is imported, so that it would run twice; "
            'put the call below `if __name__ == "__main__":`.'
        )
    return True


def _is_config_main(main: ast.FunctionDef) -> bool:
    arguments = main.args.args
    annotation = arguments[0].annotation if len(arguments) == 1 else None
    is_builtin = isinstance(annotation, ast.Name) and hasattr(builtins, annotation.id)  # such as steps: int
    return annotation is not None and not is_builtin


def _check_runs_main(path: Path) -> None:
    """Refuse a script that only defines things and leaves its main, which has arguments, uncalled: it does nothing."""
    tree = _parse(path)
    is_used = any(isinstance(node, ast.Name) and node.id == "main" for node in ast.walk(tree))
    for main in _mains(tree):
        if main.args.args and not is_used and all(map(_is_definition, tree.body)):
            raise SystemExit(
                f"mlax: {path} defines `main({ast.unparse(main.args)})` but does not call it; for options on the "
                "command line write `def main(config: Config)`, where Config is a dataclass, and else call main."
            )


def _is_definition(node: ast.stmt) -> bool:
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    return isinstance(node, kinds) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError:
        return ast.Module([], [])  # running it shows where


def _mains(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]


def _calls_of_main(tree: ast.Module) -> list[int]:
    """The lines where the script calls main on import."""
    values = [node.value for node in tree.body if isinstance(node, ast.Expr | ast.Assign)]
    calls = [value for value in values if isinstance(value, ast.Call) and isinstance(value.func, ast.Name)]
    return [call.lineno for call in calls if call.func.id == "main"]  # pyright: ignore[reportAttributeAccessIssue]


def load_script(path: Path) -> ModuleType:
    """Import the script as a module, so that its `if __name__ == "__main__"` does not run.

    It can import its neighbours, as under `python script.py`.
    """
    sys.path.insert(0, str(path.resolve().parent))
    name = f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"mlax: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    return module


def config_type(module: ModuleType) -> Any:
    """The type of main's argument."""
    (kind,) = [kind for name, kind in typing.get_type_hints(module.main).items() if name != "return"]
    return kind


def parse_config(module: ModuleType, command: str, args: Sequence[str], defaults: dict[str, Any] | None = None) -> Any:
    """The configuration from the arguments of a command; `defaults` override the dataclass's defaults."""
    try:
        import tyro
    except ImportError:
        raise SystemExit("mlax: options from a dataclass need tyro: pip install 'mlax[train]'.") from None
    kind = config_type(module)
    description = (module.__doc__ or "").strip().replace(f"python examples/{Path(module.__file__ or '').name}", command)
    options = {"default": kind(**defaults)} if defaults else {}
    return tyro.cli(kind, args=list(args), prog=command, description=description, **options)
