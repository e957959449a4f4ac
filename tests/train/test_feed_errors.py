"""Errors of feeds."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlax import place, train

X = np.zeros((6, 2), np.float32)


class Returns:
    """A source of 8 examples whose batches are make(ids)."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 8

    def __getitem__(self, ids):
        return self.make(ids)


@pytest.mark.parametrize(
    "source, error, words",
    [
        ({"x": X, "y": X[:5]}, ValueError, "Feed: the arrays have different lengths: 'x' 6, 'y' 5;"),
        ({"x": X[:0]}, ValueError, "Feed: the source is empty; it needs at least one example."),
        ({}, ValueError, "Feed: the dict is empty; pass arrays by name"),
        ({"x": np.float32(3)}, ValueError, "'x' is a scalar, but needs a leading axis"),
        ({"x": np.array([[1], [2, 3]], object)}, TypeError, "'x' is an array of objects, but must be numeric"),
        ({"x": np.array(["a", "b"])}, TypeError, "'x' is an array of <U1, but must be numeric; encode"),
        ({"x": np.zeros(3, "datetime64[s]")}, TypeError, "'x' is an array of datetime64"),
        ({"x": [[1], [2, 3]]}, ValueError, "inhomogeneous"),
        (X, TypeError, r"the source is float32\[6, 2\], but must be a dict of arrays.*write Feed\({\"x\""),
        (jax.numpy.zeros((6, 2)), TypeError, r"the source is float32\[6, 2\], but must be a dict of arrays"),
        ((X, X), TypeError, "the source is a tuple, but must be a dict of arrays.*write Feed"),
        ([X, X], TypeError, "the source is a list, but must be a dict of arrays"),
        ([{"x": 1}], TypeError, r"the source is a list, .* train.ExampleSource\(...\) for a dataset"),
        ("mnist", TypeError, "the source is a str, but must be a dict of arrays"),
        (range(9), TypeError, "the source is a range, but must be a dict of arrays"),
        (iter([1]), TypeError, "the source is a list_iterator, but must be a dict"),
        (
            Returns(lambda ids: np.zeros(len(ids))),
            TypeError,
            "the source returned a ndarray, but a batch is a dict of arrays",
        ),
        (Returns(lambda ids: {}), TypeError, "the source returned an empty dict"),
        (Returns(lambda ids: {"x": ids[1:]}), ValueError, "the source returned 3 rows for 4 examples"),
        (Returns(lambda ids: {"x": ids, "y": ids[1:]}), ValueError, "different lengths: 'x' 4, 'y' 3"),
        (Returns(lambda ids: {"x": ids, "mask": ids}), TypeError, r'"mask" is int32\[4\], but must be bool.* target'),
        (
            {"x": np.array([2**40, 0])},
            OverflowError,
            "'x' contains 1,099,511,627,776, which overflows int32; call .* or leave it out",
        ),
    ],
)
def test_an_invalid_source_is_an_error(source, error, words):
    with pytest.raises(error, match=words):
        train.Feed(source, batch=4).batch_at(0)


def test_the_error_of_a_ragged_list_suggests_buckets():
    with pytest.raises(ValueError, match="inhomogeneous") as caught:
        train.Feed({"x": [[1], [2, 3]]}, batch=4)
    assert "for sequences, use train.Buckets or train.pack_sequences" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "changed, words",
    [
        (lambda ids: {"x": ids.astype(np.float32)}, r"x float32\[4\] where the first batch had x int32\[4\]"),
        (lambda ids: {"y": ids}, r"no x, y int32\[4\] where the first batch had x int32\[4\], no y"),
        (lambda ids: {"x": ids[:, None]}, r"x int32\[4, 1\] where the first batch had x int32\[4\]"),
    ],
)
def test_the_error_names_what_changed_between_batches(changed, words):
    feed = train.Feed(Returns(lambda ids: {"x": ids} if ids[0] == 0 else changed(ids)), batch=4)
    with pytest.raises(ValueError, match=words) as caught, feed.stream() as stream:
        list(stream)
    assert caught.value.__notes__ == ["in the batch of step 1, examples 4, 5, 6, 7"]


@pytest.mark.parametrize("name", ["batch", "workers", "prefetch"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4"])
def test_counts_are_ints_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=f"Feed: {name} is {value!r}, but must be an int of at least 1"):
        train.Feed({"x": X}, **{"batch": 2, name: value})


@pytest.mark.parametrize(
    "given, said",
    [({"x": X}, "{x: float32[6, 2]}"), (X, "float32[6, 2]"), (np.int64(-3), "np.int64(-3)"), (None, "None")],
)
def test_the_error_of_a_count_describes_the_value_in_short(given, said):
    with pytest.raises(ValueError, match=re.escape(f"Feed: batch is {said}, but must be an int of at least 1.")):
        train.Feed(8, given)


def test_a_seed_is_an_int_of_at_least_zero():
    with pytest.raises(ValueError, match="seed is -1, but must be an int of at least 0"):
        train.Feed({"x": X}, batch=2, seed=-1)


def test_a_batch_that_does_not_divide_into_shards_is_an_error():
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model")), PartitionSpec("data"))
    with pytest.raises(ValueError, match="a batch of 30 does not divide evenly into the 4 shards"):
        train.Feed({"x": X}, batch=30, sharding=sharding)
    with pytest.raises(ValueError, match=r"use batch=4\."):
        train.Buckets([[1]], lengths=(4,), batch=2, sharding=sharding)
    with pytest.raises(ValueError, match="use batch=4 or 8"):
        train.IterableFeed([{"x": X}], sharding=sharding).example  # noqa: B018
    with pytest.raises(TypeError, match=r"Feed: sharding is a place\.Plan, .*; pass plan\.batch_sharding\."):
        train.Feed({"x": X}, batch=4, sharding=place.data())
    with pytest.raises(TypeError, match=r"sharding is a P.* but .* write NamedSharding\(mesh"):
        train.Feed({"x": X}, batch=4, sharding=PartitionSpec("data"))


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"start": -1}, ValueError, "stream: start is -1, but must be an int of at least 0"),
        ({"steps_per_call": 0}, ValueError, "stream: steps_per_call is 0, but must be an int of at least 1"),
        (
            {"start": 3, "stop": 10, "steps_per_call": 4},
            ValueError,
            "7 steps from 3 to 10 are not a multiple of steps_per_call=4",
        ),
        ({"stop": 2.5}, ValueError, "stream: stop is 2.5, but must be an int"),
        ({"position": 3}, TypeError, "position is 3, but must be a stream.position"),
        ({"start": 3, "position": {"step": 4}}, ValueError, "start is 3 but position is at step 4"),
        ({"stopped": True}, TypeError, "stopped is True, but must be a function"),
    ],
)
def test_invalid_arguments_of_stream_are_errors(options, error, words):
    with pytest.raises(error, match=words):
        train.Feed({"x": X}, batch=2).stream(**options)


def test_map_batch_keeps_the_number_of_rows_and_map_example_the_names():
    with pytest.raises(ValueError, match="map_batch returned 1 rows for 2 examples"):
        train.Feed({"x": X}, batch=2, map_batch=lambda batch, g: {"x": batch["x"][:1]}).batch_at(0)
    odd = train.Feed(
        {"x": X}, batch=6, map_example=lambda example, g: example if g.random() < 0.5 else {**example, "y": 1}
    )
    with pytest.raises(ValueError, match="map_example: examples differ in names or shapes"):
        odd.batch_at(0)


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: train.Buckets([[1, 2], [1] * 9, [1] * 7], (4, 6), 2),
            "2 of 3 .* longer than 6, the first is sequence 1 ",
        ),
        (lambda: train.Buckets([[1, 2], []], (4,), 2), "1 of 2 sequences are empty, the first is 1"),
        (lambda: train.Buckets([], (4,), 2), "there are no sequences"),
        (lambda: train.Buckets([[1]], (4, 4), 2), r"lengths are \(4, 4\), but must increase"),
        (lambda: train.Buckets([[1]], (), 2), "must increase"),
        (lambda: train.Buckets([[1]], (4, 8), (2,)), "1 batch sizes for 2 lengths"),
        (lambda: train.Buckets({"a": [[1]], "b": [[1, 2]]}, (4,), 2), "sequence 0 has length 1 in 'a' but 2 in 'b'"),
        (lambda: train.Buckets({"label": np.zeros(3)}, (4,), 2), "no column holds sequences"),
        (lambda: train.Buckets({"mask": [[1]]}, (4,), 2), "are reserved; rename the column"),
        (
            lambda: train.Buckets([[1], [1.5]], (4,), 2).batch_at(0),
            "'tokens' is float32.*, but must be int32",
        ),
        (
            lambda: train.Buckets([[1], [1, 2]], (1, 2), 2).stream(steps_per_call=2),
            "steps_per_call=2 needs batches of one shape",
        ),
        (
            lambda: train.pack_sequences([[1] * 5], 4),
            "1 of 1 sequences are longer than 4.*or split=True",
        ),
        (lambda: train.pack_sequences({"a": [[1]], "label": np.zeros(1)}, 4), "label: rows hold sequences only"),
    ],
)
def test_invalid_sequences_are_errors(make, words):
    with pytest.raises(ValueError, match=words):
        make()
