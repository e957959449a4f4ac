"""Surgery on descriptions, and on variable trees by the same words: get, replace, override."""

from collections.abc import Callable
from typing import Any, TypeVar

from mlax.core._composite import Composite
from mlax.core._frozen import with_fields
from mlax.core._layer import Layer
from mlax.core._parts import parts_of
from mlax.core._paths import NoSuch, flat, matching, nested, no_such
from mlax.core._wrapper import Wrapper

T = TypeVar("T")
L = TypeVar("L", bound=Layer)


def get(source: Any, path: str) -> Any:
    """The part of a model, or the leaf or branch of a tree, at `path`: `get(model, "blocks/norm")`.

    A path is the same in a model and in its variables: a wrapper (Repeat, Remat, Mixed...) takes no name.
    """
    if isinstance(source, Layer):
        parts = layers(source)
        if path not in parts:
            raise NoSuch(no_such(path, parts))
        return parts[path]
    node = source
    for name in path.split("/"):
        if not isinstance(node, dict) or name not in node:
            raise NoSuch(no_such(path, flat(source)))
        node = node[name]
    return node


def replace(source: T, path: str, new: Any) -> T:
    """A copy of a model or of a tree with `new` at `path`; a pattern puts it at every place that matches."""
    if isinstance(source, Layer):
        chosen = set(matching([path], layers(source)))
        return rebuilt(source, "", lambda where, layer: layer, lambda where: new if where in chosen else None)
    leaves = flat(source)
    below = [where for where in leaves if where.startswith(f"{path}/")]
    chosen = [path] if below else matching([path], leaves)
    kept = {where: leaf for where, leaf in leaves.items() if where not in below}
    return nested({**kept, **dict.fromkeys(chosen, new)}.items())


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

    edited = rebuilt(model, "", changed)
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
    return [layer for _, layer in found(model, Layer)]


def found(model: Layer, kind: type[L], where: str = "") -> list[tuple[str, L]]:
    """Every layer of a kind in a model with its path, those inside of wrappers and the model itself too."""
    those: list[tuple[str, L]] = []

    def look(where: str, layer: Layer) -> Layer:
        if isinstance(layer, kind):
            those.append((where, layer))
        return layer

    rebuilt(model, where, look)
    return those


def rebuilt(
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
        new = {name: rebuilt(part, f"{where}/{name}" if where else name, change, other) for name, part in parts.items()}
        new = {name: part for name, part in new.items() if part != parts[name]}
        layer = layer.with_parts(new) if new else layer
    elif isinstance(layer, Wrapper):
        inner = rebuilt(layer.layer, where, change, other)
        layer = layer if inner == layer.layer else with_fields(layer, layer=inner)
    return change(where, layer)


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
