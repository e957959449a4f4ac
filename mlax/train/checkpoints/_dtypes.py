"""The dtypes that a checkpoint holds: all that JAX has."""

import ml_dtypes
import numpy as np

from mlax.files import NAMES as _PLAIN
from mlax.files import has

_MORE = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
)
BY_NAME: dict[str, np.dtype] = {dtype.name: dtype for dtype in _PLAIN}
BY_NAME |= {name: np.dtype(getattr(ml_dtypes, name)) for name in _MORE}
BY_NAME["complex128"] = np.dtype(np.complex128)
NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}


def stored(array: np.ndarray) -> np.ndarray:
    """The array as safetensors can hold it: as bytes on one more axis, if it does not have the dtype."""
    if has(array.dtype):
        return array
    shape = stored_shape(array.shape, array.dtype)
    return array.reshape(-1).view(np.uint8).reshape(shape) if array.size else np.empty(shape, np.uint8)


def stored_shape(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """The shape of what `stored` gives."""
    return shape if has(dtype) else (*shape, dtype.itemsize)
