"""Feed: the contents and order of its batches, as a function of the seed and the step."""

import jax
import numpy as np
import pytest

from mlax import train
from tests.asserts import unequal_leaves


def digits(n=23):
    return {"image": np.arange(n * 4, dtype=np.float32).reshape(n, 2, 2), "digit": np.arange(n)}


def ids_of(batches):
    return [int(i) for batch in batches for i in np.asarray(batch["digit"])[np.asarray(batch["mask"])]]


def test_every_epoch_has_each_example_once_in_a_different_order():
    feed = train.Feed(digits(), batch=4, seed=0)
    epochs = [ids_of(feed.batch_at(step) for step in range(e * 6, (e + 1) * 6)) for e in range(4)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_seeds_give_different_orders_and_none_keeps_the_order():
    orders = {seed: ids_of(train.Feed(digits(), batch=4, seed=seed).epoch()) for seed in (None, 0, 1, 2)}
    assert orders[None] == list(range(23))
    assert len({tuple(order) for order in orders.values()}) == 4


def test_a_batch_is_a_function_of_the_seed_and_the_step():
    one, other = (train.Feed(digits(), batch=4, seed=3, map_batch=jittered) for _ in range(2))
    other.batch_at(17), other.batch_at(2)
    for step in (0, 5, 6, 1_000_003):
        assert not unequal_leaves(one.batch_at(step), other.batch_at(step))
        assert np.array_equal(one.indices(step), other.indices(step))


def test_the_stream_equals_batch_at():
    feed = train.Feed(digits(), batch=4, seed=3, map_batch=jittered, workers=3, prefetch=5)
    with feed.stream(stop=20) as stream:
        batches = list(stream)
    assert len(batches) == 20
    for step, batch in enumerate(batches):
        assert not unequal_leaves(batch, feed.batch_at(step))
        assert all(isinstance(leaf, jax.Array) for leaf in batch.values())


def test_a_stream_resumed_repeatedly_equals_an_uninterrupted_one():
    feed = train.Feed(digits(), batch=4, seed=0)
    unbroken = ids_of(feed.stream(stop=40))
    resumed, position = [], {"step": 0}
    for length in (7, 9, 1, 14, 9):
        with train.Feed(digits(), batch=4, seed=0).stream(position=position) as stream:
            resumed += ids_of(next(stream) for _ in range(length))
            position = stream.position()
    assert resumed == unbroken and position == {"step": 40}
    assert ids_of(feed.stream(start=15, stop=40)) == unbroken[-len(ids_of(feed.stream(15, 40))) :]


def test_the_position_is_that_of_the_last_returned_batch_not_of_prefetched_ones():
    with train.Feed(digits(), batch=4, prefetch=4).stream(start=3) as stream:
        assert stream.position() == {"step": 3}
        next(stream)
        assert stream.position() == {"step": 4}


def test_a_step_may_be_an_array():
    feed = train.Feed(digits(), batch=4, seed=0)
    with feed.stream(start=jax.numpy.int32(3)) as stream:
        assert not unequal_leaves(next(stream), feed.batch_at(3)) and stream.position() == {"step": 4}


def test_the_last_batch_has_the_same_shape_and_masks_its_padding():
    feed = train.Feed(digits(), batch=4, seed=0)
    assert feed.steps == 6
    last = feed.batch_at(5)
    assert (feed.indices(5) == -1).tolist() == [False, False, False, True]
    assert last["mask"].tolist() == [True, True, True, False]
    shapes = {name: {np.shape(feed.batch_at(step)[name]) for step in range(12)} for name in last}
    assert shapes == {"image": {(4, 2, 2)}, "digit": {(4,)}, "mask": {(4,)}}


def test_a_batch_is_padded_with_other_examples_of_the_epoch():
    feed = train.Feed(digits(17), batch=16, seed=0)
    for epoch in range(3):
        filled = feed.batch_at(2 * epoch + 1)
        assert filled["mask"].sum() == 1 and len(set(filled["digit"].tolist())) == 16
        assert not unequal_leaves(filled, feed.batch_at(2 * epoch + 1))


def test_a_batch_may_be_larger_than_the_source():
    batch = train.Feed(digits(3), batch=8, seed=0).batch_at(0)
    assert sorted(batch["digit"][:3]) == [0, 1, 2] and batch["mask"].sum() == 3


def test_example_has_the_shapes_and_dtypes_of_the_batches():
    feed = train.Feed(digits(), batch=4, seed=0)
    (batch,) = feed.stream(stop=1)
    assert feed.specs == (feed.example,)
    assert {n: (s.shape, s.dtype) for n, s in feed.example.items()} == {n: (a.shape, a.dtype) for n, a in batch.items()}
    assert feed.example["digit"].dtype == np.int32


def test_a_mask_from_the_source_is_kept_except_on_padding():
    mask = np.random.default_rng(0).random((5, 3)) < 0.5
    feed = train.Feed({"x": np.arange(5), "mask": mask}, batch=4)
    assert np.array_equal(feed.batch_at(0)["mask"], mask[:4])
    assert np.array_equal(feed.batch_at(1)["mask"], [mask[4], *[[False] * 3] * 3])


def test_stacked_batches_are_consecutive_along_a_new_axis():
    feed = train.Feed(digits(), batch=4, seed=0)
    with feed.stream(start=2, stop=8, steps_per_call=3) as stream:
        first, second = stream
        assert stream.position() == {"step": 8}
    for stack, steps in ((first, (2, 3, 4)), (second, (5, 6, 7))):
        assert not unequal_leaves(stack, {n: np.stack([feed.batch_at(s)[n] for s in steps]) for n in stack})


def test_each_is_seeded_by_example_whatever_the_batch_size():
    def flipped(example, generator):
        return {**example, "drawn": generator.random(2, np.float32)}

    drawn = {}
    for batch in (3, 8):
        feed = train.Feed(digits(), batch=batch, seed=0, map_example=flipped)
        for step in range(feed.steps):
            made = feed.batch_at(step)
            for i, value, real in zip(made["digit"], made["drawn"], made["mask"], strict=True):
                if real:
                    drawn.setdefault(int(i), []).append(tuple(value))
    assert len(drawn) == 23 and all(a == b for a, b in drawn.values())
    assert len({values[0] for values in drawn.values()}) == 23


def test_transform_is_seeded_differently_at_every_step():
    feed = train.Feed(digits(4), batch=4, map_batch=jittered)
    assert not np.array_equal(feed.batch_at(0)["image"], feed.batch_at(1)["image"])


def test_a_stream_starts_at_the_millionth_step_at_once():
    feed = train.Feed(digits(), batch=4, seed=0)
    with feed.stream(start=10**6) as stream:
        assert not unequal_leaves(next(stream), feed.batch_at(10**6))


def test_repr_describes_the_feed():
    feed = train.Feed({"image": np.zeros((1347, 8, 8), np.float32), "digit": np.zeros(1347, int)}, batch=64, seed=0)
    assert repr(feed) == (
        "Feed(1,347 examples of digit int32[], image float32[8, 8]; batches of 64, 22 per epoch, shuffled by seed 0)"
    )
    assert repr(train.Feed({"x": np.zeros(3, bool)}, batch=2)).endswith(
        "x bool[]; batches of 2, 2 per epoch, in order)"
    )
    with feed.stream() as stream:
        assert repr(stream) == "BatchIterator(at step 0)"


def test_narrow_dtypes_are_kept():
    arrays = {"h": np.zeros(4, jax.numpy.bfloat16), "i": np.zeros(4, np.int8), "u": np.zeros((4, 2), np.uint8)}
    (batch,) = train.Feed(arrays, batch=4).epoch()
    assert {name: str(leaf.dtype) for name, leaf in batch.items() if name != "mask"} == {
        "h": "bfloat16", "i": "int8", "u": "uint8"
    }  # fmt: skip


def test_batches_go_to_the_default_device_uncommitted():
    with jax.default_device(jax.devices("cpu")[3]):
        (batch,) = train.Feed(digits(4), batch=4).epoch()
    assert batch["image"].devices() == {jax.devices("cpu")[3]} and not batch["image"].committed


@pytest.mark.parametrize("number", [0, 2])
def test_an_epoch_is_the_corresponding_part_of_the_stream(number):
    feed = train.Feed(digits(), batch=4, seed=0)
    assert ids_of(feed.epoch(number)) == ids_of(feed.stream(6 * number, 6 * number + 6))


def jittered(batch, generator):
    return {**batch, "image": batch["image"] + generator.random(batch["image"].shape, np.float32)}


def test_padded_indices_are_the_ids_of_all_rows():
    feed = train.Feed({"id": np.arange(75)}, batch=8, seed=0)
    for step in (0, 9, 19):
        assert feed.padded_indices(step).tolist() == feed.batch_at(step)["id"].tolist()
    ids = feed.indices(9)
    assert (ids < 0).sum() == 5 and np.array_equal(feed.padded_indices(9)[ids >= 0], ids[ids >= 0])
