"""Sequences: examples of different lengths, read padded."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlax.core import signature
from mlax.train.feeds._batch import as_numbers, same_length


class Sequences:
    """Columns of sequences, of which example i has `lengths[i]` entries in each; and arrays with a fixed shape.

    Given as a list of arrays, which becomes the column "tokens", or as a dict of such lists. Any object with `len` that
    gives an array for a number will do as a list. In a dict, an array of numbers is a column of fixed shape: a label.
    """

    def __init__(self, given: Any, what: str):
        columns = dict(given) if isinstance(given, Mapping) else {"tokens": given}
        self.fixed = {n: c for n, c in columns.items() if isinstance(given, Mapping) and _is_regular(c)}
        self.varied = {name: column for name, column in columns.items() if name not in self.fixed}
        if not self.varied:
            raise ValueError(f"{what}: no column holds sequences; give lists of arrays: [[5, 2, 9], [7, 1], ...].")
        if {"mask", "segments", "positions"} & set(columns):
            raise ValueError(f"{what}: the names mask, segments and positions are taken; rename the column.")
        if same_length(columns, what) == 0:
            raise ValueError(f"{what}: there are no sequences; give at least one.")
        self._what = what
        self.lengths = self._lengths()
        first = {name: self._one(name, 0) for name in self.varied}
        self._like = {name: (array.shape[1:], array.dtype) for name, array in first.items()}

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return self.padded(ids, int(self.lengths.max()), 0)

    def padded(self, ids: np.ndarray, length: int, pad: Any) -> dict[str, np.ndarray]:
        """Examples filled up with `pad`, or cut, to `length`: (b, length, ...), and "mask" (b, length)."""
        batch = {name: column[ids] for name, column in self.fixed.items()}
        for name in self.varied:
            batch[name] = self.empty(name, (len(ids), length), pad)
            for row, i in zip(batch[name], ids, strict=True):
                sequence = self.sequence(name, i)[:length]
                row[: len(sequence)] = sequence
        batch["mask"] = np.arange(length) < self.lengths[ids][:, None]
        return batch

    def empty(self, name: str, shape: tuple[int, ...], pad: Any) -> np.ndarray:
        """An array of `shape` for entries of a column, filled with `pad`."""
        rest, dtype = self._like[name]
        return np.full((*shape, *rest), pad, dtype)

    def sequence(self, name: str, i: int) -> np.ndarray:
        """Sequence i of a column, with the shape and dtype that all of the column have."""
        array = self._one(name, i)
        if (array.shape[1:], array.dtype) != self._like[name] or len(array) != self.lengths[i]:
            rest, dtype = self._like[name]
            wanted = f"{dtype}[{', '.join(str(size) for size in (self.lengths[i], *rest))}]"
            raise ValueError(f"{self._what}: sequence {i} of {name!r} is {signature(array)} but is to be {wanted}.")
        return array

    def _one(self, name: str, i: int) -> np.ndarray:
        return as_numbers(self.varied[name][int(i)], f"{self._what}: sequence {i} of {name!r}")

    def _lengths(self) -> np.ndarray:
        found: dict[str, np.ndarray] = {}
        for name, column in self.varied.items():
            found[name] = np.fromiter((len(column[i]) for i in range(len(column))), np.int64, len(column))
        name, lengths = next(iter(found.items()))
        for other, its in found.items():
            if (differ := np.flatnonzero(its != lengths)).size:
                i = differ[0]
                raise ValueError(
                    f"{self._what}: sequence {i} has {lengths[i]:,} entries in {name!r} but {its[i]:,} in {other!r}."
                )
        if (empty := np.flatnonzero(lengths == 0)).size:
            raise ValueError(
                f"{self._what}: {empty.size:,} of {lengths.size:,} sequences are empty, the first is {empty[0]}; "
                "leave them out."
            )
        return lengths


def too_long(lengths: np.ndarray, most: int, what: str, advice: str) -> None:
    """Refuse sequences longer than `most`."""
    if (long := np.flatnonzero(lengths > most)).size:
        raise ValueError(
            f"{what}: {long.size:,} of {lengths.size:,} sequences are longer than {most:,}, the first is number "
            f"{long[0]} with {lengths[long[0]]:,} entries; {advice}"
        )


def _is_regular(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype != object
