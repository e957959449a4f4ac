"""Stream: batches on their way to the devices."""

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax

from mlax.train.feeds._ahead import END, Ahead

Position = dict[str, Any]  # JSON can hold it
Made = tuple[dict[str, jax.Array], Position]  # a batch on its devices, and the position after it


class Stream(Iterator[dict[str, jax.Array]]):
    """An iterator of batches that lie on the devices before they are asked for.

    It ends its threads when it is exhausted, closed, left as a context, forgotten, or has raised an error.
    """

    def __init__(
        self,
        make: Callable[[int], Made | Any],  # the items by number: Made, or END after the last
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
        self._ahead = Ahead(make, total, threads, ahead, ended)
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
