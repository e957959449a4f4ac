"""Surgery on variable trees, by path: which leaves, apart, together, under other names, how many."""

import math
from collections.abc import Mapping
from typing import Any

from mlax.core._layer import Layer, Tree
from mlax.core._notes import brief
from mlax.core._paths import NoSuch, flat, matches, matching, nested, no_such


def paths(tree: Tree) -> tuple[str, ...]:
    """The path of each leaf: `{"up": {"kernel": ...}}` gives `("up/kernel",)`."""
    return tuple(flat(tree))


def select(tree: Tree, *patterns: str) -> Tree:
    """The leaves that match any of the patterns, where they stand; the rest is left out."""
    leaves = flat(tree)
    return nested((path, leaves[path]) for path in matching(patterns, leaves))


def freeze(tree: Tree, *patterns: str) -> tuple[Tree, Tree]:
    """Split a tree in two: (what no pattern matches, what the patterns freeze).

    Differentiate and update the first; give the layer `merge(first, second)`.
    """
    leaves = flat(tree)
    chosen = set(matching(patterns, leaves))
    live = nested((path, leaf) for path, leaf in leaves.items() if path not in chosen)
    return live, select(tree, *patterns)


def merge(*trees: Tree) -> Tree:
    """One tree with the leaves of all; a leaf that two of them have is an error."""
    leaves: dict[str, Any] = {}
    for tree in trees:
        both = leaves.keys() & flat(tree).keys()
        if both:
            raise ValueError(f"merge: two trees have the leaf {min(both)!r}; leave it out of one, or use replace.")
        leaves.update(flat(tree))
    return nested(leaves.items())


def rename(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The same leaves with some paths, of leaves or of whole branches, changed: `{"old/path": "new/path"}`."""
    leaves = flat(tree)
    moved = dict.fromkeys(leaves, "")
    for old, new in names.items():
        hits = [path for path in leaves if path == old or path.startswith(f"{old}/")]
        if not hits:
            raise NoSuch(no_such(old, leaves))
        for path in hits:
            if moved[path]:
                raise ValueError(f"rename: {path!r} is named by two of the old paths; name it once.")
            moved[path] = new + path.removeprefix(old)
    return nested((moved[path] or path, leaf) for path, leaf in leaves.items())


def count(tree: Tree, *patterns: str) -> int:
    """How many numbers the leaves hold: all of them, or those that match any of the patterns."""
    if isinstance(tree, Layer | tuple):
        came = f"the model {brief(tree)}" if isinstance(tree, Layer) else f"a {type(tree).__name__}"
        raise TypeError(f"count takes variables, as init returns them, but {came} came; write count(trainables).")
    leaves = flat(tree).items()
    chosen = [leaf for path, leaf in leaves if not patterns or any(matches(pattern, path) for pattern in patterns)]
    return sum(math.prod(leaf.shape) for leaf in chosen)
