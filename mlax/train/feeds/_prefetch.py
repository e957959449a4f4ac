"""BatchIterator: batches that threads load and transfer to the devices ahead of time."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax

Position = dict[str, Any]  # JSON can hold it
PlacedBatch = tuple[dict[str, jax.Array], Position]  # a batch on its devices, and the position after it


class BatchIterator(Iterator[dict[str, jax.Array]]):
    """An iterator of batches that lie on the devices before they are asked for.

    It ends its threads when it is exhausted, closed, left as a context, forgotten, or has raised an error.
    """

    def __init__(
        self,
        make: Callable[[int], PlacedBatch | Any],  # the items by number: Made, or END after the last
        *,
        total: int | None,
        threads: int,
        ahead: int,
        stopped: Callable[[], bool] | None,
        position: Position,
        ended: Callable[[], None] = lambda: None,
    ):
        if stopped is not None and not callable(stopped):
            raise TypeError(f"stream: stopped is {stopped!r} but is to be a function that says whether to end.")
        self._position = position
        self._stopped = stopped
        self._ahead = Prefetcher(make, total, threads, ahead, ended)
        self._close = weakref.finalize(self, self._ahead.close)  # also when Python ends
        self.waited = 0.0  # seconds that the caller has waited for data

    def __next__(self) -> dict[str, jax.Array]:
        begun = time.perf_counter()
        item = self._ahead.take(self._stopped)
        self.waited += time.perf_counter() - begun
        if item is END:
            raise StopIteration
        batch, self._position = item
        return batch

    def position(self) -> Position:
        """Where the data goes on after the batch handed out last; `stream(position=...)` begins there."""
        return dict(self._position)

    def close(self) -> None:
        """End the threads; there are no more batches after that."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self):
        return f"Stream(at step {self._position['step']:,})"


POLL = 0.05  # seconds between two looks at `stopped`
PATIENCE = 2.0  # seconds that closing waits for an item in the making

END = object()  # given by `take` when there is nothing more; an item that is END ends the rest


class Prefetcher:
    """Items make(0), make(1), ... up to `total`, at most `ahead` of them made or in the making and not yet taken.

    The threads know this object and not its owner, so that an owner that is forgotten can close it. They are daemons: a
    source that never answers cannot keep Python from ending.
    """

    def __init__(
        self, make: Callable[[int], Any], total: int | None, threads: int, ahead: int, ended: Callable[[], None]
    ):
        self._make, self._total, self._ahead, self._ended = make, total, ahead, ended
        lock = threading.RLock()  # reentrant, since the garbage collector may close from anywhere
        self._ready = threading.Condition(lock)  # an item was made, or there will be none
        self._space = threading.Condition(lock)  # an item was taken: one thread may begin another, and only one wakes
        self._made: dict[int, Any] = {}
        self._begun = self._taken = 0
        self._closed = False
        self._running = min(threads, ahead)
        self._threads = [
            threading.Thread(target=self._work, name=f"mlax-feed-{i}", daemon=True) for i in range(self._running)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, stopped: Callable[[], bool] | None) -> Any:
        """The next item, or END; raises what its making raised. Ends when `stopped` says so during a wait."""
        halted = False
        with self._ready:
            while self._taken not in self._made and not self._closed and self._taken != self._total and not halted:
                halted = stopped is not None and stopped()
                if not halted:
                    self._ready.wait(POLL if stopped is not None else None)
            item = END if halted else self._made.pop(self._taken, END)
            self._taken += item is not END
            self._space.notify()
        if item is END or isinstance(item, _Failure):
            self.close(patience=0 if halted else PATIENCE)
        if isinstance(item, _Failure):
            raise item.error
        return item

    def close(self, patience: float = PATIENCE) -> None:
        """End the threads and forget what they made."""
        with self._space:
            self._closed = True
            self._made.clear()
            self._wake_all()
        until = time.monotonic() + patience
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        try:
            while (number := self._begin()) is not None:
                try:
                    item = self._make(number)
                except BaseException as error:
                    item = _Failure(error)
                with self._ready:
                    if item is END or isinstance(item, _Failure):
                        self._total = number + 1 if self._total is None else min(number + 1, self._total)
                        self._wake_all()
                    if not self._closed:
                        self._made[number] = item
                    self._ready.notify_all()
                del item  # or the thread would hold on to it while it waits
        finally:
            with self._space:
                self._running -= 1
                last = self._running == 0
            if last:
                self._ended()

    def _begin(self) -> int | None:
        with self._space:
            while not self._over() and self._begun - self._taken >= self._ahead:
                self._space.wait()
            if self._over():
                self._wake_all()
                return None
            self._begun += 1
            return self._begun - 1

    def _over(self) -> bool:
        return self._closed or (self._total is not None and self._begun >= self._total)

    def _wake_all(self) -> None:
        self._space.notify_all()
        self._ready.notify_all()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error
        if isinstance(error, StopIteration):  # it would end the caller's loop without a word
            self.error = RuntimeError(f"StopIteration was raised while a batch was made: {error}")
            self.error.__cause__ = error
