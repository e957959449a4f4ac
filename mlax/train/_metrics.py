"""Metrics on the device, and the log that reads them rarely."""

import collections
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax import at_least_float32, widest_dtype
from mlax.core import NoMatch
from mlax.train._curves import read_records


class Metrics(Mapping[str, jax.Array]):
    """What a step gave, by name: each () or, with several steps a call, (many,), in float32 or wider.

    They are one array, so that all of them come to the host in one transfer: `metrics.numbers()`. Until something is
    read, nothing waits for the step.
    """

    def __init__(self, names: tuple[str, ...], packed: jax.Array):
        self.names = names
        self.packed = packed  # (names,) or (many, names)

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.names:
            raise NoMatch(f"{name!r}; there are {', '.join(self.names)}")
        at = self.names.index(name)
        return lax.index_in_dim(self.packed, at, axis=-1, keepdims=False)  # whose index is part of the program

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Metrics({self.numbers()})"

    def numbers(self) -> dict[str, np.ndarray]:
        """All of them on the host; waits for the step."""
        return dict(zip(self.names, np.moveaxis(np.asarray(self.packed), -1, 0), strict=True))


def pack_metrics(metrics: Mapping[str, jax.Array]) -> jax.Array:
    """The metrics as one array, in the widest dtype that occurs; what is no float as 0, 1, ..."""
    dtype = widest_dtype(
        at_least_float32(value.dtype) for value in metrics.values() if jnp.issubdtype(value.dtype, jnp.floating)
    )
    return jnp.stack([value.astype(dtype) for value in metrics.values()], axis=-1)


Record = dict[str, Any]

CALLS_BETWEEN_READS = 8  # calls between two readings where several processes read


class MetricsLog:
    """What steps and evaluations gave. `add` never waits for the step it is given, only for the one before the last.

    A line is `{"step": 12, "loss": 0.3, ...}` for a step, `{"step": 22, "evaluation": {...}}` for an evaluation and
    `{"step": 13, "event": "..."}` for anything else. A disk that is full costs no step: lines wait until there is room.
    """

    def __init__(self, path: Path | None, *, many: int = 1, every: float = 0.25, ahead: int = 2):
        self.path = path
        self.many = many
        self.every = every  # seconds between two readings
        self.ahead = ahead
        self.begun = time.monotonic()
        self._read_at = 0.0
        self._pending: collections.deque[tuple[int, Metrics]] = collections.deque()
        self._lines: list[str] = []
        self._complained = False
        self._calls = 0

    def add(self, step: int, metrics: Metrics) -> list[Record]:
        """Take the metrics of the call that ended with `step`; give the records read by now, if it was time to read."""
        metrics.packed.copy_to_host_async()  # begins when the step ends, so that reading has not to wait for it
        self._pending.append((step, metrics))
        if len(self._pending) > self.ahead:
            self._pending[-1 - self.ahead][1].packed.block_until_ready()
        self._calls += 1
        # several processes must read at the same steps, since what they read may send all of them back to a checkpoint
        early = (
            time.monotonic() - self._read_at < self.every
            if jax.process_count() == 1
            else self._calls % CALLS_BETWEEN_READS
        )
        if early:
            return []
        return self.read(keep=self.ahead)

    def read(self, keep: int = 0) -> list[Record]:
        """Read and write all but the last `keep` calls."""
        taken = [self._pending.popleft() for _ in range(max(len(self._pending) - keep, 0))]
        records = [record for step, metrics in taken for record in self._records(step, metrics.numbers())]
        for record in records:
            self.write(record)
        self._read_at = time.monotonic()
        self.flush()
        return records

    def write(self, record: Record) -> None:
        """Add a line of one's own."""
        stamped = {"step": record["step"], "seconds": round(time.monotonic() - self.begun, 3), **record}
        self._lines.append(json.dumps(_to_json(stamped)))

    def flush(self) -> None:
        """Write the lines that wait."""
        if self.path is None or not self._lines:
            self._lines = []
            return
        try:
            _append_or_undo(self.path, "\n".join(self._lines) + "\n")
        except OSError as error:
            if not self._complained:
                print(f"{self.path}: {error}; the lines are kept until they can be written", file=sys.stderr)
            self._complained = True
            return
        self._lines = []

    def _records(self, step: int, metrics: dict[str, np.ndarray]) -> Iterator[Record]:
        for i in range(self.many):
            values = {name: (value if self.many == 1 else value[i]).item() for name, value in metrics.items()}
            yield {"step": step - self.many + 1 + i, **values}


def truncate_log(path: Path, step: int) -> None:
    """Drop the records of steps beyond the one that training goes on from: they will be made again."""
    if not path.exists():
        return
    records = read_records(path)
    kept = [record for record in records if record["step"] <= step]
    if len(kept) < len(records) or not path.read_bytes().endswith(b"\n"):  # a last line may have been cut off
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(record) + "\n" for record in kept))
        new.replace(path)


def _append_or_undo(path: Path, text: str) -> None:
    """Add the text, all of it or nothing."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(text.encode()) < len(text.encode()):
                raise OSError(f"no room for {len(text)} bytes")
        except OSError:
            file.truncate(size)
            raise


def _to_json(value: Any) -> Any:
    """The value in numbers that JSON has: null for what is not finite."""
    if isinstance(value, Mapping):
        return {key: _to_json(each) for key, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
