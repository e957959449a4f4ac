"""BatchIterator: batches that background threads load and transfer to the devices ahead of time."""

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, Self

import jax

from mlax.core import Documented
from mlax.train._checks import int_at_least
from mlax.train.feeds._batch import Batch, BatchSpec
from mlax.train.feeds._device_put import BatchPlacer, RowIndex

Position = Annotated[dict[str, Any], "JSON-serializable"]  # where a stream is in its data
Position.__doc__ = "Where a stream is in its data: a dict of plain values, which a checkpoint stores."

_POLL_SECONDS = 0.05  # between two calls of `stopped`
_JOIN_SECONDS = 2.0  # how long `close` waits for items in progress

_END = object()  # the item after the last one


class LoadedBatch(NamedTuple):
    """A batch on the host: those rows of it that this process needs, and the position after it."""

    arrays: Batch
    spec: BatchSpec  # of all rows
    rows: RowIndex
    position: Position


class BatchIterator(Iterator[dict[str, jax.Array]], metaclass=Documented):
    """An iterator of batches that are on the devices before they are requested.

    Its threads end when it is exhausted, closed or garbage-collected, when its `with` block ends, or after an error.
    """

    def __init__(
        self,
        load: Callable[[int], LoadedBatch | None],  # the batch of a step, or None after the last one
        placer: BatchPlacer,
        *,
        start: int,
        total: int | None,
        threads: int,
        prefetch: int,
        stopped: Callable[[], bool] | None,
        position: Position,
        on_end: Callable[[], None] = lambda: None,
    ):
        if stopped is not None and not callable(stopped):
            raise TypeError(f"stream: stopped is {stopped!r}, but must be a function that returns whether to stop.")
        self._position = position
        self._stopped = stopped
        self._prefetcher = Prefetcher(
            functools.partial(_make_item, load, placer, start), total, threads, prefetch, on_end
        )
        self._close = weakref.finalize(self, self._prefetcher.close)  # also at interpreter exit
        self.waited = 0.0  # seconds that the caller has waited for data

    def __next__(self) -> dict[str, jax.Array]:
        start = time.perf_counter()
        item = self._prefetcher.get(self._stopped)
        self.waited += time.perf_counter() - start
        if item is _END:
            raise StopIteration
        batch, self._position = item
        return batch

    def position(self) -> Position:
        """The position after the last returned batch; `stream(position=...)` continues there."""
        return dict(self._position)

    def close(self) -> None:
        """End the threads. No batches follow."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self):
        return f"BatchIterator(at step {self._position['step']:,})"


def _make_item(load: Callable[[int], LoadedBatch | None], placer: BatchPlacer, start: int, number: int) -> Any:
    """Item `number`: the next `placer.steps_per_call` batches on the devices, and the position after them."""
    first = start + number * placer.steps_per_call
    batches: list[LoadedBatch] = []
    for step in range(first, first + placer.steps_per_call):
        if (batch := load(step)) is None:
            return _END
        batches.append(batch)
    last = batches[-1]
    return placer.put([batch.arrays for batch in batches], last.spec, last.rows), last.position


def start_step(start: int | None, position: Position | None) -> int:
    """The first step of a stream, from `start` or `position` or both."""
    start = None if start is None else int_at_least(0, start, "stream: start")
    if position is None:
        return start or 0
    if not isinstance(position, dict) or not isinstance(position.get("step"), int):
        raise TypeError(f'stream: position is {position!r}, but must be a stream.position(): {{"step": 7}}.')
    if start is not None and start != position["step"]:
        raise ValueError(
            f"stream: start is {start:,} but position is at step {position['step']:,}; pass one of them, or the "
            "position that was saved with this step."
        )
    return position["step"]


def count_items(start: int, stop: int | None, steps_per_call: int) -> int | None:
    """The number of items of `steps_per_call` batches from step `start` to `stop`; None if `stop` is."""
    steps_per_call = int_at_least(1, steps_per_call, "stream: steps_per_call")
    if stop is None:
        return None
    stop = int_at_least(0, stop, "stream: stop")
    if stop > start and (stop - start) % steps_per_call:
        raise ValueError(
            f"stream: the {stop - start:,} steps from {start:,} to {stop:,} are not a multiple of "
            f"steps_per_call={steps_per_call}, and a shorter last stack would recompile; stop at "
            f"{stop - (stop - start) % steps_per_call:,} and continue with steps_per_call=1."
        )
    return max(0, stop - start) // steps_per_call


class Prefetcher:
    """Computes make(0), make(1), ..., make(total - 1) in threads, at most `prefetch` items before they are requested.

    The threads refer to this object and not to its owner, so that garbage collection of the owner can close it. They
    are daemons: a source that blocks forever does not keep the interpreter from exiting.
    """

    def __init__(
        self, make: Callable[[int], Any], total: int | None, threads: int, prefetch: int, on_end: Callable[[], None]
    ):
        self._make, self._total, self._prefetch, self._on_end = make, total, prefetch, on_end
        lock = threading.RLock()  # reentrant, since the garbage collector may call `close` at any point
        self._ready = threading.Condition(lock)  # an item is ready, or no more will be
        self._space = threading.Condition(lock)  # an item was requested, so one thread may start another
        self._items: dict[int, Any] = {}
        self._started = self._returned = 0
        self._closed = False
        self._running = min(threads, prefetch)
        self._threads = [
            threading.Thread(target=self._work, name=f"mlax-feed-{i}", daemon=True) for i in range(self._running)
        ]
        for thread in self._threads:
            thread.start()

    def get(self, stopped: Callable[[], bool] | None) -> Any:
        """The next item, or _END after the last or if `stopped()` while waiting. Raises what `make` raised."""
        halted = False
        with self._ready:
            while self._returned not in self._items and not self._closed and self._returned != self._total:
                if halted := stopped is not None and stopped():
                    break
                self._ready.wait(_POLL_SECONDS if stopped is not None else None)
            item = _END if halted else self._items.pop(self._returned, _END)
            self._returned += item is not _END
            self._space.notify()
        if item is _END or isinstance(item, _Failure):
            self.close(timeout=0 if halted else _JOIN_SECONDS)
        if isinstance(item, _Failure):
            raise item.error
        return item

    def close(self, timeout: float = _JOIN_SECONDS) -> None:
        """End the threads and discard their items."""
        with self._space:
            self._closed = True
            self._items.clear()
            self._notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        try:
            while (number := self._next_number()) is not None:
                try:
                    item = self._make(number)
                except BaseException as error:
                    item = _Failure(error)
                with self._ready:
                    if item is _END or isinstance(item, _Failure):
                        self._total = number + 1 if self._total is None else min(number + 1, self._total)
                        self._notify_all()
                    if not self._closed:
                        self._items[number] = item
                    self._ready.notify_all()
                del item  # or this thread would keep it alive while it waits
        finally:
            with self._space:
                self._running -= 1
                last = self._running == 0
            if last:
                self._on_end()

    def _next_number(self) -> int | None:
        with self._space:
            while not self._is_done() and self._started - self._returned >= self._prefetch:
                self._space.wait()
            if self._is_done():
                self._notify_all()
                return None
            self._started += 1
            return self._started - 1

    def _is_done(self) -> bool:
        return self._closed or (self._total is not None and self._started >= self._total)

    def _notify_all(self) -> None:
        self._space.notify_all()
        self._ready.notify_all()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error
        if isinstance(error, StopIteration):  # it would silently end the caller's loop
            self.error = RuntimeError(f"StopIteration was raised while a batch was loaded: {error}")
            self.error.__cause__ = error
