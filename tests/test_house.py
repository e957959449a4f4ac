"""The rules of the package: imports point one way, public names are documented."""

import ast
import importlib
import inspect
from pathlib import Path

import mlax

PACKAGE = Path(mlax.__file__).parent
BELOW = {
    "_jax": set(),
    "core": {"_jax"},
    "ops": {"_jax", "core"},
    "dtypes": {"_jax", "core"},
    "nn": {"_jax", "core", "ops", "dtypes"},
    "optim": {"_jax", "core"},
    "files": {"_jax", "core"},
    "inspect": {"_jax", "core"},
    "place": {"_jax", "core", "inspect", "optim"},
    "train": {"_jax", "core", "dtypes", "files", "inspect", "optim", "place"},
    "cli": {"inspect", "train"},
}


def rooms_imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "mlax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlax."):
            yield node.module.split(".")[1]


def test_imports_point_one_way():
    for room, below in BELOW.items():
        for file in (PACKAGE / room).rglob("*.py"):
            assert set(rooms_imported(file)) <= {room, *below}, file
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(BELOW)


def test_every_public_name_is_documented():
    for room in ("", *(f".{room}" for room in BELOW)):
        module = importlib.import_module(f"mlax{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
                assert (value.__doc__ or "").strip(), f"mlax{room}.{name}"
                assert not value.__doc__.startswith(f"{name}("), f"mlax{room}.{name} has only the dataclass's own words"
