"""Sources: datasets that return the examples of a list of ids."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from mlax.core import DocumentedProtocol, signature
from mlax.train.feeds._batch import as_array, as_batch, check_numeric, common_length


@runtime_checkable
class Source(Protocol, metaclass=DocumentedProtocol):
    """A dataset of `len(source)` examples; `source[ids]` is a dict of arrays with one row per id.

    It is read from several threads at once, and must not modify an array that it has returned. A Hugging Face dataset
    is a Source, and is read in NumPy format.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, ids: np.ndarray, /) -> Mapping[str, Any]: ...


class ArraySource:
    """A Source from a dict of arrays with one row per example; only requested rows are read.

    An array is anything with `len` and fancy indexing: NumPy, `np.memmap`, h5py, zarr.
    """

    def __init__(self, arrays: Mapping[str, Any]):
        if not arrays:
            raise ValueError('Feed: the dict is empty; pass arrays by name: {"image": images, "digit": digits}.')
        self.arrays = {str(name): _as_column(arrays[name], name) for name in sorted(arrays)}
        self._length = common_length(self.arrays, "Feed")

    def __len__(self):
        return self._length

    def __getitem__(self, ids):
        return {name: _gather_rows(array, ids) for name, array in self.arrays.items()}


class ExampleSource:
    """A Source from a dataset of single examples: `dataset[7]` is a dict of arrays or scalars.

    For example `Feed(train.ExampleSource(dataset), batch=64)` for a map-style PyTorch dataset.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, ids):
        return stack_examples([self.dataset[int(i)] for i in ids], f"ExampleSource({type(self.dataset).__name__})")

    def __repr__(self):
        return type(self.dataset).__name__


def as_source(value: Any) -> Source:
    """`value` as a Source with at least one example."""
    if isinstance(value, Mapping):
        source = ArraySource(value)
    elif hasattr(value, "with_format") and hasattr(value, "column_names"):
        source = value.with_format("numpy")
    elif _is_array(value) or isinstance(value, list | tuple | str | bytes | range) or not isinstance(value, Source):
        what = signature(value) if _is_array(value) else f"a {type(value).__name__}"
        raise TypeError(
            f"Feed: the source is {what}, but must be a dict of arrays, or an object with len(source) and source[ids] "
            '-> dict of arrays; write Feed({"x": ...}, ...), or train.ExampleSource(...) for a dataset of examples.'
        )
    else:
        source = value
    if len(source) == 0:
        raise ValueError("Feed: the source is empty; it needs at least one example.")
    return source


def stack_examples(examples: list[Any], origin: str) -> Mapping[str, Any]:
    """Stack examples, dicts of arrays of equal shapes, along a new leading axis."""
    batches = [as_batch({k: np.asarray(v)[None] for k, v in dict(example).items()}, origin) for example in examples]
    names = list(batches[0])
    for batch in batches:
        if list(batch) != names or any(batch[name].shape != batches[0][name].shape for name in names):
            raise ValueError(
                f"{origin}: examples differ in names or shapes: {signature(batch)} and {signature(batches[0])}; "
                "bring them to one shape, or use train.Buckets or train.pack_sequences for sequences."
            )
    return {name: np.concatenate([batch[name] for batch in batches]) for name in names}


def _as_column(value: Any, name: str) -> Any:
    """An array of a NumPy dtype, in memory or on disk, is read in place; anything else becomes a NumPy array."""
    in_place = isinstance(getattr(value, "dtype", None), np.dtype) and not isinstance(value, jax.Array)
    array = value if in_place and hasattr(value, "shape") else as_array(value, f"Feed: {name!r}")
    check_numeric(array.dtype, f"Feed: {name!r}")
    return array


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _gather_rows(array: Any, ids: np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return np.asarray(array)[ids]  # a plain array, not a memmap
    unique, inverse = np.unique(ids, return_inverse=True)  # h5py requires increasing, unique indices
    return np.asarray(array[unique])[inverse]
