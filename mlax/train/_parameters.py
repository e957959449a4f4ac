"""The table of a model's parameters, by part."""

import collections
import math
from typing import Any

from mlax.core import Tree, flatten_paths, signature
from mlax.inspect import gib


def parameters(trainables: Tree, *, most: int = 24) -> str:
    """A line for each leaf, or for each part if there are too many leaves: path, shape, count; then the sum."""
    leaves = flatten_paths(trainables)
    rows = [(path, signature(leaf), math.prod(leaf.shape)) for path, leaf in leaves.items()]
    depth = 3
    while len(rows) > most and depth:
        rows = _grouped(leaves, depth)
        depth -= 1
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    total = ("all parameters", gib(size), count)
    width = [max(len(str(row[i])) for row in [*rows, total]) for i in (0, 1)]
    return "\n".join(f"  {path:{width[0]}}  {what:{width[1]}}  {number:>12,}" for path, what, number in [*rows, total])


def _grouped(leaves: dict[str, Any], depth: int) -> list[tuple[str, str, int]]:
    groups: dict[str, list[Any]] = collections.defaultdict(list)
    for path, leaf in leaves.items():
        groups["/".join(path.split("/")[:depth])].append(leaf)
    return [
        (
            path,
            f"{len(group)} arrays" if len(group) > 1 else signature(group[0]),
            sum(math.prod(x.shape) for x in group),
        )
        for path, group in groups.items()
    ]
