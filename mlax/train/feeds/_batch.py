"""Batches on the host: dicts of NumPy arrays in dtypes that JAX supports, with a mask of valid rows."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax._objective import MASK
from mlax.core import signature

Batch = dict[str, np.ndarray]
BatchSpec = dict[str, jax.ShapeDtypeStruct]


def as_batch(value: Any, origin: str) -> Batch:
    """`value` as NumPy arrays of one length, sorted by name. `origin` is where it comes from, for errors."""
    if not isinstance(value, Mapping) or not value:
        what = "an empty dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"
        raise TypeError(f'{origin} returned {what}, but a batch is a dict of arrays: {{"image": ..., "digit": ...}}.')
    batch = {str(name): as_array(value[name], f"{origin}: {name!r}") for name in sorted(value)}
    common_length(batch, origin)
    return batch


def as_array(value: Any, name: str) -> np.ndarray:
    """`value` as a numeric array in its canonical JAX dtype: int64 becomes int32 unless x64 is enabled."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        error.add_note(f"{name} is not a regular array; for sequences, use train.Buckets or train.pack_sequences.")
        raise
    check_numeric(array.dtype, name)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        least, most = int(array.min()), int(array.max())
        if least < np.iinfo(dtype).min or most > np.iinfo(dtype).max:
            raise OverflowError(
                f"{name} contains {least if least < 0 else most:,}, which overflows {dtype}; call "
                f'jax.config.update("jax_enable_x64", True) to keep {array.dtype}, or leave it out.'
            )
    return array.astype(dtype)


def check_numeric(dtype: Any, name: str) -> None:
    """Reject dtypes that devices do not support: objects, text, dates."""
    if np.dtype(dtype) == object:
        raise TypeError(
            f"{name} is an array of objects, but must be numeric; convert it, or, if it holds sequences of different "
            "lengths, use train.Buckets or train.pack_sequences."
        )
    if not (jnp.issubdtype(dtype, np.number) or np.dtype(dtype) == bool):
        raise TypeError(f"{name} is an array of {np.dtype(dtype)}, but must be numeric; encode or drop it.")


def common_length(arrays: Mapping[str, Any], origin: str) -> int:
    """The common length of all arrays."""
    for name, array in arrays.items():
        if not getattr(array, "shape", (0,)):
            raise ValueError(f"{origin}: {name!r} is a scalar, but needs a leading axis, with one entry per example.")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} {length:,}" for name, length in lengths.items())
        raise ValueError(f"{origin}: the arrays have different lengths: {listed}; each needs one entry per example.")
    return next(iter(lengths.values()))


def add_mask(batch: Batch, valid: np.ndarray, origin: str) -> Batch:
    """`batch` with "mask": `valid` (b,) by row, combined with the batch's own mask if it has one."""
    mask = batch.get(MASK)
    if mask is None:
        return {**batch, MASK: valid.copy()}
    if mask.dtype != bool:
        raise TypeError(
            f'{origin}: "mask" is {signature(mask)}, but must be bool, True on valid entries; rename it if a target.'
        )
    return {**batch, MASK: mask & valid.reshape(-1, *(1,) * (mask.ndim - 1))}


def batch_spec(batch: Batch) -> BatchSpec:
    """The shapes and dtypes of a batch."""
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}


def describe_example(spec: BatchSpec) -> str:
    """One example of a batch in short: `digit int32[], image float32[8, 8]`."""
    rows = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in spec.items()}
    return ", ".join(f"{name} {signature(row)}" for name, row in rows.items() if name != MASK)


def check_spec(batch: Batch, spec: BatchSpec, origin: str) -> Batch:
    """`batch`, if it has the names, dtypes and shapes of `spec`; the number of rows may differ."""
    found = {name: (array.dtype, array.shape[1:]) for name, array in batch.items()}
    wanted = {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in spec.items()}
    if found != wanted:
        odd = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise ValueError(
            f"{origin} returned {_describe_arrays(batch, odd)} where the first batch had "
            f"{_describe_arrays(spec, odd)}; all batches need the same names, dtypes and shapes, or "
            "each step would recompile."
        )
    return batch


def _describe_arrays(arrays: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {signature(arrays[name])}" if name in arrays else f"no {name}" for name in names)
