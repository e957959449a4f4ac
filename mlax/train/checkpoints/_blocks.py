"""Blocks of arrays: how a saved array is split, intersected and stored in safetensors."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from mlax.files import is_storable

Block = tuple[tuple[int, ...], tuple[int, ...]]  # part of an array: its start indices and its shape


def to_storage(array: np.ndarray) -> np.ndarray:
    """The array as safetensors can store it: as bytes along a new last axis if it lacks the dtype."""
    if is_storable(array.dtype):
        return array
    shape = storage_shape(array.shape, array.dtype)
    return array.reshape(-1).view(np.uint8).reshape(shape) if array.size else np.empty(shape, np.uint8)


def storage_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """The shape that `to_storage` returns."""
    return shape if is_storable(dtype) else (*shape, dtype.itemsize)


def is_partition(shape: tuple[int, ...], blocks: Sequence[Block], axis: int = 0) -> bool:
    """Whether the blocks form a grid, as shards do, that covers each element of `shape` exactly once."""
    if any(len(start) != len(shape) or len(size) != len(shape) for start, size in blocks):
        return False
    if axis == len(shape):
        return len(blocks) == 1
    if math.prod(shape) == 0:  # no elements, but one empty block shows that the array was saved
        return bool(blocks) and all(math.prod(size) == 0 for _, size in blocks)
    slabs: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for start, size in blocks:
        slabs[start[axis], size[axis]].append((start, size))
    end = 0
    for start, length in sorted(slabs):
        if start != end or length == 0:
            return False
        end += length
    return end == shape[axis] and all(is_partition(shape, slab, axis + 1) for slab in slabs.values())


def split_block(
    start: tuple[int, ...], array: np.ndarray, max_bytes: int
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Split a block into views of at most `max_bytes`, or of one element if that is larger."""
    axis = next((axis for axis, length in enumerate(array.shape) if length > 1), None)
    if array.nbytes <= max_bytes or axis is None:
        yield start, array
        return
    rows = max(1, max_bytes * array.shape[axis] // array.nbytes)
    for row in range(0, array.shape[axis], rows):
        first = (*start[:axis], start[axis] + row, *start[axis + 1 :])
        yield from split_block(first, array[(slice(None),) * axis + (slice(row, row + rows),)], max_bytes)


def intersect_blocks(a: Block, b: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The common elements of two blocks, as slices of `a` and as slices of `b`; None if there are none."""
    low = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    high = [min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True)]
    if any(stop <= start for start, stop in zip(low, high, strict=True)):
        return None
    in_a = tuple(slice(start - x, stop - x) for start, stop, x in zip(low, high, a[0], strict=True))
    in_b = tuple(slice(start - x, stop - x) for start, stop, x in zip(low, high, b[0], strict=True))
    return in_a, in_b
