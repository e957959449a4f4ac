"""Pieces: leaves in host memory, taken to the device a few rows at a time."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core._memory import beside, fetched, in_host, stored, to_device, to_host

LEAST = 2**22  # bytes that a piece should have at least, or starting its transfer would take longer than the transfer


def groups(leaves: Mapping[str, Iterable[Any]]) -> list[tuple[list[str], int]]:
    """Paths whose arrays are to go to the device together, and in how many pieces, of as many rows each.

    `leaves` gives all arrays of a path, of which the first has the rows that count. What is not worth the trouble is
    left out: paths with nothing in host memory, or with too few bytes to be cut.
    """
    rows: dict[int, dict[str, list[Any]]] = {}
    for path, arrays in leaves.items():
        arrays = list(arrays)
        alike = arrays[0].ndim and all(array.shape[:1] == arrays[0].shape[:1] for array in arrays)
        if alike and any(in_host(array) for array in arrays):
            rows.setdefault(len(arrays[0]), {})[path] = arrays
    found = []
    for count, group in rows.items():
        size = sum(array.size * array.dtype.itemsize for arrays in group.values() for array in arrays)
        numbers = [number for number in range(2, count + 1) if count % number == 0 and size >= number * LEAST]
        found += [(list(group), numbers[-1])] if numbers else []
    return found


def rewritten(function: Callable[..., Any], written: Any, read: Any, number: int) -> Any:
    """The stacks `written`, each piece replaced by `function(row, its piece, the piece of read)`.

    In place, so that stacks which are donated are there once; a piece that comes back as it was is not written.
    Nothing is fetched ahead of its turn: what takes the time is the link to the host, and to read the next piece and
    write the last one meanwhile gave 64 instead of 60 GB/s on an H200, for three times the memory on the device.
    """
    rows = _rows(written, number)

    def step(time: Any, stacks: Any) -> Any:
        row = time * rows
        before = fetched(stacks, row, rows)
        after = function(row, before, fetched(read, row, rows))
        return jax.tree.map(lambda all, old, new: all if new is old else stored(all, new, row), stacks, before, after)

    return lax.fori_loop(0, number, step, written)


def summed(function: Callable[[Any], jax.Array], read: Any, number: int, start: jax.Array) -> jax.Array:
    """The sum of `function` over the pieces of the stacks, added to `start`."""
    rows = _rows(read, number)

    def step(time: Any, total: jax.Array) -> jax.Array:
        return total + function(fetched(read, time * rows, rows)).astype(total.dtype)

    return lax.fori_loop(0, number, step, start)


def mapped(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """`function` of each leaf, where the leaf lies; it must not care which rows it is given, nor how many."""

    def one(leaf: jax.Array) -> jax.Array:
        if not in_host(leaf):
            return function(leaf)
        number = next((number for _, number in groups({"": [leaf]})), None)
        if number is None:
            return to_host(function(to_device(leaf)))
        rows = len(leaf) // number
        pieces = lax.map(lambda time: to_host(function(fetched(leaf, time * rows, rows))), jnp.arange(number))
        return pieces.reshape(len(leaf), *pieces.shape[2:])

    return jax.tree.map(one, tree)


def added(sums: Any, news: Any) -> Any:
    """The sums, each where it lies and in its dtype, with the new leaves added."""

    def one(total: jax.Array, new: jax.Array) -> jax.Array:
        number = next((number for _, number in groups({"": [total, new]})), None)
        if number is None:
            return beside(to_device(total) + to_device(new).astype(total.dtype), total)
        return rewritten(lambda _, total, new: total + new.astype(total.dtype), total, new, number)

    return jax.tree.map(one, sums, news)


def _rows(stacks: Any, number: int) -> int:
    return len(jax.tree.leaves(stacks)[0]) // number
