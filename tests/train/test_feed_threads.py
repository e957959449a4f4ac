"""The threads of a stream: none outlives it, their errors are raised, and they respect `prefetch`."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from mlax import train


class Numbers:
    """A source of the ids themselves, which calls `on_read(ids)` first."""

    def __init__(self, n=64, on_read=lambda ids: None):
        self.n, self.on_read = n, on_read

    def __len__(self):
        return self.n

    def __getitem__(self, ids):
        self.on_read(ids)
        return {"x": np.asarray(ids)}


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mlax-feed")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not threads()


def test_no_thread_outlives_a_closed_stream():
    stream = train.Feed(Numbers(), batch=4).stream()
    assert threads()
    next(stream)
    stream.close()
    assert not threads()
    stream.close()
    assert list(stream) == []


def test_no_thread_outlives_its_with_block():
    with train.Feed(Numbers(), batch=4).stream() as stream:
        next(stream)
        assert threads()
    assert not threads()


def test_the_interpreter_exits_while_a_stream_is_open_and_its_source_blocks():
    program = """
import time
import numpy as np
from mlax import train
class Stalls:
    def __len__(self): return 64
    def __getitem__(self, ids):
        time.sleep(60 if ids[0] > 8 else 0)
        return {"x": ids}
stream = train.Feed(Stalls(), batch=4).stream()
print(next(stream)["x"].tolist())
"""
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[0, 1, 2, 3]\n", "")
    assert time.monotonic() - begun < 30


def test_no_thread_outlives_an_exhausted_stream():
    stream = train.Feed(Numbers(), batch=4, workers=4, prefetch=4).stream(stop=9)
    assert len(list(stream)) == 9
    assert not threads()
    assert list(stream) == []


def test_no_thread_outlives_a_garbage_collected_stream():
    stream = train.Feed(Numbers(), batch=4).stream()
    next(stream)
    del stream
    gc.collect()
    assert not threads()


def test_no_thread_outlives_a_loop_that_breaks():
    for _ in train.Feed(Numbers(), batch=4).stream():
        break
    gc.collect()
    assert not threads()


def test_an_empty_stream_is_empty():
    assert list(train.Feed(Numbers(), batch=4).stream(start=5, stop=5)) == []
    assert list(train.Feed(Numbers(), batch=4).stream(start=7, stop=5)) == []


def test_an_error_of_the_source_follows_the_earlier_batches_and_names_the_step_and_ids():
    def fails(ids):
        if 41 in ids:
            raise OSError("the disk is gone")

    feed = train.Feed(Numbers(on_read=fails), batch=4)
    stream = feed.stream(stop=100)
    got = []
    with pytest.raises(OSError, match="the disk is gone") as caught:
        got.extend(stream)
    assert len(got) == 10
    assert caught.value.__notes__ == ["in the batch of step 10, examples 40, 41, 42, 43"]
    assert list(stream) == [] and not threads()


def test_a_stop_iteration_in_the_source_does_not_silently_end_the_loop():
    def fails(ids):
        if 9 in ids:
            next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration was raised"):
        list(train.Feed(Numbers(on_read=fails), batch=4).stream(stop=10))


def test_the_ids_of_a_large_batch_are_abbreviated():
    feed = train.Feed(Numbers(), batch=30, map_batch=lambda batch, generator: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        feed.batch_at(0)
    assert caught.value.__notes__[0] == f"in the batch of step 0, examples {', '.join(map(str, range(16)))} and 14 more"


@pytest.mark.parametrize("at", [0, 5])
def test_a_stream_of_a_blocked_source_ends_when_stopped_returns_true(at):
    release, stopping = threading.Event(), threading.Event()
    stalls = Numbers(on_read=lambda ids: release.wait(20) if ids[-1] >= 4 * at else None)
    stream = train.Feed(stalls, batch=4).stream(stopped=stopping.is_set)
    got = [next(stream) for _ in range(at)]
    said = []
    threading.Timer(0.1, lambda: (said.append(time.monotonic()), stopping.set())).start()
    got += list(stream)
    assert time.monotonic() - said[0] < 0.2
    assert len(got) == at and stream.position() == {"step": at}
    release.set()
    while threads():
        time.sleep(0.01)


def test_stopped_is_not_called_while_batches_are_ready():
    with train.Feed(Numbers(), batch=4).stream(stopped=lambda: True) as stream:
        time.sleep(0.3)
        assert len(next(stream)["x"]) == 4


@pytest.mark.parametrize("prefetch, workers", [(1, 1), (2, 2), (2, 8), (5, 2)])
def test_no_more_than_prefetch_batches_are_prefetched(prefetch, workers):
    begun, lock = [], threading.Lock()

    def counts(ids):
        with lock:
            begun.append(int(ids[0]))

    feed = train.Feed(Numbers(400, counts), batch=4, prefetch=prefetch, workers=workers)
    feed.example  # noqa: B018
    begun.clear()
    with feed.stream() as stream:
        for taken in range(1, 20):
            next(stream)
            assert len(begun) <= taken + prefetch
        until = time.monotonic() + 5
        while len(begun) < taken + prefetch and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(0.05)
        assert len(begun) == taken + prefetch


def test_a_returned_batch_is_not_kept_alive():
    feed = train.Feed(Numbers(400), batch=4, prefetch=2)
    stream = feed.stream(stop=3)
    first = weakref.ref(next(stream)["x"])
    next(stream), next(stream)
    gc.collect()
    assert first() is None
    stream.close()


def test_a_busy_consumer_does_not_wait():
    feed = train.Feed(Numbers(400, lambda ids: time.sleep(0.02)), batch=4)
    with feed.stream() as stream:
        next(stream)
        before = stream.waited
        for _ in range(20):
            time.sleep(0.03)
            next(stream)
        assert stream.waited - before < 0.2  # loading takes 0.4 s


def test_workers_of_uneven_speed_return_batches_in_order():
    uneven = Numbers(400, lambda ids: time.sleep(0.01 * (int(ids[0]) % 3 == 0)))
    got = [int(batch["x"][0]) for batch in train.Feed(uneven, batch=4, workers=8, prefetch=8).stream(stop=30)]
    assert got == list(range(0, 120, 4))
