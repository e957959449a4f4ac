"""Memory: what a compiled function will need, what there is, and advice if that is not enough."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

LESS = (
    "To need less, take smaller batches, or the same in parts (accumulate=4), recompute activations (mlax.Remat, "
    "Repeat(mode='remat')), compute in bfloat16 (mlax.dtypes.mixed_bfloat16), or spread the state over more devices."
)


class WouldNotFit(MemoryError):
    """A compiled function needs more memory than there is; it was not run, so nothing that it donates is lost."""


def refuse_what_cannot_fit(compiled: Any, leaves: Iterable[Any]) -> None:
    """Raise before the first run if it cannot succeed: a run that fails has already given up what was donated."""
    analysis = compiled.memory_analysis()
    here = jax.local_devices()  # a device of another process says nothing
    device = next((each for leaf in leaves for each in getattr(leaf, "devices", tuple)() if each in here), here[0])
    free = free_bytes(device)
    if analysis is None or free is None:
        return
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if needed > free:
        raise WouldNotFit(
            f"the step needs {gib(needed)} more on {device}, of which {gib(analysis.temp_size_in_bytes)} for "
            f"intermediate results, but {gib(free)} are free; nothing was run and the state is as it was. {LESS}"
        )


def free_bytes(device: Any) -> int | None:
    """What can still be allocated on a device, if it says so."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return _host_free() if device.platform == "cpu" else None


def used_bytes(device: Any) -> int | None:
    """What is allocated on a device; on a CPU, by this process."""
    stats = device.memory_stats()
    if stats and "bytes_in_use" in stats:
        return stats["bytes_in_use"]
    if device.platform != "cpu":
        return None
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.exists() else None


def gib(size: float) -> str:
    """A number of bytes in words."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} bytes"


def _host_free() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) * 1024, _container_free())


def _container_free() -> int:
    """What a container may still take, where it is limited."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # no such limit
        return 2**62
