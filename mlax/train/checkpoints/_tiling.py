"""Blocks of an array: whether they are all of it, how one is cut, and what two have in common."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

Block = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its shape


def tiles(shape: tuple[int, ...], blocks: Sequence[Block], axis: int = 0) -> bool:
    """Whether the blocks, laid as a sharding lays them, hold each element of the shape exactly once."""
    if any(len(start) != len(shape) or len(size) != len(shape) for start, size in blocks):
        return False
    if axis == len(shape):
        return len(blocks) == 1
    if math.prod(shape) == 0:  # nothing to hold; but to be there at all takes one block
        return bool(blocks) and all(math.prod(size) == 0 for _, size in blocks)
    rows: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for start, size in blocks:
        rows[start[axis], size[axis]].append((start, size))
    at = 0
    for begin, length in sorted(rows):
        if begin != at or length == 0:
            return False
        at += length
    return at == shape[axis] and all(tiles(shape, row, axis + 1) for row in rows.values())


def cut(start: tuple[int, ...], array: np.ndarray, most: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The block in blocks of at most `most` bytes where that is possible, without a copy."""
    axis = next((axis for axis, length in enumerate(array.shape) if length > 1), None)
    if array.nbytes <= most or axis is None:
        yield start, array
        return
    rows = max(1, most * array.shape[axis] // array.nbytes)
    for at in range(0, array.shape[axis], rows):
        begin = (*start[:axis], start[axis] + at, *start[axis + 1 :])
        yield from cut(begin, array[(slice(None),) * axis + (slice(at, at + rows),)], most)


def common(a: Block, b: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where in `a`, and where in `b`, the elements lie that are in both; None if there are none."""
    low = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    high = [min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True)]
    if any(end <= begin for begin, end in zip(low, high, strict=True)):
        return None
    inside_a = tuple(slice(begin - x, end - x) for begin, end, x in zip(low, high, a[0], strict=True))
    inside_b = tuple(slice(begin - x, end - x) for begin, end, x in zip(low, high, b[0], strict=True))
    return inside_a, inside_b
