"""The rules of the package: imports point one way and go through doors, and public names are documented."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import mlax

PACKAGE = Path(mlax.__file__).parent
ROOT = PACKAGE.parent
BELOW = {
    "_jax": set(),
    "core": {"_jax"},
    "_gpu": {"_jax", "core"},
    "ops": {"_gpu", "_jax", "core"},
    "dtypes": {"_jax", "core"},
    "nn": {"_gpu", "_jax", "core", "ops", "dtypes"},
    "optim": {"_jax", "core"},
    "files": {"_jax", "core"},
    "inspect": {"_jax", "core"},
    "place": {"_jax", "_objective", "core", "inspect", "optim"},
    "train": {
        "_compilation_cache",
        "_garbage",
        "_jax",
        "_malloc",
        "_metric",
        "_objective",
        "_supervision",
        "core",
        "dtypes",
        "files",
        "inspect",
        "optim",
        "place",
    },
    "zoo": {"_gpu", "_jax", "core", "dtypes", "files", "inspect", "nn", "ops", "place"},
    "cli": {"_compilation_cache", "_malloc", "_supervision", "core", "inspect", "train"},
}


def names_imported(file):
    """The full names of what a file imports from mlax."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.startswith("mlax."))


def names_by_attribute(file):
    """The full names of what a file reads from imported modules of mlax, such as `mlax.train.Step`."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlax":
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.fullmatch(r"\w+(\.\w+)+", text := ast.unparse(node)):
            root, _, rest = text.partition(".")
            yield f"{imported.get(root, root)}.{rest}"


def names_in_strings(file):
    """The names of mlax in strings, as in `monkeypatch.setattr`."""
    strings = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    for text in strings:
        yield from re.findall(r"\bmlax(?:\.\w+)+", text) if isinstance(text, str) else ()


def is_private(name, room=None):
    """Whether a name is inside an underscore module of a room other than `room`."""
    owner, *inner = name.split(".")[1:]
    return owner != room and any(re.match(r"_[^_]", part) for part in inner)


def test_the_rooms_are_those_listed_here():
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(BELOW)


def test_a_room_imports_only_from_rooms_below_it():
    for room, below in BELOW.items():
        for file in (PACKAGE / room).rglob("*.py"):
            rooms = {name.split(".")[1] for name in names_imported(file)}
            assert rooms <= {room, *below}, file


def test_rooms_import_each_other_through_their_doors():
    for room in BELOW:
        for file in (PACKAGE / room).rglob("*.py"):
            assert not [name for name in names_imported(file) if is_private(name, room)], file


def test_whoever_uses_the_package_goes_through_its_doors():
    for folder in ("tests", "examples", "benchmarks", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            names = (*names_imported(file), *names_by_attribute(file), *names_in_strings(file))
            found = {name for name in names if name.startswith("mlax.") and is_private(name)}
            assert not found, file


def test_optax_is_imported_only_by_the_functions_that_use_it():
    for file in PACKAGE.rglob("*.py"):
        lines = [ast.unparse(node) for node in ast.parse(file.read_text()).body]
        assert not [line for line in lines if line.startswith(("import optax", "from optax"))], file


def test_every_public_name_is_documented():
    for room in ("", *(f".{room}" for room in BELOW)):
        module = importlib.import_module(f"mlax{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
                assert (value.__doc__ or "").strip(), f"mlax{room}.{name}"
                assert not value.__doc__.startswith(f"{name}("), f"mlax{room}.{name} has only the dataclass's own words"
