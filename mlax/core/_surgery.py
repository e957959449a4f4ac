"""Surgery: inspect and edit models and variable trees by path."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlax.core._composite import Composite
from mlax.core._errors import short_repr, short_signature
from mlax.core._frozen import with_fields
from mlax.core._layer import Layer, Tree
from mlax.core._parts import check_layer, parts_of
from mlax.core._paths import (
    STACKED,
    NoMatch,
    as_patterns,
    flatten_paths,
    match_paths,
    no_match_message,
    unflatten_paths,
)
from mlax.core._wrappers import Wrapper

T = TypeVar("T")
L = TypeVar("L", bound=Layer)


def get(source: Any, path: str) -> Any:
    """The part of a model, or the leaf or subtree of a variable tree, at `path`: `get(model, "blocks/norm")`.

    Paths are the same in a model and in its variables. A wrapper (Remat, Mixed...) adds no name, except for one with
    a stack of variables: `get(model, "blocks")` is a `Repeat`, and `get(model, "blocks/stacked")` the layer inside.
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
    """A copy of a model or of a variable tree with `new` at `path`, or at every path that matches a pattern."""
    if isinstance(source, Layer):
        check_layer("replace", "the new part", new)
        chosen = set(match_paths([path], layers(source)))
        return map_layers(source, "", lambda path, layer: layer, lambda path: new if path in chosen else None)
    leaves = flatten_paths(source)
    below = [where for where in leaves if where.startswith(f"{path}/")]
    chosen = [path] if below else match_paths([path], leaves)
    kept = {where: leaf for where, leaf in leaves.items() if where not in below}
    return unflatten_paths({**kept, **dict.fromkeys(chosen, new)}.items())


def override(model: Layer, kind: type | tuple[type, ...], **fields: Any) -> Any:
    """A copy of a model with fields set on every part of a type: `override(model, LayerNorm, eps=1e-6)`.

    The model itself counts as a part. If no part has that type, it raises a ValueError.
    """
    check_layer("override", "the model", model)
    if not all(isinstance(each, type) for each in (kind if isinstance(kind, tuple) else (kind,))):
        got, name = short_repr(kind), type(kind).__name__
        raise TypeError(f"override: the kind is {got}, but must be a class: override(model, {name}, field=value).")
    if not fields:
        raise TypeError(f"override: pass the fields to set: override(model, {_names(kind)}, field=value).")
    kinds: set[str] = set()
    matches: list[Layer] = []

    def set_fields(path: str, layer: Layer) -> Layer:
        kinds.add(type(layer).__name__)
        if not isinstance(layer, kind):
            return layer
        matches.append(layer)
        new = with_fields(layer, **fields)
        _check_edits_follow(layer, new, fields)
        return new

    edited = map_layers(model, "", set_fields)
    if not matches:
        raise ValueError(_no_kind_message("override", kind, kinds))
    return edited


def _check_edits_follow(old: Layer, new: Layer, fields: Mapping[str, Any]) -> None:
    """Raise if a part depends on these fields, but was edited before, so that it would stay as it is."""
    if not isinstance(old, Composite) or not isinstance(new, Composite):
        return
    before, after = (parts_of(with_fields(each, edits=())) for each in (old, new))
    for path, _ in new.edits:
        if before.get(path) != after.get(path):
            names = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            raise ValueError(
                f"override: {names} of {short_repr(old)} would not reach its part {path!r}, which was edited before; "
                "set it first, and then edit the part."
            )


def wrap(model: Layer, where: type | tuple[type, ...] | str | tuple[str, ...], function: Callable[[Any], Layer]) -> Any:
    """A copy of a model with `function(layer)` in place of each layer of a class, or at each path that matches.

        mlax.wrap(model, nn.Linear, lambda layer: nn.LoRA(layer, rank=8))
        mlax.wrap(model, "blocks/stacked/attend", mlax.Remat)

    The model itself counts as a layer, and parts are wrapped before their owner. Equal layers stay equal: the function
    is called once for each. Wrappers add no name, so that the variables of the model keep their paths.
    """
    check_layer("wrap", "the model", model)
    made: dict[Layer, Layer] = {}

    def wrap_layer(layer: Layer) -> Layer:
        if layer not in made:
            made[layer] = function(layer)
            check_layer("wrap", f"what the function returned for {short_repr(layer)}", made[layer])
        return made[layer]

    each = as_patterns(where)
    kinds = tuple(kind for kind in each if isinstance(kind, type))
    patterns = tuple(pattern for pattern in each if isinstance(pattern, str))
    if each and kinds == each:
        return _wrap_kinds(model, kinds, wrap_layer)
    if each and patterns == each:
        return _wrap_paths(model, patterns, wrap_layer)
    raise TypeError(
        f"wrap: got {short_repr(where)}, but takes a class, a pattern, or a tuple of either: "
        "wrap(model, nn.Linear, function)."
    )


def _wrap_kinds(model: Layer, kinds: tuple[type, ...], wrap_layer: Callable[[Layer], Layer]) -> Layer:
    found = {type(layer) for layer in all_layers(model)}
    if not any(issubclass(kind, kinds) for kind in found):
        raise ValueError(_no_kind_message("wrap", kinds, {kind.__name__ for kind in found}))
    return map_layers(model, "", lambda path, layer: wrap_layer(layer) if isinstance(layer, kinds) else layer)


def _wrap_paths(model: Layer, patterns: tuple[str, ...], wrap_layer: Callable[[Layer], Layer]) -> Layer:
    chosen = match_paths(patterns, ["", *layers(model)])
    for path in sorted(chosen, key=lambda path: path.count("/") if path else -1, reverse=True):  # parts first
        model = replace(model, path, wrap_layer(get(model, path))) if path else wrap_layer(model)
    return model


def layers(model: Layer) -> dict[str, Layer]:
    """All parts of a model by path, recursively, each before its own parts."""
    check_layer("layers", "the model", model)
    inner = model
    while isinstance(inner, Wrapper) and not inner.has_stack:
        inner = inner.layer
    own = parts_of(inner) if isinstance(inner, Composite) else {}
    parts: dict[str, Layer] = {}
    for name, part in {STACKED: inner.layer}.items() if isinstance(inner, Wrapper) else own.items():
        parts[name] = part
        parts.update({f"{name}/{below}": layer for below, layer in layers(part).items()})
    return parts


def all_layers(model: Layer) -> list[Layer]:
    """The model and all its parts, recursively, those inside wrappers included."""
    return [layer for _, layer in find_layers(model, Layer)]


def find_layers(model: Layer, kind: type[L], path: str = "") -> list[tuple[str, L]]:
    """(path, layer) of every layer of a type in a model, those inside wrappers and the model itself included."""
    found: list[tuple[str, L]] = []

    def collect(path: str, layer: Layer) -> Layer:
        if isinstance(layer, kind):
            found.append((path, layer))
        return layer

    map_layers(model, path, collect)
    return found


def map_layers(
    layer: Layer,
    path: str,
    function: Callable[[str, Layer], Layer],
    replacement: Callable[[str], Layer | None] = lambda path: None,
) -> Any:
    """Apply `function(path, layer)` to all layers of a model, bottom up: to parts first, then to their owner.

    Where `replacement(path)` is a layer, it replaces what is at that path, wrappers included.
    """
    if (new := replacement(path)) is not None:
        return new
    if isinstance(layer, Composite):
        parts = parts_of(layer)
        mapped = {
            name: map_layers(part, f"{path}/{name}" if path else name, function, replacement)
            for name, part in parts.items()
        }
        changed = {name: part for name, part in mapped.items() if part != parts[name]}
        layer = layer.with_parts(changed) if changed else layer
    elif isinstance(layer, Wrapper):
        below = "/".join(filter(None, (path, STACKED))) if layer.has_stack else path
        inner = map_layers(layer.layer, below, function, replacement)
        layer = layer if inner == layer.layer else with_fields(layer, layer=inner)
    return function(path, layer)


def _no_kind_message(function: str, kind: type | tuple[type, ...], kinds: set[str]) -> str:
    return f"{function}: no part is a {_names(kind)}; the model is made of {', '.join(sorted(kinds))}."


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))


def paths(tree: Tree) -> tuple[str, ...]:
    """The path of each leaf: `{"up": {"kernel": ...}}` gives `("up/kernel",)`."""
    _check_variables("paths", tree)
    return tuple(flatten_paths(tree))


def select(tree: Tree, *patterns: str) -> Tree:
    """The leaves that match the patterns, under their paths: `select(trainables, "**/kernel", "!head/**")`."""
    _check_variables("select", tree)
    _check_patterns("select", patterns)
    leaves = flatten_paths(tree)
    return unflatten_paths((path, leaves[path]) for path in match_paths(patterns, leaves))


def freeze(tree: Tree, *patterns: str) -> tuple[Tree, Tree]:
    """Split trainables for fine-tuning: (trainable, frozen), where the patterns select the frozen leaves.

    `freeze(trainables, "!**/lora/*")` freezes all but those. `train.step(train=...)` needs no split; in a loop without
    it, differentiate and update the first; pass `merge(first, second)` to the layer.
    """
    _check_variables("freeze", tree)
    _check_patterns("freeze", patterns)
    leaves = flatten_paths(tree)
    chosen = set(match_paths(patterns, leaves))
    live = unflatten_paths((path, leaf) for path, leaf in leaves.items() if path not in chosen)
    return live, select(tree, *patterns)


def merge(*trees: Tree) -> Tree:
    """One tree with the leaves of all; a path in two of them is an error."""
    leaves: dict[str, Any] = {}
    for tree in trees:
        _check_variables("merge", tree)
        if tree is not None and not isinstance(tree, dict):
            raise TypeError(f"merge: got {short_signature(tree)}, but takes trees of variables: nested dicts, or None.")
        both = leaves.keys() & flatten_paths(tree).keys()
        if both:
            raise ValueError(f"merge: two trees have the leaf {min(both)!r}; leave it out of one, or use replace.")
        leaves.update(flatten_paths(tree))
    return unflatten_paths(leaves.items())


def rename(tree: Tree, names: Mapping[str, str]) -> Tree:
    """Rename paths, of leaves or of whole subtrees: `{"old/path": "new/path"}`."""
    _check_variables("rename", tree)
    if not isinstance(names, Mapping):
        raise TypeError(f'rename: names is a {type(names).__name__}, but must be a dict: {{"old/path": "new/path"}}.')
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
    """The number of parameters: of all leaves, or of those that match the patterns."""
    _check_variables("count", tree)
    leaves = flatten_paths(tree)
    return sum(math.prod(leaves[path].shape) for path in (match_paths(patterns, leaves) if patterns else leaves))


def _check_variables(function: str, tree: Any) -> None:
    if isinstance(tree, Layer | tuple):
        got = f"the model {short_repr(tree)}" if isinstance(tree, Layer) else f"a {type(tree).__name__}"
        raise TypeError(
            f"{function} takes variables, as init returns them, but got {got}; write {function}(trainables)."
        )


def _check_patterns(function: str, patterns: tuple[str, ...]) -> None:
    if not patterns:
        raise TypeError(f'{function}: pass at least one pattern, such as "**/kernel"; "**" matches all leaves.')
