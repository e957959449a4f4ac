"""Buckets and pack_sequences: every entry once, in fixed shapes, with the right masks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlax import train

LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=60)


def sequences_of(lengths):
    """Sequences of distinct values, none of them 0."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length + 1, end + 1) for end, length in zip(ends, lengths, strict=True)]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 7), st.none() | st.integers(0, 5), st.integers(0, 2))
def test_buckets_have_every_sequence_once_per_epoch_with_the_least_padding(lengths, batch, seed, epoch):
    sequences = sequences_of(lengths)
    feed = train.Buckets(sequences, lengths=(4, 9, 16), batch=batch, seed=seed)
    seen = []
    for step in range(epoch * feed.steps, (epoch + 1) * feed.steps):
        made, ids = feed.batch_at(step), feed.indices(step)
        (b, t) = made["tokens"].shape
        assert b == batch and t in (4, 9, 16) and made["mask"].shape == (b, t)
        assert {n: (a.shape, a.dtype) for n, a in made.items()} in [
            {n: (s.shape, s.dtype) for n, s in spec.items()} for spec in feed.specs
        ]
        for tokens, mask, i in zip(made["tokens"], made["mask"], ids, strict=True):
            if i < 0:
                assert not mask.any()
                continue
            seen.append(int(i))
            assert np.array_equal(tokens[mask], sequences[i])
            assert np.array_equal(mask, np.arange(t) < lengths[i]) and not tokens[~mask].any()
            assert t == min(limit for limit in (4, 9, 16) if limit >= lengths[i])
    assert sorted(seen) == list(range(len(lengths)))


def test_buckets_shuffle_the_order_of_lengths():
    feed = train.Buckets(sequences_of([3] * 40 + [8] * 40), lengths=(4, 9), batch=4, seed=0)
    orders = [[feed.batch_at(e * 20 + s)["tokens"].shape[1] for s in range(20)] for e in range(3)]
    assert all(sorted(order) == [4] * 10 + [9] * 10 for order in orders)
    assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])


def test_a_stream_of_buckets_equals_batch_at():
    feed = train.Buckets(sequences_of([3, 8, 2, 9, 1, 1, 7]), lengths=(4, 9), batch=2, seed=0)
    with feed.stream(start=3, stop=9) as stream:
        for step, batch in enumerate(stream, 3):
            wanted = feed.batch_at(step)
            assert all(np.array_equal(batch[name], wanted[name]) for name in wanted)
    assert repr(feed) == (
        "Buckets(7 sequences padded to the next length: 4 in 4, 3 in 9; batches of 2, 4 per epoch, shuffled by seed 0)"
    )


def test_buckets_may_have_a_batch_size_for_each_length_and_other_columns():
    tokens = sequences_of([3, 8, 2])
    given = {"tokens": tokens, "tags": [-t for t in tokens], "label": np.array([5, 6, 7])}
    feed = train.Buckets(given, lengths=(4, 9, 20), batch=(4, 2, 1))
    assert [spec["tokens"].shape for spec in feed.specs] == [(4, 4), (2, 9)]
    first = feed.batch_at(0)
    assert np.array_equal(first["tags"], -first["tokens"]) and first["label"].tolist() == [5, 7, 5, 7]


def test_buckets_truncate_long_sequences_with_cut():
    feed = train.Buckets(sequences_of([3, 12]), lengths=(2, 4), batch=2, cut=True, pad=-1)
    batch = feed.batch_at(0)
    assert batch["tokens"].tolist() == [[1, 2, 3, -1], [4, 5, 6, 7]] and batch["mask"].sum() == 7


def test_sequences_of_vectors_are_padded_along_time():
    feed = train.Buckets([np.ones((3, 2), np.float32), np.ones((1, 2), np.float32)], lengths=(4,), batch=2)
    assert feed.example["tokens"].shape == (2, 4, 2) and feed.batch_at(0)["mask"].shape == (2, 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 24))
def test_packed_rows_have_every_entry_once_with_its_segment_and_position(lengths, length):
    sequences = sequences_of(lengths)
    rows = train.pack_sequences(sequences, length, split=True)
    made = rows[np.arange(len(rows))]
    tokens, segments, positions, mask = (made[name] for name in ("tokens", "segments", "positions", "mask"))
    assert all(array.shape == (len(rows), length) for array in made.values())
    assert sorted(tokens[mask].tolist()) == list(range(1, sum(lengths) + 1))
    assert np.array_equal(mask, segments > 0) and not tokens[~mask].any() and not positions[~mask].any()
    assert rows.fill == mask.mean()
    pieces = {tuple(s[i : i + length]) for s in sequences for i in range(0, len(s), length)}
    for row in range(len(rows)):
        there = segments[row][mask[row]]
        assert np.array_equal(np.unique(there), np.arange(1, there.max() + 1)) and np.all(np.diff(there) >= 0)
        for segment in range(1, there.max() + 1):
            entries = segments[row] == segment
            pieces.remove(tuple(tokens[row][entries]))
            assert np.array_equal(positions[row][entries], np.arange(entries.sum()))
    assert not pieces


def test_packed_rows_are_99_percent_full():
    lengths = np.random.default_rng(0).integers(1, 100, 2_000)
    rows = train.pack_sequences(sequences_of(lengths), 128)
    assert rows.fill > 0.99
    assert repr(rows) == f"PackedSequences(2,000 sequences in {len(rows):,} rows of 128, {rows.fill:.1%} full)"


def test_packed_rows_are_a_source():
    feed = train.Feed(train.pack_sequences(sequences_of([3, 4, 2, 8, 1, 5]), 8), batch=2, seed=0)
    seen = [i for batch in feed.epoch() for i in np.asarray(batch["tokens"])[np.asarray(batch["mask"])].tolist()]
    assert sorted(seen) == list(range(1, 24))
    assert {n: (s.shape, str(s.dtype)) for n, s in feed.example.items()} == {
        "mask": ((2, 8), "bool"),
        "positions": ((2, 8), "int32"),
        "segments": ((2, 8), "int32"),
        "tokens": ((2, 8), "int32"),
    }
