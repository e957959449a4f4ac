"""Packed: rows of one length that hold several sequences each."""

import bisect
from typing import Any

import numpy as np

from mlax.train.feeds._counts import at_least
from mlax.train.feeds._sequences import Sequences, too_long


def packed(sequences: Any, length: int, *, split: bool = False, pad: Any = 0) -> "Packed":
    """A source whose rows of `length` hold several sequences each, for a model that attends within segments.

    ```python
    rows = train.packed(sequences, length=1024)  # sequences: [[5, 2, 9], [7, 1], ...], or a dict of such lists
    feed = train.Feed(rows, batch=32, seed=0)
    ```

    Each row has "tokens" (t,), "segments" (t,) int32: 1, 2, ... by sequence and 0 on padding, "positions" (t,) int32:
    from 0 in each sequence, and "mask" (t,). Which sequences share a row is decided once, the longest first, each into
    the fullest row that still holds it. With `split`, a sequence longer than a row is cut into several, of segments of
    their own; without, it is refused.
    """
    return Packed(Sequences(sequences, "packed"), at_least(1, length, "packed: length"), split, pad)


class Packed:
    """What `packed` gives: a Source of rows, with `fill`, the share of their entries that is no padding."""

    def __init__(self, sequences: Sequences, length: int, split: bool, pad: Any):
        if sequences.fixed:
            raise ValueError(f"packed: {', '.join(sequences.fixed)}: a row holds sequences only; give lists of arrays.")
        if not split:
            too_long(sequences.lengths, length, "packed", "use longer rows, or split=True to cut them into several.")
        self.length = length
        self._sequences, self._pad = sequences, pad
        pieces = -(-sequences.lengths // length)
        of = np.repeat(np.arange(len(sequences)), pieces)
        begin = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * length
        sizes = np.minimum(sequences.lengths[of] - begin, length)
        rows, starts = _fullest_fit(sizes, length)
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
        return f"Packed({len(self._sequences):,} sequences in {rows}, {self.fill:.1%} filled)"


def _fullest_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
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
