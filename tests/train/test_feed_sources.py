"""Sources of a Feed: arrays in memory and on disk, datasets of single examples, Hugging Face datasets."""

import jax.numpy as jnp
import numpy as np
import pytest

from mlax import train


def test_only_the_requested_rows_of_a_file_are_read(tmp_path):
    path = tmp_path / "images.npy"
    rows, width = 2_048, 16_384  # 128 MiB, in a sparse file
    written = np.lib.format.open_memmap(path, "w+", np.float32, (rows, width))
    written[:, 0] = np.arange(rows)
    written.flush()
    del written
    feed = train.Feed({"image": np.load(path, mmap_mode="r")}, batch=4, seed=0)
    before = anonymous_memory()
    for step in range(20):
        batch = feed.batch_at(step)
        assert np.array_equal(batch["image"][:, 0], feed.indices(step))
        assert not isinstance(batch["image"], np.memmap) and batch["image"].base is None
    assert anonymous_memory() - before < 32 * 2**20


def anonymous_memory():
    """The anonymous memory of this process in bytes, without mapped files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


class IncreasingOnly:
    """Like an array in an HDF5 file: ids must increase, without duplicates."""

    shape, dtype = (10, 2), np.dtype(np.float32)

    def __len__(self):
        return 10

    def __getitem__(self, ids):
        assert np.all(np.diff(ids) > 0)
        return np.stack([ids, ids], 1).astype(np.float32)


def test_arrays_that_require_increasing_ids_are_read_in_order():
    feed = train.Feed({"x": IncreasingOnly()}, batch=4, seed=0)
    for step in range(feed.steps):
        batch, ids = feed.batch_at(step), feed.indices(step)
        assert np.array_equal(batch["x"][batch["mask"], 0], ids[ids >= 0])


def test_lists_and_jax_arrays_are_columns_too():
    feed = train.Feed({"a": [1, 2, 3], "b": jnp.arange(3.0)}, batch=3)
    assert feed.batch_at(0)["a"].tolist() == [1, 2, 3] and feed.batch_at(0)["b"].tolist() == [0, 1, 2]


class Examples:
    def __len__(self):
        return 7

    def __getitem__(self, i):
        if not isinstance(i, int):
            raise TypeError
        return {"image": np.full((2, 2), i, np.uint8), "label": i}


def test_example_source_reads_a_dataset_of_single_examples():
    feed = train.Feed(train.ExampleSource(Examples()), batch=3, seed=0)
    assert repr(feed).startswith("Feed(7 examples of image uint8[2, 2], label int32[]; batches of 3")
    batch = feed.batch_at(1)
    assert np.array_equal(batch["label"], feed.indices(1)) and np.array_equal(batch["image"][:, 1, 1], batch["label"])


class HuggingFace:
    """The part of `datasets.Dataset` that a Feed uses: lists unless a format is set."""

    column_names = ("text", "label")

    def __init__(self, columns, kind=None):
        self.columns, self.kind = columns, kind

    def with_format(self, kind):
        return HuggingFace(self.columns, kind)

    def __len__(self):
        return len(self.columns["label"])

    def __getitem__(self, ids):
        rows = {name: [column[i] for i in ids] for name, column in self.columns.items()}
        return {n: np.array(column) for n, column in rows.items()} if self.kind == "numpy" else rows


def test_a_hugging_face_dataset_is_read_in_numpy_format():
    feed = train.Feed(HuggingFace({"pixels": [[i, i] for i in range(9)], "label": list(range(9))}), batch=4, seed=1)
    labels = [i for batch in feed.epoch() for i in np.asarray(batch["label"])[np.asarray(batch["mask"])].tolist()]
    assert sorted(labels) == list(range(9)) and feed.example["pixels"].shape == (4, 2)


def test_the_error_names_a_text_column_of_a_hugging_face_dataset():
    with pytest.raises(TypeError, match="'text' is an array of <U1, but must be numeric; encode or drop it"):
        train.Feed(HuggingFace({"text": ["a", "b"], "label": [0, 1]}), batch=2).batch_at(0)
