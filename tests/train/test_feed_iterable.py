"""IterableFeed: batches of an iterator, and resuming at a position in it."""

import itertools
import json
import threading

import numpy as np
import pytest

from mlax import train


def tens(n=10, batch=4, closed=None):
    try:
        for start in range(0, n, batch):
            yield {"x": np.arange(start, min(start + batch, n))}
    finally:
        if closed is not None:
            closed.append(threading.current_thread().name)


def rows(batch):
    return np.asarray(batch["x"])[np.asarray(batch["mask"])].tolist()


def test_a_pass_has_the_batches_of_the_iterator_padded_to_one_shape():
    feed = train.IterableFeed(tens)
    batches = list(feed.epoch())
    assert [rows(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert {batch["x"].shape for batch in batches} == {(4,)} == {feed.example["x"].shape}
    assert feed.specs[0]["mask"].dtype == bool
    assert repr(feed) == "IterableFeed(x int32[]; batches of 4)" and feed.steps is None
    assert repr(train.IterableFeed(tens, steps=3)) == "IterableFeed(x int32[]; batches of 4, 3 per pass)"


def test_the_iterator_is_made_again_after_each_pass():
    got = [rows(batch) for batch in train.IterableFeed(tens).stream(stop=7)]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2 + [[0, 1, 2, 3]]


def test_an_iterable_is_accepted_in_place_of_a_function():
    listed, made = ([rows(batch) for batch in train.IterableFeed(make).stream(stop=4)] for make in (list(tens()), tens))
    assert listed == made


def resumed_and_uninterrupted(make, stop=9, lengths=(2, 1, 3, 3)):
    """The rows of a stream that is closed and resumed by its position, and of an uninterrupted one."""
    whole = [rows(batch) for batch in train.IterableFeed(make()).stream(stop=stop)]
    parts, position = [], None
    for length in lengths:
        with train.IterableFeed(make(), prefetch=3).stream(position=position) as stream:
            parts += [rows(next(stream)) for _ in range(length)]
            position = json.loads(json.dumps(stream.position()))
    assert position["step"] == stop
    return parts, whole


def test_a_resumed_stream_equals_an_uninterrupted_one():
    parts, whole = resumed_and_uninterrupted(lambda: tens)
    assert parts == whole
    with train.IterableFeed(tens).stream(start=4, stop=9) as stream:
        assert [rows(batch) for batch in stream] == whole[4:]


@pytest.mark.parametrize("make", [lambda: tens, lambda: Stateful, lambda: Loader()])
@pytest.mark.parametrize("start", [0, 2, 4, 7])
def test_the_position_before_the_first_batch_resumes_at_that_batch(make, start):
    with train.IterableFeed(make()).stream(start=start) as stream:
        position = json.loads(json.dumps(stream.position()))
        first = rows(next(stream))
    for _ in range(2):  # also from the position of a stream that was resumed and closed at once
        with train.IterableFeed(make()).stream(position=position) as stream:
            position = stream.position()
    with train.IterableFeed(make()).stream(position=position) as stream:
        assert rows(next(stream)) == first and stream.position()["step"] == start + 1


def test_stacked_batches_are_consecutive():
    with train.IterableFeed(tens).stream(stop=4, steps_per_call=2) as stream:
        stacks = list(stream)
        assert stream.position() == {"step": 4, "pass": 1, "taken": 1}
    assert [np.asarray(stack["x"])[:, 0].tolist() for stack in stacks] == [[0, 4], [8, 0]]


class Stateful:
    """Has a state as Grain's iterators do (and reuses one buffer, as some do)."""

    opened = 0

    def __init__(self):
        self.at, self.buffer = 0, np.zeros(2, int)
        Stateful.opened += 1

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        self.buffer[:] = (self.at, self.at + 10)
        self.at += 1
        return {"x": self.buffer}

    def get_state(self):
        return json.dumps({"at": self.at}).encode()

    def set_state(self, state):
        self.at = json.loads(state)["at"]


def test_an_iterator_with_get_state_is_restored_by_set_state():
    parts, whole = resumed_and_uninterrupted(lambda: Stateful)
    assert parts == whole == [[i % 5, i % 5 + 10] for i in range(9)]
    with train.IterableFeed(Stateful).stream(stop=3) as stream:
        list(stream)
        assert stream.position() == {"step": 3, "pass": 0, "state": {"bytes": '{"at": 3}'}}


class Loader:
    """Has the state of its iterator as Hugging Face's IterableDataset does, which restores it within its epoch."""

    def __init__(self):
        self.state, self.loaded = {"epoch": 0, "at": 0}, None

    def set_epoch(self, epoch):
        self.state = {"epoch": epoch, "at": 0}

    def __iter__(self):
        if self.loaded and self.loaded["epoch"] == self.state["epoch"]:
            self.state = dict(self.loaded)
        while self.state["at"] < 5:
            self.state["at"] += 1
            yield {"x": np.array([self.state["epoch"], self.state["at"]])}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize("lengths", [(2, 1, 3, 3), (5, 4), (7, 2)])
def test_a_loader_with_state_dict_is_restored_and_gets_the_epoch(lengths):
    parts, whole = resumed_and_uninterrupted(Loader, lengths=lengths)
    assert parts == whole == [[i // 5, i % 5 + 1] for i in range(9)]


def test_the_thread_that_read_the_iterator_closes_it_and_ends():
    closed = []
    feed = train.IterableFeed(lambda: tens(closed=closed))
    feed.example  # noqa: B018
    closed.clear()
    with feed.stream() as stream:
        next(stream)
    assert closed == ["mlax-feed-0"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mlax-feed")]


@pytest.mark.parametrize(
    "make, error, words",
    [
        (tens(), TypeError, "a generator is exhausted after one pass; pass a function that makes it"),
        (7, TypeError, "a int is not iterable"),
        (lambda: iter(()), ValueError, "the iterator is empty; it needs at least one batch"),
        (lambda: [np.zeros(3)], TypeError, "the iterator returned a ndarray, but a batch is a dict of arrays"),
        (lambda: [{"x": np.zeros(3)}, {"x": np.zeros(4)}], ValueError, "a batch has 4 rows, but must have 1 to 3"),
        (lambda: [{"x": np.zeros(3)}, {"y": np.zeros(3)}], ValueError, r"no x, y float32\[3\] where the first"),
    ],
)
def test_invalid_iterators_are_errors(make, error, words):
    with pytest.raises(error, match=words):
        list(train.IterableFeed(make).stream(stop=3))


def test_an_error_of_the_iterator_names_the_batch():
    def fails():
        yield {"x": np.zeros(3)}
        raise OSError("gone")

    with pytest.raises(OSError, match="gone") as caught:
        list(train.IterableFeed(fails).stream(stop=3))
    assert caught.value.__notes__ == ["in batch number 1 of the iterator"]


def test_a_grain_dataset_resumes_from_its_own_state():
    grain = pytest.importorskip("grain")

    def dataset():
        return grain.MapDataset.range(11).shuffle(seed=1).map(lambda i: {"x": np.int32(i)}).batch(4).to_iter_dataset()

    parts, whole = resumed_and_uninterrupted(dataset)
    assert parts == whole and sorted(itertools.chain(*whole[:3])) == list(range(11))
    with train.IterableFeed(dataset()).stream(stop=2) as stream:
        list(stream)
        assert set(stream.position()) == {"step", "pass", "state"}


def test_a_grain_loader_resumes_from_its_own_state():
    python = pytest.importorskip("grain.python")

    class Squares:
        def __len__(self):
            return 11

        def __getitem__(self, i):
            return {"x": np.int32(i)}

        def __repr__(self):
            return "Squares()"

    def loader():
        sampler = python.IndexSampler(11, shuffle=True, seed=0, shard_options=python.NoSharding(), num_epochs=1)
        return python.DataLoader(data_source=Squares(), sampler=sampler, operations=[python.Batch(4)], worker_count=0)

    parts, whole = resumed_and_uninterrupted(loader)
    assert parts == whole and sorted(itertools.chain(*whole[:3])) == list(range(11))
