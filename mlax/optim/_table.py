"""The slots of an optimizer as a table."""

import collections
import math
from typing import Any

import jax.numpy as jnp

from mlax.optim._layout import Layout


def table(layout: Layout) -> str:
    """The weights, the slots and the scalars: dtypes, leaves, numbers, bytes; and the bytes of the state."""
    weights = layout.leaves.by_path
    rows = _rows("trainables", [(w.shape, w.dtype) for w in weights.values()])
    state = []
    for name in layout.names:
        kept = [path for path in weights if layout.has(name, path)]
        state += _rows(name, [(layout.slot(name, p).shape(weights[p]), layout.dtype(name, p)) for p in kept])
    state += _rows("step", [((), jnp.int32)])
    for name in layout.scalars:
        state += _rows(name, [((), layout.scalar_dtype(name))])
    lines = [("", "dtype", "leaves", "numbers", "bytes")]
    lines += [(name, dtype, *(f"{number:,}" for number in numbers)) for name, dtype, *numbers in (*rows, *state)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(word.ljust(width) if place < 2 else word.rjust(width) for place, (word, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    total = sum(row[-1] for row in state)
    return "\n".join([layout.leaves.owner, *map(str.rstrip, aligned), f"the state: {total:,} bytes"])


def _rows(name: str, leaves: list[tuple[tuple[int, ...], Any]]) -> list[tuple[str, str, int, int, int]]:
    """A row for each dtype: name, dtype, leaves, numbers, bytes."""
    counts: dict[str, list[int]] = collections.defaultdict(list)
    for shape, dtype in leaves:
        counts[jnp.dtype(dtype).name].append(math.prod(shape))
    return [
        (name, dtype, len(each), sum(each), sum(each) * jnp.dtype(dtype).itemsize) for dtype, each in counts.items()
    ]
