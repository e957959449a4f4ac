"""Surgery: edit models and variable trees by path."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlax.core._composite import Composite, parts_of
from mlax.core._errors import short_repr
from mlax.core._frozen import with_fields
from mlax.core._layer import Layer, Tree
from mlax.core._paths import NoMatch, flatten_paths, match_paths, matches, no_match_message, unflatten_paths
from mlax.core._wrappers import Wrapper

T = TypeVar("T")
L = TypeVar("L", bound=Layer)


def get(source: Any, path: str) -> Any:
    """The part of a model, or the leaf or branch of a tree, at `path`: `get(model, "blocks/norm")`.

    A path is the same in a model and in its variables: a wrapper (Repeat, Remat, Mixed...) takes no name.
    """
    if isinstance(source, Layer):
        parts = layers(source)
        if path not in parts:
            raise NoMatch(no_match_message(path, parts))
        return parts[path]
    node = source
    for name in path.split("/"):
        if not isinstance(node, dict) or name not in node:
            raise NoMatch(no_match_message(path, flatten_paths(source)))
        node = node[name]
    return node


def replace(source: T, path: str, new: Any) -> T:
    """A copy of a model or of a tree with `new` at `path`; a pattern puts it at every place that matches."""
    if isinstance(source, Layer):
        chosen = set(match_paths([path], layers(source)))
        return map_layers(source, "", lambda where, layer: layer, lambda where: new if where in chosen else None)
    leaves = flatten_paths(source)
    below = [where for where in leaves if where.startswith(f"{path}/")]
    chosen = [path] if below else match_paths([path], leaves)
    kept = {where: leaf for where, leaf in leaves.items() if where not in below}
    return unflatten_paths({**kept, **dict.fromkeys(chosen, new)}.items())


def override(model: Layer, kind: type | tuple[type, ...], **fields: Any) -> Any:
    """A copy of a model with these fields set on every part of a kind: `override(model, LayerNorm, eps=1e-6)`.

    The model itself counts as a part. If no part is of that kind, that is an error.
    """
    kinds: set[str] = set()
    found: list[Layer] = []

    def changed(where: str, layer: Layer) -> Layer:
        kinds.add(type(layer).__name__)
        if not isinstance(layer, kind):
            return layer
        found.append(layer)
        return with_fields(layer, **fields)

    edited = map_layers(model, "", changed)
    if not found:
        raise ValueError(f"override: no part is a {_names(kind)}; the model is made of {', '.join(sorted(kinds))}.")
    return edited


def layers(model: Layer) -> dict[str, Layer]:
    """Every part of a model by path, parts of parts included, each before its own parts."""
    inner = model
    while isinstance(inner, Wrapper):
        inner = inner.layer
    found: dict[str, Layer] = {}
    for name, part in parts_of(inner).items() if isinstance(inner, Composite) else ():
        found[name] = part
        found.update({f"{name}/{below}": layer for below, layer in layers(part).items()})
    return found


def every(model: Layer) -> list[Layer]:
    """The model, its parts, theirs, and whatever stands inside a wrapper."""
    return [layer for _, layer in find_layers(model, Layer)]


def find_layers(model: Layer, kind: type[L], where: str = "") -> list[tuple[str, L]]:
    """Every layer of a kind in a model with its path, those inside of wrappers and the model itself too."""
    those: list[tuple[str, L]] = []

    def look(where: str, layer: Layer) -> Layer:
        if isinstance(layer, kind):
            those.append((where, layer))
        return layer

    map_layers(model, where, look)
    return those


def map_layers(
    layer: Layer,
    where: str,
    change: Callable[[str, Layer], Layer],
    other: Callable[[str], Layer | None] = lambda where: None,
) -> Any:
    """The layer with `change(path, layer)` in place of everything in it, and then of itself.

    Where `other(path)` gives a layer, that is taken in place of all there is, wrappers too.
    """
    if (given := other(where)) is not None:
        return given
    if isinstance(layer, Composite):
        parts = parts_of(layer)
        new = {
            name: map_layers(part, f"{where}/{name}" if where else name, change, other) for name, part in parts.items()
        }
        new = {name: part for name, part in new.items() if part != parts[name]}
        layer = layer.with_parts(new) if new else layer
    elif isinstance(layer, Wrapper):
        inner = map_layers(layer.layer, where, change, other)
        layer = layer if inner == layer.layer else with_fields(layer, layer=inner)
    return change(where, layer)


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))


def paths(tree: Tree) -> tuple[str, ...]:
    """The path of each leaf: `{"up": {"kernel": ...}}` gives `("up/kernel",)`."""
    return tuple(flatten_paths(tree))


def select(tree: Tree, *patterns: str) -> Tree:
    """The leaves that match any of the patterns, where they stand; the rest is left out."""
    leaves = flatten_paths(tree)
    return unflatten_paths((path, leaves[path]) for path in match_paths(patterns, leaves))


def freeze(tree: Tree, *patterns: str) -> tuple[Tree, Tree]:
    """Split a tree in two: (what no pattern matches, what the patterns freeze).

    Differentiate and update the first; give the layer `merge(first, second)`.
    """
    leaves = flatten_paths(tree)
    chosen = set(match_paths(patterns, leaves))
    live = unflatten_paths((path, leaf) for path, leaf in leaves.items() if path not in chosen)
    return live, select(tree, *patterns)


def merge(*trees: Tree) -> Tree:
    """One tree with the leaves of all; a leaf that two of them have is an error."""
    leaves: dict[str, Any] = {}
    for tree in trees:
        both = leaves.keys() & flatten_paths(tree).keys()
        if both:
            raise ValueError(f"merge: two trees have the leaf {min(both)!r}; leave it out of one, or use replace.")
        leaves.update(flatten_paths(tree))
    return unflatten_paths(leaves.items())


def rename(tree: Tree, names: Mapping[str, str]) -> Tree:
    """The same leaves with some paths, of leaves or of whole branches, changed: `{"old/path": "new/path"}`."""
    leaves = flatten_paths(tree)
    moved = dict.fromkeys(leaves, "")
    for old, new in names.items():
        hits = [path for path in leaves if path == old or path.startswith(f"{old}/")]
        if not hits:
            raise NoMatch(no_match_message(old, leaves))
        for path in hits:
            if moved[path]:
                raise ValueError(f"rename: {path!r} is named by two of the old paths; name it once.")
            moved[path] = new + path.removeprefix(old)
    return unflatten_paths((moved[path] or path, leaf) for path, leaf in leaves.items())


def count(tree: Tree, *patterns: str) -> int:
    """How many numbers the leaves hold: all of them, or those that match any of the patterns."""
    if isinstance(tree, Layer | tuple):
        came = f"the model {short_repr(tree)}" if isinstance(tree, Layer) else f"a {type(tree).__name__}"
        raise TypeError(f"count takes variables, as init returns them, but {came} came; write count(trainables).")
    leaves = flatten_paths(tree).items()
    chosen = [leaf for path, leaf in leaves if not patterns or any(matches(pattern, path) for pattern in patterns)]
    return sum(math.prod(leaf.shape) for leaf in chosen)
