"""Python's garbage collector, paused while mlax imports and traces."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector, which looks through all that imports and tracing create, and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
