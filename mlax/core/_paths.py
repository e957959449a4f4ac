"""Paths: how a place in a tree or in a description is written, and patterns over them."""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def flat(tree: Any) -> dict[str, Any]:
    """The leaves of nested dicts by path, in JAX's order: `{"a": {"b": 1}}` gives `{"a/b": 1}`. None is no leaf."""
    return dict(_walk(tree, ""))


def nested(leaves: Iterable[tuple[str, Any]]) -> Any:
    """The nested dicts whose leaves are these (path, leaf) pairs; None if there are none."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path!r} lies below {parent!r}, which is a leaf already; rename one of them.")
        if name in node:
            raise ValueError(f"{path!r} is there already; rename one of the two.")
        node[name] = leaf
    return tree or None


def filled_in(tree: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Nested dicts with these leaves, by path, in place of their own; `path` is what the tree itself is called."""
    if isinstance(tree, dict):
        return {name: filled_in(below, leaves, f"{path}/{name}" if path else name) for name, below in tree.items()}
    return None if tree is None else leaves[path]


def matching(patterns: Iterable[str], paths: Iterable[str]) -> list[str]:
    """The paths that match any of the patterns, in their own order; a pattern that matches none is an error.

    In a pattern `*` stands for anything inside one name, and `**` for any number of whole names.
    """
    paths = list(paths)
    found: set[str] = set()
    for pattern in patterns:
        hits = [path for path in paths if matches(pattern, path)]
        if not hits:
            raise KeyError(no_such(pattern, paths))
        found.update(hits)
    return [path for path in paths if path in found]


def matches(pattern: str, path: str) -> bool:
    """Whether one path matches one pattern."""
    return _regex(pattern).fullmatch(f"{path}/") is not None


def no_such(path: str, paths: Iterable[str]) -> str:
    """The words for a path or pattern that matches nothing, with the closest that would."""
    paths = list(paths)
    name = path.split("/")[-1]
    same = [other for other in paths if other.split("/")[-1] == name]
    close = same or difflib.get_close_matches(path, paths, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(paths[:8]) or 'none'}."
    return f"{path!r} matches nothing; {hint}"


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    """What matches a path with a slash after each of its names."""
    names = [
        "(?:[^/]+/)*" if name == "**" else re.escape(name).replace(r"\*", "[^/]*") + "/" for name in pattern.split("/")
    ]
    return re.compile("".join(names))


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, value in sorted(tree.items()):
            yield from _walk(value, f"{path}/{name}" if path else name)
    elif tree is not None:
        yield path, tree
