"""The leaves of any tree that JAX knows, by path; `_paths.flat` is for nested dicts, whose paths people write."""

from collections.abc import Callable
from typing import Any

import jax


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """(path, leaf) for each leaf in JAX's order; keys, field names and indices are joined by slashes: `mean/0/up`."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(keys, simple=True, separator="/"), leaf) for keys, leaf in found]
