"""Settings of glibc's malloc: freed memory is kept, so that a step on a CPU does not fault it in again.

Without JAX, so that `mlax` starts fast.
"""

import ctypes
import os

# glibc's options, in malloc.h, and what they are set to
OPTIONS = {
    -8: 1,  # M_ARENA_MAX: threads share one heap, since those of a thread of its own end at 64 MiB
    -3: 2**30,  # M_MMAP_THRESHOLD: memory above it is mapped, and returned to the operating system when it is freed
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: what is free at the end of the heap is returned above it
}
VARIABLES = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Keep up to 2 GiB of freed memory in this process, to avoid page faults on a CPU; returns whether it does.

    XLA allocates the temporary arrays of a step when the step runs, and frees them after it. By default the C library
    returns tens of MiB to the operating system at once, and the next step faults every page in again, which can be a
    quarter of its time. `mlax train` calls this. In a script of your own, call it before the first computation of JAX,
    whose threads keep the heap that they start with.

    It holds for the whole process, on Linux with glibc; elsewhere, or if an environment variable of glibc's malloc is
    set, such as MALLOC_ARENA_MAX, nothing changes and the result is False.

    >>> is_kept = train.keep_freed_memory()
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # macOS, Windows and musl have none
        return False
    return all(mallopt(option, value) for option, value in OPTIONS.items())
