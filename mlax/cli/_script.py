"""Run a Python script, with options from the dataclass that its main(config) takes."""

import ast
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


def run_script(path: str | os.PathLike[str], args: Sequence[str], defaults: dict[str, Any] | None = None) -> None:
    """Run a script with these arguments. `defaults` stand for those of fields that the arguments do not give."""
    path = Path(path)
    if not path.is_file():
        raise SystemExit(f"mlax: there is no script {path}.")
    if not faulthandler.is_enabled():
        faulthandler.enable()
    sys.path.insert(0, str(path.resolve().parent))
    if not takes_config(path):
        sys.argv = [str(path), *args]
        runpy.run_path(str(path), run_name="__main__")
        return
    module = load_script(path)
    module.main(parse_config(module, path, args, defaults or {}))


def takes_config(path: Path) -> bool:
    """Whether the script has a function main of one argument with a type. It is read, not run."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError:
        return False  # running it shows where
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    return any(len(each.args.args) == 1 and each.args.args[0].annotation is not None for each in mains)


def load_script(path: Path) -> ModuleType:
    """The script as a module, so that what it does under `__name__ == "__main__"` is left out."""
    name = f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"mlax: {path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    return module


def config_type(module: ModuleType) -> Any:
    """The type of main's argument."""
    (kind,) = [kind for name, kind in typing.get_type_hints(module.main).items() if name != "return"]
    return kind


def parse_config(module: ModuleType, path: Path, args: Sequence[str], defaults: dict[str, Any]) -> Any:
    """The configuration that the arguments spell."""
    try:
        import tyro
    except ImportError:
        raise SystemExit("mlax: options from a dataclass need tyro: pip install 'mlax[train]'.") from None
    kind = config_type(module)
    words = (module.__doc__ or "").strip()
    given = {"default": kind(**defaults)} if defaults else {}
    return tyro.cli(kind, args=list(args), prog=f"mlax train {path}", description=words, **given)


CACHE_OPTIONS = {
    "jax_compilation_cache_dir": None,  # filled in below
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def compilation_cache_folder() -> Path:
    """Where compiled programs are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlax" / "compiled"


def enable_compilation_cache() -> None:
    """Switch JAX's cache on, unless the user has set it: by JAX's own variables, so that JAX need not be loaded yet."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    options = CACHE_OPTIONS | {"jax_compilation_cache_dir": str(compilation_cache_folder())}
    os.environ |= {name.upper(): str(value) for name, value in options.items()}
    if "jax" in sys.modules:
        import jax

        for name, value in options.items():
            jax.config.update(name, value)
