"""Arrays as the bytes of a safetensors file, none of them copied."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mlax.files._dtypes import NAMES
from mlax.files._header import encoded


class LaidOut(NamedTuple):
    """A file that could be written: the header, then the arrays in the order of their bytes."""

    header: bytes
    arrays: dict[str, memoryview]

    @property
    def size(self) -> int:
        """How many bytes that is."""
        return len(self.header) + sum(view.nbytes for view in self.arrays.values())


def laid_out(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> LaidOut:
    """The file of these arrays. Wide items come first, so that each array is aligned."""
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = encoded(((name, arrays[name].dtype, arrays[name].shape) for name in order), metadata)
    return LaidOut(header, {name: raw(arrays[name]) for name in order})


def storable(array: np.ndarray) -> np.ndarray:
    """The array as C lays it out, little end first: itself, if it is so already."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array if array.flags.c_contiguous else array.copy(order="C")


def raw(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, whatever its dtype."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def has(dtype: np.dtype) -> bool:
    """Whether safetensors has this dtype."""
    return dtype in NAMES
