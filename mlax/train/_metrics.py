"""Metrics on the device, and the log that reads them rarely."""

import collections
import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax._jax import at_least_float32, widest_dtype
from mlax.core import Documented, NoMatch
from mlax.files import InvalidFile, atomic_write, open_regular
from mlax.train._curves import parse_record, read_lines

Record = dict[str, Any]

CALLS_BETWEEN_READS = 8  # with several processes
BLOCK_BYTES = 1 << 16  # of a log that is read from its end
SHORT_LOG_BYTES = 1 << 24  # a log up to this size is checked as a whole
RECORDS_TO_FIND = 3  # in a row, of steps that are kept: the number in one line may be damaged


@jax.tree_util.register_pytree_node_class
class Metrics(Mapping[str, jax.Array], metaclass=Documented):
    """The metrics of a step by name: each () or, with several steps per call, (steps_per_call,), in float32 or wider.

    They are stored as one array, a pytree leaf, so that one transfer brings all of them to the host: `to_numpy`. Only
    reading a metric waits for the step.
    """

    def __init__(self, names: tuple[str, ...], packed: jax.Array):
        self.names = names
        self.packed = packed  # (names,) or (steps_per_call, names)

    @classmethod
    def pack(cls, values: Mapping[str, jax.Array]) -> Self:
        """These scalars as one array, in the widest of their floating dtypes; booleans become 0 and 1."""
        dtype = widest_dtype(
            at_least_float32(value.dtype) for value in values.values() if jnp.issubdtype(value.dtype, jnp.floating)
        )
        return cls(tuple(values), jnp.stack([value.astype(dtype) for value in values.values()], axis=-1))

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.names:
            raise NoMatch(f"there is no metric {name!r}; there are {', '.join(self.names)}")
        at = self.names.index(name)
        return lax.index_in_dim(self.packed, at, axis=-1, keepdims=False)  # a static index, so nothing is transferred

    def __contains__(self, name: object) -> bool:
        return name in self.names  # the inherited one would slice the array

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        if isinstance(self.packed, Tracer) or not isinstance(self.packed, jax.Array) or self.packed.is_deleted():
            return f"Metrics({', '.join(self.names)})"
        values = self.to_numpy().items()
        return f"Metrics({', '.join(f'{name}={np.array2string(value, precision=4)}' for name, value in values)})"

    def to_numpy(self) -> dict[str, np.ndarray]:
        """All metrics on the host; waits for the step."""
        return dict(zip(self.names, np.moveaxis(np.asarray(self.packed), -1, 0), strict=True))

    def tree_flatten(self) -> tuple[tuple[jax.Array], tuple[str, ...]]:
        """For JAX: the array, and the names as static data."""
        return (self.packed,), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], leaves: tuple[jax.Array]) -> Self:
        """For JAX: the inverse of `tree_flatten`."""
        return cls(names, *leaves)


class MetricsLog:
    """The metrics of all steps and evaluations, one JSON object per line of metrics.jsonl.

    A line is `{"step": 12, "loss": 0.3, ...}` for a step, `{"step": 22, "evaluation": {...}}` for an evaluation and
    `{"step": 13, "event": "..."}` for anything else. `add` waits at most for the call `lag` calls ago, never for the
    one it is passed. If the disk is full, lines are kept until they can be written.
    """

    def __init__(self, path: Path | None, *, steps_per_call: int = 1, every: float = 0.25, lag: int = 2):
        self.path = path
        self.steps_per_call = steps_per_call
        self.every = every  # seconds between two reads
        self.lag = lag
        self._started_at = time.monotonic()
        self._read_at = 0.0
        self._pending: collections.deque[tuple[int, Metrics]] = collections.deque()
        self._lines: list[str] = []
        self._warned = False
        self._calls = 0
        self._on_host = jax.default_backend() == "cpu"  # nothing is to be copied

    def add(self, step: int, metrics: Metrics) -> list[Record]:
        """Add the metrics of the call that ended with `step`; returns the records read, none if it is too early."""
        if not self._on_host:
            metrics.packed.copy_to_host_async()  # starts when the step ends, so that a later read need not wait for it
        self._pending.append((step, metrics))
        if len(self._pending) > self.lag:
            self._pending[-1 - self.lag][1].packed.block_until_ready()
        self._calls += 1
        if jax.process_count() == 1:
            early = time.monotonic() - self._read_at < self.every
        else:  # all processes must read at the same steps, since a rollback depends on what they read
            early = self._calls % CALLS_BETWEEN_READS
        return [] if early else self.read(keep=self.lag)

    def read(self, keep: int = 0) -> list[Record]:
        """Read and write all but the last `keep` calls."""
        ready = [self._pending.popleft() for _ in range(max(len(self._pending) - keep, 0))]
        records = [record for step, metrics in ready for record in self._records(step, metrics)]
        for record in records:
            self.write(record)
        self._read_at = time.monotonic()
        self.flush()
        return records

    def write(self, record: Record) -> None:
        """Add a line to be written with the next flush."""
        stamped = {"step": record["step"], "seconds": round(time.monotonic() - self._started_at, 3), **record}
        self._lines.append(json.dumps(_to_json(stamped)))

    def flush(self) -> None:
        """Write the lines that were added."""
        if self.path is None or not self._lines:
            self._lines = []
            return
        try:
            _append_or_undo(self.path, "\n".join(self._lines) + "\n")
        except (OSError, InvalidFile) as error:
            if not self._warned:
                print(f"{self.path}: {error}; its lines are kept until they can be written", file=sys.stderr)
            self._warned = True
            return
        self._lines = []

    def _records(self, step: int, metrics: Metrics) -> Iterator[Record]:
        values = np.asarray(metrics.packed).reshape(self.steps_per_call, -1).tolist()
        for number, row in enumerate(values, step - self.steps_per_call + 1):
            yield {"step": number, **dict(zip(metrics.names, row, strict=True))}


def truncate_log(path: Path, step: int) -> int:
    """Drop the records after the step that training resumes from, since those steps run again, and damaged lines.

    Returns how many were damaged. Of a long log only the end is read, as the records of a step are written before it is
    saved and so before those of all later steps; damaged lines before stay, and `read_records` leaves them out.
    """
    if not os.path.lexists(path):
        return 0
    os.close(open_regular(str(path), os.O_RDONLY))  # refuses a link or a device
    end, found = None, 0
    for offset, line in _lines_backwards(path):
        record = parse_record(line)
        if not line.endswith(b"\n") or (record is not None and record["step"] > step):
            end, found = offset, 0
        elif record is not None and (found := found + 1) == RECORDS_TO_FIND:
            break
    if end is not None:
        os.truncate(path, end)
    return _drop_damaged(path) if path.stat().st_size <= SHORT_LOG_BYTES else 0


def _drop_damaged(path: Path) -> int:
    lines = list(read_lines(path))
    good = [line for line in lines if parse_record(line) is not None]
    if len(good) < len(lines):
        with contextlib.suppress(OSError):  # such as a full disk; `read_records` leaves them out too
            atomic_write(str(path), good)
    return len(lines) - len(good)


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their offsets, from the last to the first, read block by block."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest = b""  # the beginning of the lines that were read
        while start > 0:
            length = min(BLOCK_BYTES, start)
            start = file.seek(start - length)
            lines = io.BytesIO(file.read(length) + rest).readlines()  # which end with \n alone
            rest = lines.pop(0) if start > 0 else b""
            offset = start + len(rest) + sum(map(len, lines))
            for line in reversed(lines):
                offset -= len(line)
                yield offset, line


def _append_or_undo(path: Path, text: str) -> None:
    descriptor = open_regular(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(descriptor, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(text.encode()) < len(text.encode()):
                raise OSError(f"no space for {len(text)} bytes")
        except OSError:
            file.truncate(size)
            raise


def _to_json(value: Any) -> Any:
    """The value in what JSON can express: null instead of a float that is not finite."""
    if isinstance(value, float):  # first, since nearly all are
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _to_json(each) for key, each in value.items()}
    return value
