"""The name of each leaf of a tree: the path to it, as it is written in a checkpoint."""

from typing import Any

import jax

from mlax._jax import leaves_with_paths
from mlax.files import why_not


def named(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by name, in JAX's order, and the structure that puts them together again.

    Dict keys, field names and indices are joined by slashes: `optimizer/mean/up/kernel`. A bare leaf is `tree`.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(tree):
        name = path or "tree"
        if why := why_not(name):
            raise ValueError(f"The leaf {name[:100]!r} cannot be saved by that name; {why}; rename it.")
        if name in leaves:
            raise ValueError(f"Two leaves of the tree are called {name!r}; rename one of them.")
        leaves[name] = leaf
    return leaves, jax.tree.structure(tree)
