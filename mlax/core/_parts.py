"""The parts of a composite by path: found in its fields, checked, and matched with variables."""

import ast
import collections
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlax._jax import name_hash
from mlax.core._display import Node
from mlax.core._errors import short_repr, wrong_instance_message
from mlax.core._layer import Layer, Tree
from mlax.core._paths import STACKED, unflatten_paths

if TYPE_CHECKING:
    from mlax.core._composite import Composite


OF_SUB = ("call_in_turn", "inference_mode", "rng", "take_bias")  # names that `sub` itself has


@functools.lru_cache(maxsize=4096)
def parts_of(composite: "Composite") -> Mapping[str, Layer]:
    """The parts of a composite by path, edits included, checked once for each distinct description."""
    _check_distinct_keys(composite)
    own = composite.parts()
    if not isinstance(own, Mapping):
        raise TypeError(
            f"{short_repr(composite)}: parts returned a {type(own).__name__}, but must return a dict of layers by name."
        )
    found = dict(walk_parts((), own))
    for name, *keys in found:
        if not _is_part_name(name) or not all(key and "/" not in key for key in keys):
            raise ValueError(
                f"{short_repr(composite)}: {'/'.join((name, *keys))!r} cannot name a part; use an identifier without a "
                f"leading underscore, other than {', '.join(OF_SUB)}, since `wire` calls it as sub.name."
            )
        if STACKED in (name, *keys):
            raise ValueError(
                f"{short_repr(composite)}: a part cannot be called {STACKED!r}, since that name in a path says that "
                "the leaves below have a leading axis of layers, as in Repeat; rename it."
            )
    parts = {**{"/".join(keys): part for keys, part in found.items()}, **dict(composite.edits)}
    for path, part in parts.items():
        check_layer(short_repr(composite), f"part {path!r}", part)
    hashes = {name_hash(name): name for name in parts}
    for name in parts:
        if hashes[name_hash(name)] != name:  # by which `named_key` derives their keys
            raise ValueError(
                f"{short_repr(composite)}: the names {name!r} and {hashes[name_hash(name)]!r} have the same hash, so "
                "both parts would be initialized from the same key; rename one."
            )
    return parts


def split_parts(composite: "Composite", tree: Tree) -> dict[str, Tree]:
    """The variables of each part that has any, by the part's path."""
    found: dict[str, Tree] = {}
    for path in parts_of(composite):
        node = tree
        for name in path.split("/"):
            node = node.get(name) if isinstance(node, dict) else None
        if node is not None:
            found[path] = node
    return found


def join_parts(variables: Mapping[str, Tree]) -> Tree:
    """The inverse of `split_parts`: nested dicts, or None if there are no variables."""
    return unflatten_paths((path, tree) for path, tree in variables.items() if tree is not None)


def check_layer(owner: str, what: str, part: Any) -> None:
    """Raise a TypeError unless `part` is a layer, and say how to make one of it."""
    if not isinstance(part, Layer):
        raise TypeError(wrong_instance_message(owner, what, part, Layer))


def walk_parts(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names, part) of each layer in nested tuples and dicts, and of what should be one, such as a function."""
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    else:
        if isinstance(value, Layer) or callable(value) or len(path) == 1:
            yield path, value
        return
    for name, below in items:
        yield from walk_parts((*path, str(name)), below)


def part_nodes(parts: Mapping[str, Layer]) -> Iterator[Node]:
    """The trees of the parts; equal ones whose names count up, such as block_0 to block_11, as one."""
    for (_, part), group in itertools.groupby(parts.items(), key=lambda item: (_stem(item[0]), item[1])):
        first, *others = (name for name, _ in group)
        node = part._tree(first)
        if others:
            last = others[-1].removeprefix(_stem(first))
            node = node._replace(name=f"{first} to {last}", text=f"{len(others) + 1} x {node.text}")
        yield node


def _stem(name: str) -> str:
    """The name without the number at its end, or the whole name if there is none."""
    return name.rstrip("0123456789") or name


def _is_part_name(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and name not in OF_SUB


def replace_part(value: Any, keys: list[str], part: Layer) -> Any:
    """Nested tuples and dicts with `part` at the path `keys`."""
    if not keys:
        return part
    name, *rest = keys
    if isinstance(value, Mapping):
        return {**value, name: replace_part(value[name], rest, part)}
    return tuple(replace_part(below, rest, part) if str(i) == name else below for i, below in enumerate(value))


def wire_access(path: str) -> str:
    """How `wire` reads the part at a path: `layers[0]` for `layers/0`."""
    name, *keys = path.split("/")
    return name + "".join(f"[{key if key.isdigit() else repr(key)}]" for key in keys)


def unowned_paths(tree: Tree, path: str, parts: Mapping[str, Layer]) -> Iterator[str]:
    """The paths of a variable tree that lead to no part."""
    for name, below in (tree or {}).items():
        where = f"{path}/{name}" if path else name
        if where in parts:
            continue
        if isinstance(below, dict) and any(part.startswith(f"{where}/") for part in parts):
            yield from unowned_paths(below, where, parts)
        else:
            yield where


def _check_distinct_keys(composite: "Composite") -> None:
    names = _repeated_keys(type(composite).parts)
    if names:
        raise ValueError(f"{short_repr(composite)}: `parts` has two entries {names[0]!r}; rename one.")


@functools.cache
def _repeated_keys(parts: Callable[..., Any]) -> list[str]:
    """The keys that a dict in the source of `parts` holds twice, of which Python would silently drop the first."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(parts)))
    except (OSError, SyntaxError, TypeError):  # without source, as in an interactive session
        return []
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [[key.value for key in node.keys if isinstance(key, ast.Constant)] for node in dicts]
    return [str(key) for each in keys for key, times in collections.Counter(each).items() if times > 1]
