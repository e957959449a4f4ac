"""Several processes that save and restore together: their group, and the collectives by which they agree."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

_MAX_TEXT_BYTES = 1 << 14
_MAX_GATHERED_BYTES = 1 << 11  # of each process


class ProcessGroup(NamedTuple):
    """The index of this process among `count`; `id` is the same in all of them and unique to this run."""

    index: int
    count: int
    id: str


def process_group(leaves: Iterable[Any]) -> ProcessGroup:
    """The processes that hold these leaves. A collective: all of them call it, on the main thread."""
    uses_jax = jax.distributed.is_initialized() or any(isinstance(leaf, jax.Array) for leaf in leaves)
    # Asking for the index initializes JAX's backends, which a tree of NumPy arrays does not need.
    index, count = (jax.process_index(), jax.process_count()) if uses_jax else (0, 1)
    return ProcessGroup(index, count, broadcast_text(unique_process_id(), count))


def unique_process_id() -> str:
    """A unique name of this process: host, process id and a random suffix."""
    return f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(8)}"


def broadcast_text(text: str, count: int) -> str:
    """The text of the first process, in all `count` of them."""
    if count == 1:
        return text
    from jax.experimental import multihost_utils

    data = text.encode()
    if len(data) > _MAX_TEXT_BYTES:
        raise ValueError(f"{len(data):,} bytes are too many to broadcast; at most {_MAX_TEXT_BYTES:,} are allowed.")
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(data.ljust(_MAX_TEXT_BYTES, b"\0"), np.uint8))
    return bytes(np.asarray(received)).rstrip(b"\0").decode()


def all_succeeded(succeeded: bool, count: int) -> bool:
    """Whether `succeeded` is True in all `count` processes."""
    if count == 1:
        return succeeded
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.array(succeeded))).all())


def gather_texts(text: str, count: int) -> list[str]:
    """The texts of all `count` processes, in their order."""
    if count == 1:
        return [text]
    from jax.experimental import multihost_utils

    data = text.encode()[:_MAX_GATHERED_BYTES]
    padded = np.frombuffer(b"".join([len(data).to_bytes(4), data.ljust(_MAX_GATHERED_BYTES, b" ")]), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(count, -1)
    sizes = [int.from_bytes(row[:4].tobytes()) for row in rows]
    return [row[4 : 4 + size].tobytes().decode(errors="ignore") for row, size in zip(rows, sizes, strict=True)]


def wait_until(ready: Callable[[], bool], failed: Callable[[], bool], timeout: float, process: str, task: str) -> None:
    """Poll until `ready()`; `process` and `task` are for errors.

    Saves poll because they run on a background thread, whose collectives could deadlock with those of training.
    """
    end, pause = time.monotonic() + timeout, 0.002
    while not ready():
        if failed():
            raise RuntimeError(f"{process} failed to {task}; see its output.")
        if time.monotonic() > end:
            raise TimeoutError(f"{process} did not {task} within {timeout:g} seconds.")
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
