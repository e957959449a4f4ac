"""Sources: what examples are read from, by a list of ids at a time."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from mlax.core import signature
from mlax.train.feeds._batch import as_array, as_batch, check_numeric, common_length


@runtime_checkable
class Source(Protocol):
    """Examples by number: `len(source)` of them, and `source[ids]` as a dict of arrays with one row for each id.

    It is read from several threads at once, and does not change an array after giving it. A Hugging Face dataset is a
    Source: it is read in NumPy format.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, ids: np.ndarray, /) -> Mapping[str, Any]: ...


class ArraySource:
    """A Source from a dict of arrays, an example a row; only the rows that are asked for are read.

    An array is anything with `len` and fancy indexing: NumPy, `np.memmap`, h5py, zarr.
    """

    def __init__(self, arrays: Mapping[str, Any]):
        if not arrays:
            raise ValueError('Feed: the dict is empty; give arrays by name: {"image": images, "digit": digits}.')
        self.arrays = {str(name): _as_column(arrays[name], name) for name in sorted(arrays)}
        self._n = common_length(self.arrays, "Feed")

    def __len__(self):
        return self._n

    def __getitem__(self, ids):
        return {name: _gather_rows(array, ids) for name, array in self.arrays.items()}


class ExampleSource:
    """A Source from a dataset that gives one example at a time: `dataset[7]` is a dict of arrays or numbers.

    `Feed(train.ExampleSource(dataset), batch=64)` for a map-style PyTorch dataset, say.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, ids):
        return stack_examples([self.dataset[int(i)] for i in ids], f"ExampleSource({type(self.dataset).__name__})")

    def __repr__(self):
        return type(self.dataset).__name__


def as_source(given: Any) -> Source:
    """`given` as a Source with at least one example, or an error in words."""
    if isinstance(given, Mapping):
        source = ArraySource(given)
    elif hasattr(given, "with_format") and hasattr(given, "column_names"):
        source = given.with_format("numpy")
    elif _is_array(given) or isinstance(given, list | tuple | str | bytes | range) or not isinstance(given, Source):
        what = signature(given) if _is_array(given) else f"a {type(given).__name__}"
        raise TypeError(
            f"Feed: the source is {what} but is to be a dict of arrays, or an object with len(source) and "
            'source[ids] -> dict of arrays; write Feed({"x": ...}, ...), or train.ExampleSource(...) for examples.'
        )
    else:
        source = given
    if len(source) == 0:
        raise ValueError("Feed: the source is empty; it needs at least one example.")
    return source


def stack_examples(examples: list[Any], giver: str) -> Mapping[str, Any]:
    """Examples, each a dict of arrays of one shape, as one dict of arrays with a leading axis."""
    batches = [as_batch({k: np.asarray(v)[None] for k, v in dict(example).items()}, giver) for example in examples]
    names = list(batches[0])
    for batch in batches:
        if list(batch) != names or any(batch[name].shape != batches[0][name].shape for name in names):
            raise ValueError(
                f"{giver}: examples differ in names or shapes: {signature(batch)} beside {signature(batches[0])}; "
                "bring them to one shape, or use train.Buckets or train.pack_sequences for sequences."
            )
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def _as_column(given: Any, name: str) -> Any:
    """An array that is read in place if it is one of NumPy's kind, on disk or in memory; else as a NumPy array."""
    lies_there = isinstance(getattr(given, "dtype", None), np.dtype) and not isinstance(given, jax.Array)
    array = given if lies_there and hasattr(given, "shape") else as_array(given, f"Feed: {name!r}")
    check_numeric(array.dtype, f"Feed: {name!r}")
    return array


def _is_array(given: Any) -> bool:
    return hasattr(given, "shape") and hasattr(given, "dtype")


def _gather_rows(array: Any, ids: np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return np.asarray(array)[ids]  # a plain array, also of a memory-mapped one
    unique, inverse = np.unique(ids, return_inverse=True)  # h5py takes rising ids only, each of them once
    return np.asarray(array[unique])[inverse]
