"""Sequences of different lengths, padded to one length or packed into rows."""

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlax.core import Documented, signature
from mlax.train._checks import int_at_least
from mlax.train.feeds._batch import MASK, as_array, common_length


class Sequences:
    """Columns of sequences, where example i has `lengths[i]` entries in each, and columns of fixed shape.

    Given as a list of arrays, which becomes the column "tokens", or as a dict of such lists. A list is any object with
    `len` that returns an array for an integer index. In a dict, a numeric array is a column of fixed shape: labels.
    """

    def __init__(self, value: Any, owner: str):
        columns = dict(value) if isinstance(value, Mapping) else {"tokens": value}
        self.fixed = {n: c for n, c in columns.items() if isinstance(value, Mapping) and _is_fixed_shape(c)}
        self.varied = {name: column for name, column in columns.items() if name not in self.fixed}
        if not self.varied:
            raise ValueError(f"{owner}: no column holds sequences; pass lists of arrays: [[5, 2, 9], [7, 1], ...].")
        if {MASK, "segments", "positions"} & set(columns):
            raise ValueError(f"{owner}: the names mask, segments and positions are reserved; rename the column.")
        if common_length(columns, owner) == 0:
            raise ValueError(f"{owner}: there are no sequences; pass at least one.")
        self._owner = owner
        self.lengths = self._column_lengths()
        first = {name: self._read(name, 0) for name in self.varied}
        self._like = {name: (array.shape[1:], array.dtype) for name, array in first.items()}

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return self.pad(ids, int(self.lengths.max()), 0)

    def pad(self, ids: np.ndarray, length: int, pad: Any) -> dict[str, np.ndarray]:
        """Examples padded with `pad`, or truncated, to `length`: (b, length, ...), and "mask" (b, length)."""
        batch = {name: column[ids] for name, column in self.fixed.items()}
        for name in self.varied:
            batch[name] = self.full(name, (len(ids), length), pad)
            for row, i in zip(batch[name], ids, strict=True):
                sequence = self.sequence(name, i)[:length]
                row[: len(sequence)] = sequence
        batch[MASK] = np.arange(length) < self.lengths[ids][:, None]
        return batch

    def full(self, name: str, shape: tuple[int, ...], pad: Any) -> np.ndarray:
        """An array of `shape` for entries of a column, filled with `pad`."""
        rest, dtype = self._like[name]
        return np.full((*shape, *rest), pad, dtype)

    def sequence(self, name: str, i: int) -> np.ndarray:
        """Sequence i of a column, checked against the shape and dtype of the column."""
        array = self._read(name, i)
        if (array.shape[1:], array.dtype) != self._like[name] or len(array) != self.lengths[i]:
            rest, dtype = self._like[name]
            wanted = f"{dtype}[{', '.join(str(size) for size in (self.lengths[i], *rest))}]"
            raise ValueError(f"{self._owner}: sequence {i} of {name!r} is {signature(array)}, but must be {wanted}.")
        return array

    def _read(self, name: str, i: int) -> np.ndarray:
        return as_array(self.varied[name][int(i)], f"{self._owner}: sequence {i} of {name!r}")

    def _column_lengths(self) -> np.ndarray:
        found: dict[str, np.ndarray] = {}
        for name, column in self.varied.items():
            found[name] = np.fromiter((len(column[i]) for i in range(len(column))), np.int64, len(column))
        name, lengths = next(iter(found.items()))
        for other, others in found.items():
            if (differ := np.flatnonzero(others != lengths)).size:
                i = differ[0]
                raise ValueError(
                    f"{self._owner}: sequence {i} has length {lengths[i]:,} in {name!r} but {others[i]:,} in {other!r}."
                )
        if (empty := np.flatnonzero(lengths == 0)).size:
            raise ValueError(
                f"{self._owner}: {empty.size:,} of {lengths.size:,} sequences are empty, the first is {empty[0]}; "
                "leave them out."
            )
        return lengths


def check_lengths(lengths: np.ndarray, most: int, owner: str, advice: str) -> None:
    """Reject sequences longer than `most`."""
    if (long := np.flatnonzero(lengths > most)).size:
        raise ValueError(
            f"{owner}: {long.size:,} of {lengths.size:,} sequences are longer than {most:,}, the first is sequence "
            f"{long[0]} with {lengths[long[0]]:,} entries; {advice}"
        )


def _is_fixed_shape(column: Any) -> bool:
    return isinstance(column, np.ndarray) and column.dtype != object


def pack_sequences(sequences: Any, length: int, *, split: bool = False, pad: Any = 0) -> "PackedSequences":
    """Sequence packing: a source whose rows of `length` hold several sequences each, for models that attend within
    segments.

    ```python
    rows = train.pack_sequences(sequences, length=1024)  # sequences: [[5, 2, 9], [7, 1], ...], or a dict of such lists
    feed = train.Feed(rows, batch=32, seed=0)
    ```

    Each row has "tokens" (t,); "segments" (t,) int32, which number its sequences from 1, with 0 on padding;
    "positions" (t,) int32, which count from 0 in each sequence; and "mask" (t,). Which sequences share a row is decided
    once, by best-fit decreasing. With `split`, a sequence longer than a row is split into several segments; otherwise
    it is an error.
    """
    length = int_at_least(1, length, "pack_sequences: length")
    return PackedSequences(Sequences(sequences, "pack_sequences"), length, split, pad)


class PackedSequences(metaclass=Documented):
    """A Source of packed rows, from `pack_sequences`; `fill` is the fraction of entries that are not padding."""

    def __init__(self, sequences: Sequences, length: int, split: bool, pad: Any):
        if sequences.fixed:
            names = ", ".join(sequences.fixed)
            raise ValueError(f"pack_sequences: {names}: rows hold sequences only; pass lists of arrays.")
        if not split:
            advice = "use longer rows, or split=True to split them."
            check_lengths(sequences.lengths, length, "pack_sequences", advice)
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
        columns = {name: self._sequences.full(name, shape, self._pad) for name in self._sequences.varied}
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, i in enumerate(ids):
            for segment, piece in enumerate(range(self._bounds[i], self._bounds[i + 1]), 1):
                size, begin = self._sizes[piece], self._begin[piece]
                span = slice(self._starts[piece], self._starts[piece] + size)
                for name, column in columns.items():
                    column[row, span] = self._sequences.sequence(name, self._of[piece])[begin : begin + size]
                segments[row, span] = segment
                positions[row, span] = np.arange(size)
        return {**columns, "segments": segments, "positions": positions, MASK: segments > 0}

    def __repr__(self):
        rows = f"{len(self):,} rows of {self.length:,}"
        return f"PackedSequences({len(self._sequences):,} sequences in {rows}, {self.fill:.1%} full)"


def _best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the row of each piece, and its start in the row."""
    rows, starts = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    rows_by_space: list[list[int]] = [[] for _ in range(length + 1)]
    spaces: list[int] = []  # the amounts of free space that rows have, ascending
    used = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        at = bisect.bisect_left(spaces, size)
        if at == len(spaces):
            row, space, used = used, length, used + 1
        else:
            space = spaces[at]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[at]
        rows[piece], starts[piece] = row, length - space
        if left := space - size:
            if not rows_by_space[left]:
                bisect.insort(spaces, left)
            rows_by_space[left].append(row)
    return rows, starts
