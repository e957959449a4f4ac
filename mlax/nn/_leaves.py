"""The leaves of one name in the trainables of a layer, for wrappers that compute them."""

from typing import Any

from mlax.core import flatten_paths, short_repr, variable_shapes


def leaves_named(wrapper: Any, x: Any) -> list[str]:
    """The paths of the trainables called `wrapper.leaf` in the layer inside; none at all is an error."""
    paths = flatten_paths(variable_shapes(wrapper.layer, x)[0])
    found = [path for path in paths if path.split("/")[-1] == wrapper.leaf]
    if not found:
        raise ValueError(
            f"{short_repr(wrapper)}: no leaf of the layer is called {wrapper.leaf!r}; it has "
            f"{', '.join(paths) or 'none'}. Pass the name of one of them as leaf=."
        )
    return found


def check_axis(wrapper: Any, path: str, leaf: Any) -> None:
    """Refuse a leaf that has no axis `wrapper.axis`."""
    if not -leaf.ndim <= wrapper.axis < leaf.ndim:
        raise ValueError(f"{short_repr(wrapper)}: {path} has the shape {leaf.shape}, which has no axis {wrapper.axis}.")


def check_present(wrapper: Any, what: str, wanted: list[str], leaves: dict[str, Any]) -> None:
    """Refuse variables that lack one of the paths that are wanted."""
    missing = [path for path in wanted if path not in leaves]
    if missing:
        raise ValueError(
            f"{short_repr(wrapper)}: {what} lacks {', '.join(missing)}. Pass what init returned for this layer."
        )
