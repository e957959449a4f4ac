"""The processes that save together, and what they agree on."""

import os
import secrets
import socket
from typing import Any, NamedTuple

import jax
import numpy as np

_MAX_TEXT_BYTES = 1 << 14  # bytes of a text that one process tells the others


class ProcessGroup(NamedTuple):
    """Which of how many processes this is; `id` is the same in all of them, and no other run has it."""

    index: int
    count: int
    id: str


def process_group(leaves: Any) -> ProcessGroup:
    """The processes that hold these leaves. To be called by all of them at once, on the main thread."""
    together = jax.distributed.is_initialized() or any(isinstance(leaf, jax.Array) for leaf in leaves)
    index, count = (jax.process_index(), jax.process_count()) if together else (0, 1)  # else JAX may still be asleep
    return ProcessGroup(index, count, broadcast_text(process_identity(), count))


def broadcast_text(text: str, count: int) -> str:
    """What the first process says, in every process."""
    if count == 1:
        return text
    from jax.experimental import multihost_utils

    data = text.encode()
    if len(data) > _MAX_TEXT_BYTES:
        raise ValueError(f"{len(data):,} bytes are too many to broadcast; at most {_MAX_TEXT_BYTES:,} are allowed.")
    said = multihost_utils.broadcast_one_to_all(np.frombuffer(data.ljust(_MAX_TEXT_BYTES, b"\0"), np.uint8))
    return bytes(np.asarray(said)).rstrip(b"\0").decode()


def all_processes_ok(well: bool, count: int) -> bool:
    """Whether all is well in every process."""
    if count == 1:
        return well
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.array(well))).all())


def process_identity() -> str:
    """The name of this process among all that there ever were: host, process id, when it began, and a random word."""
    pid = os.getpid()
    return f"{socket.gethostname()[:60]}-{pid}-{process_start_time(pid) or 0}-{secrets.token_hex(4)}"


def process_start_time(pid: int) -> int | None:
    """When a process of this host began, in ticks since the host did; 0 if nobody knows; None if there is no such."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        pass
    if os.path.exists("/proc/self/stat"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
