"""Paths of leaves and of parts, such as `blocks/norm/scale`, and patterns over them."""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

EXCLUDE = "!"  # the first character of a pattern for what is left out
STACKED = "stacked"  # the name in a path below which every leaf has one more leading axis: see `stacked_axes`


class NoMatch(KeyError):
    """A KeyError whose message is printed without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def flatten_paths(tree: Any) -> dict[str, Any]:
    """The leaves of nested dicts by path, in JAX's order: `{"a": {"b": 1}}` gives `{"a/b": 1}`. None is not a leaf."""
    return dict(_walk(tree, ""))


def unflatten_paths(leaves: Iterable[tuple[str, Any]]) -> Any:
    """The inverse of `flatten_paths`, from (path, leaf) pairs; None if there are none."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path!r} is below {parent!r}, which is already a leaf; rename one of them.")
        if name in node:
            raise ValueError(f"{path!r} occurs twice; rename one of the two.")
        node[name] = leaf
    return tree or None


def stacked_axes(path: str) -> int:
    """The number of leading axes of a leaf that count layers: one for each name "stacked" in its path.

    `Repeat`, and `Map` with separate variables for each slice, put their variables under that name.
    """
    return path.split("/").count(STACKED)


def replace_leaves(tree: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Nested dicts with each leaf replaced by that at its path in `leaves`; `path` is that of the tree itself."""
    if isinstance(tree, dict):
        return {name: replace_leaves(below, leaves, f"{path}/{name}" if path else name) for name, below in tree.items()}
    return None if tree is None else leaves[path]


def as_patterns(patterns: Any) -> tuple[Any, ...]:
    """One pattern or several as a tuple."""
    return tuple(patterns) if isinstance(patterns, tuple | list) else (patterns,)


def match_paths(patterns: Iterable[str], paths: Iterable[str]) -> list[str]:
    """The paths that match the patterns, in their order; a pattern without a match raises NoMatch.

    In a pattern `*` matches any characters of one name, and `**` any number of whole names. What matches a pattern
    that starts with `!` is excluded: from what the others match or, if all of them start with `!`, from all paths.
    """
    patterns, paths = tuple(patterns), list(paths)
    check_patterns(patterns, paths)
    found = [path for path in paths if matches(patterns, path)]
    if patterns and not found:
        raise NoMatch(f"{', '.join(map(repr, patterns))} exclude all that they match; leave out a pattern with '!'.")
    return found


def check_patterns(patterns: Iterable[str], paths: Iterable[str]) -> None:
    """Raise NoMatch if one of the patterns matches none of the paths; one with `!`, if it excludes none of them."""
    paths = list(paths)
    for pattern in patterns:
        if not any(matches(pattern.removeprefix(EXCLUDE), path) for path in paths):
            raise NoMatch(no_match_message(pattern, paths))


def matches(patterns: str | tuple[str, ...], path: str) -> bool:
    """Whether a path matches a pattern, or several patterns together; see `match_paths`. Nothing matches none."""
    included, excluded = _split(as_patterns(patterns))
    return any(_is_match(each, path) for each in included) and not any(_is_match(each, path) for each in excluded)


@functools.cache
def _split(patterns: tuple[str, ...]) -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """The patterns of what is included, all if there are only others, and those of what is excluded."""
    excluded = [pattern.removeprefix(EXCLUDE) for pattern in patterns if pattern.startswith(EXCLUDE)]
    included = [pattern for pattern in patterns if not pattern.startswith(EXCLUDE)] or ["**"] * bool(excluded)
    return list(map(_regex, included)), list(map(_regex, excluded))


def _is_match(regex: re.Pattern[str], path: str) -> bool:
    # the empty path is that of a bare array, which `**` matches
    return regex.fullmatch(f"{path}/") is not None or (not path and regex.fullmatch("") is not None)


def no_match_message(path: str, paths: Iterable[str]) -> str:
    """The message for a path or pattern without a match, with the closest path."""
    paths = [other for other in paths if other]  # the path of the model itself is empty
    mark, path = (EXCLUDE, path[1:]) if path.startswith(EXCLUDE) else ("", path)
    return f"{mark + path!r} {'excludes' if mark else 'matches'} nothing; {_suggestion(mark, path, paths)}"


def _suggestion(mark: str, path: str, paths: list[str]) -> str:
    if hint := _stack_hint(path, paths):
        return hint
    if renamed := _rename(path, paths):
        return f"did you mean {mark + renamed!r}?"
    if respelt := _respell(path, paths):
        return f"did you mean {mark + respelt!r}?"
    close = max(paths, key=lambda other: _similarity(path, other), default="")
    near = _similarity(path, close)[0] >= 0.6
    return f"did you mean {mark + _like(path, close)!r}?" if near else f"there are {_few(paths)}."


_LEAVES_ELSEWHERE = {  # a leaf's name in other libraries: its names here
    "beta": ("shift",),
    "embedding": ("table",),
    "gamma": ("scale",),
    "running_mean": ("mean",),
    "running_var": ("var",),
    "weight": ("kernel", "scale", "table"),
}


def _rename(path: str, paths: list[str]) -> str | None:
    """The path with its last name replaced by what the leaf is called here, if that matches one."""
    *parents, name = path.split("/")
    here = ["/".join((*parents, other)) for other in _LEAVES_ELSEWHERE.get(name, ())]
    return next((other for other in here if any(matches(other, each) for each in paths)), None)


def _respell(pattern: str, paths: list[str]) -> str | None:
    """The pattern with each name that occurs in no path replaced by the closest that does, if that matches a path."""
    known = {name for path in paths for name in path.split("/")}
    if "*" not in pattern:
        return None
    names = [
        name if "*" in name or name in known else next(iter(difflib.get_close_matches(name, known, n=1)), name)
        for name in pattern.split("/")
    ]
    respelt = "/".join(names)
    return respelt if any(matches(respelt, path) for path in paths) else None


def _stack_hint(path: str, paths: list[str]) -> str | None:
    """What to write for a path with an index into a stack of layers."""
    names = path.split("/")
    for place, name in enumerate(names):
        stacked = "/".join((*names[:place], STACKED, *names[place + 1 :]))
        if name.isdigit() and any(matches((stacked, f"{stacked}/**"), each) for each in paths):
            return f"the layers of a Repeat or Map are stacked: index {name} of the first axis of {stacked!r}."
    return None


def _like(pattern: str, path: str) -> str:
    """The pattern for all below the part that was meant, if the pattern is one, else the path."""
    names = pattern.split("/")
    below = "/".join((*path.split("/")[: len(names) - 1], "**"))
    return below if names[-1] == "**" and "*" not in "".join(names[:-1]) and matches(below, path) else path


def _similarity(path: str, other: str) -> tuple[float, int]:
    """A score of similarity: name by name from either end, then by the difference in depth.

    The name of a stack does not count: it is easily forgotten.
    """
    names = [name for name in path.split("/") if name not in ("**", STACKED)]
    others = [name for name in other.split("/") if name != STACKED]
    directions = (names, others), (names[::-1], others[::-1])
    scores = [sum(map(_ratio, *each)) for each in directions]
    return max(scores) / max(len(names), 1), -abs(len(names) - len(others))


def _ratio(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def _few(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "") or "none"


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    """A regular expression for a path with a slash after each of its names."""
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
