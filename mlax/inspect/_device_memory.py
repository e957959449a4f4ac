"""The memory of a device: total, used and free bytes."""

from pathlib import Path
from typing import Any


def free_bytes(device: Any) -> int | None:
    """Bytes that can still be allocated on a device; None if unknown."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return _host_free_bytes() if device.platform == "cpu" else None


def used_bytes(device: Any) -> int | None:
    """Bytes that are allocated on a device, on a CPU by this process; None if unknown."""
    stats = device.memory_stats()
    if stats and "bytes_in_use" in stats:
        return stats["bytes_in_use"]
    if device.platform != "cpu":
        return None
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.exists() else None


def total_bytes(device: Any) -> int | None:
    """The memory of a device in bytes, of a simulated one its share of the free host memory; None if unknown."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    free = _host_free_bytes() if device.platform == "cpu" else None
    return None if free is None else free // max(1, device.client.local_device_count())


def _host_free_bytes() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) * 1024, _container_free_bytes())


def _container_free_bytes() -> int:
    """Bytes that can still be allocated within the memory limit of the container."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # there is no limit
        return 2**62
