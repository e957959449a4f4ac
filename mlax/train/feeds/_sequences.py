"""Sequences of different lengths, padded to one length or packed into rows."""

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlax.core import signature
from mlax.train.feeds._batch import as_array, common_length, int_at_least


class Sequences:
    """Columns of sequences, of which example i has `lengths[i]` entries in each; and arrays with a fixed shape.

    Given as a list of arrays, which becomes the column "tokens", or as a dict of such lists. Any object with `len` that
    gives an array for a number will do as a list. In a dict, an array of numbers is a column of fixed shape: a label.
    """

    def __init__(self, given: Any, what: str):
        columns = dict(given) if isinstance(given, Mapping) else {"tokens": given}
        self.fixed = {n: c for n, c in columns.items() if isinstance(given, Mapping) and _is_fixed_shape(c)}
        self.varied = {name: column for name, column in columns.items() if name not in self.fixed}
        if not self.varied:
            raise ValueError(f"{what}: no column holds sequences; give lists of arrays: [[5, 2, 9], [7, 1], ...].")
        if {"mask", "segments", "positions"} & set(columns):
            raise ValueError(f"{what}: the names mask, segments and positions are taken; rename the column.")
        if common_length(columns, what) == 0:
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
        return as_array(self.varied[name][int(i)], f"{self._what}: sequence {i} of {name!r}")

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


def check_lengths(lengths: np.ndarray, most: int, what: str, advice: str) -> None:
    """Refuse sequences longer than `most`."""
    if (long := np.flatnonzero(lengths > most)).size:
        raise ValueError(
            f"{what}: {long.size:,} of {lengths.size:,} sequences are longer than {most:,}, the first is number "
            f"{long[0]} with {lengths[long[0]]:,} entries; {advice}"
        )


def _is_fixed_shape(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype != object


def pack_sequences(sequences: Any, length: int, *, split: bool = False, pad: Any = 0) -> "PackedSequences":
    """A source whose rows of `length` hold several sequences each, for a model that attends within segments.

    ```python
    rows = train.pack_sequences(sequences, length=1024)  # sequences: [[5, 2, 9], [7, 1], ...], or a dict of such lists
    feed = train.Feed(rows, batch=32, seed=0)
    ```

    Each row has "tokens" (t,), "segments" (t,) int32: 1, 2, ... by sequence and 0 on padding, "positions" (t,) int32:
    from 0 in each sequence, and "mask" (t,). Which sequences share a row is decided once, the longest first, each into
    the fullest row that still holds it. With `split`, a sequence longer than a row is cut into several, of segments of
    their own; without, it is refused.
    """
    return PackedSequences(
        Sequences(sequences, "pack_sequences"), int_at_least(1, length, "pack_sequences: length"), split, pad
    )


class PackedSequences:
    """What `pack_sequences` gives: a Source of rows, with `fill`, the share of their entries that is no padding."""

    def __init__(self, sequences: Sequences, length: int, split: bool, pad: Any):
        if sequences.fixed:
            raise ValueError(
                f"pack_sequences: {', '.join(sequences.fixed)}: rows hold sequences only; give lists of arrays."
            )
        if not split:
            check_lengths(sequences.lengths, length, "pack_sequences", "use longer rows, or split=True to split them.")
        self.length = length
        self._sequences, self._pad = sequences, pad
        pieces = -(-sequences.lengths // length)
        of = np.repeat(np.arange(len(sequences)), pieces)
        begin = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * length
        sizes = np.minimum(sequences.lengths[of] - begin, length)
        rows, starts = _best_fit(sizes, length)
        by_row = np.lexsort((starts, rows))
        self._of, self._begin, self._sizes, self._starts = of[by_row], begin[by_row], sizes[by_row], starts[by_row]
        self._bounds = np.searchsorted(rows[by_row], np.arange(rows.max() + 2))
        self.fill = float(sizes.sum() / (len(self) * length))

    def __len__(self):
        return len(self._bounds) - 1

    def __getitem__(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        shape = (len(ids), self.length)
        columns = {name: self._sequences.empty(name, shape, self._pad) for name in self._sequences.varied}
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, i in enumerate(ids):
            for segment, piece in enumerate(range(self._bounds[i], self._bounds[i + 1]), 1):
                size, begin = self._sizes[piece], self._begin[piece]
                there = slice(self._starts[piece], self._starts[piece] + size)
                for name, column in columns.items():
                    column[row, there] = self._sequences.sequence(name, self._of[piece])[begin : begin + size]
                segments[row, there] = segment
                positions[row, there] = np.arange(size)
        return {**columns, "segments": segments, "positions": positions, "mask": segments > 0}

    def __repr__(self):
        rows = f"{len(self):,} rows of {self.length:,}"
        return f"PackedSequences({len(self._sequences):,} sequences in {rows}, {self.fill:.1%} filled)"


def _best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The row of each piece and where in the row it starts: best fit, by falling size."""
    rows, starts = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    with_space: list[list[int]] = [[] for _ in range(length + 1)]  # the rows, by the space that is left in them
    spaces: list[int] = []  # those that there are, rising
    used = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        at = bisect.bisect_left(spaces, size)
        if at == len(spaces):
            row, space, used = used, length, used + 1
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[at]
        rows[piece], starts[piece] = row, length - space
        if left := space - size:
            if not with_space[left]:
                bisect.insort(spaces, left)
            with_space[left].append(row)
    return rows, starts
