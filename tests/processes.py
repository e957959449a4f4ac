"""Python processes started by tests: their environment, a port for their coordinator, and what they print."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system assigns to no other process meanwhile.

    The coordinator of `jax.distributed` can listen on it all the same: both set SO_REUSEPORT, and only it listens.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("localhost", 0))
        yield reserved.getsockname()[1]


def child_environment() -> dict[str, str]:
    """The environment of this process, with mlax and the tests to import, and the cache of compiled programs."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def start_python(*arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start Python with these arguments, on the CPU; `environment` replaces `child_environment()`."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**(child_environment() if environment is None else environment), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs_of(*processes: subprocess.Popen[str], seconds: float = 300) -> list[str]:
    """What each process prints until it exits with status 0; those that are late are killed."""
    try:
        with ThreadPoolExecutor() as readers:  # all at once: a process that waits for another may have much to print
            printed = list(readers.map(lambda process: process.communicate(timeout=seconds), processes))
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return [output for output, _ in printed]
