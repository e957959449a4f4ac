"""Heartbeats, by which a supervisor tells a slow process from a hung one."""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator


def heartbeat(step: int, phase: str = "step") -> None:
    """Report that the main thread is alive, after `step` steps and in this phase.

    `fit` does so before each step, wait for data, evaluation and save; a custom training loop under `mlax launch` calls
    it once per step. The count of heartbeats, the step and the phase are written to the file that the environment
    variable MLAX_HEARTBEAT names, which `mlax launch` sets for each of its processes. Without it nothing happens.
    """
    with contextlib.suppress(OSError):  # a full disk must not end training
        if (file := _open()) is not None:
            descriptor, counts = file
            os.pwrite(descriptor, f"{next(counts)} {step} {phase}".encode().ljust(64), 0)


@functools.cache
def _open() -> tuple[int, Iterator[int]] | None:
    path = os.environ.get("MLAX_HEARTBEAT")
    return None if not path else (os.open(path, os.O_WRONLY | os.O_CREAT), itertools.count(1))
