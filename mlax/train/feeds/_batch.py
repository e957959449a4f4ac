"""Batches on the host: dicts of NumPy arrays in dtypes that JAX supports, with a mask of valid rows."""

import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core import signature

Batch = dict[str, np.ndarray]
BatchSpec = dict[str, jax.ShapeDtypeStruct]


def as_batch(given: Any, giver: str) -> Batch:
    """What `giver` gave, as NumPy arrays with one length, sorted by name, or an error in words."""
    if not isinstance(given, Mapping) or not given:
        what = "an empty dict" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise TypeError(f'{giver} gave {what} but a batch is a dict of arrays: {{"image": ..., "digit": ...}}.')
    batch = {str(name): as_array(given[name], f"{giver}: {name!r}") for name in sorted(given)}
    common_length(batch, giver)
    return batch


def as_array(given: Any, name: str) -> np.ndarray:
    """An array of numbers in the dtype that JAX has for it: int64 comes as int32 unless x64 is enabled."""
    try:
        array = np.asarray(given)
    except ValueError as error:
        error.add_note(f"{name} is not a regular array; for sequences: train.Buckets, train.pack_sequences.")
        raise
    check_numeric(array.dtype, name)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        least, most = int(array.min()), int(array.max())
        if least < np.iinfo(dtype).min or most > np.iinfo(dtype).max:
            raise OverflowError(
                f"{name} holds {least if least < 0 else most:,}, which {dtype} cannot; call "
                f'jax.config.update("jax_enable_x64", True) to keep {array.dtype}, or leave it out.'
            )
    return array.astype(dtype)


def check_numeric(dtype: Any, name: str) -> None:
    """Refuse what no device can hold: objects, text, dates."""
    if np.dtype(dtype) == object:
        raise TypeError(
            f"{name} is an array of objects but a device takes numbers only; convert it, "
            "or, if it holds sequences of different lengths, use train.Buckets or train.pack_sequences."
        )
    if not (jnp.issubdtype(dtype, np.number) or np.dtype(dtype) == bool):
        raise TypeError(f"{name} is an array of {np.dtype(dtype)} but a device takes numbers only; encode or drop it.")


def common_length(arrays: Mapping[str, Any], giver: str) -> int:
    """The length that all of `arrays` have, or an error that names the odd ones."""
    for name, array in arrays.items():
        if not getattr(array, "shape", (0,)):
            raise ValueError(f"{giver}: {name!r} is a single number but needs a leading axis, one entry an example.")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name!r} {length:,}" for name, length in lengths.items())
        raise ValueError(f"{giver}: the arrays have different lengths: {said}; give each one entry an example.")
    return next(iter(lengths.values()))


def add_mask(batch: Batch, real: np.ndarray, giver: str) -> Batch:
    """`batch` with "mask", which is False on the rows that are not `real`; a mask already there is kept elsewhere."""
    given = batch.get("mask")
    if given is None:
        return {**batch, "mask": real.copy()}
    if given.dtype != bool:
        raise TypeError(
            f'{giver}: "mask" is {signature(given)} but is to be bool: True on what counts; name a target otherwise.'
        )
    return {**batch, "mask": given & real.reshape(-1, *(1,) * (given.ndim - 1))}


def batch_spec(batch: Batch) -> BatchSpec:
    """Shapes and dtypes of a batch."""
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}


def describe_example(spec: BatchSpec) -> str:
    """One example of a batch in a sentence: `digit int32[], image float32[8, 8]`."""
    rows = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in spec.items()}
    return ", ".join(f"{name} {signature(row)}" for name, row in rows.items() if name != "mask")


def check_spec(batch: Batch, spec: BatchSpec, giver: str) -> Batch:
    """`batch`, if its names, dtypes and shapes (but for the number of rows) are those of `spec`."""
    here = {name: (array.dtype, array.shape[1:]) for name, array in batch.items()}
    wanted = {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in spec.items()}
    if here != wanted:
        odd = sorted(name for name in {*here, *wanted} if here.get(name) != wanted.get(name))
        raise ValueError(
            f"{giver} changed what it gives: {_describe_arrays(batch, odd)} where the first batch had "
            f"{_describe_arrays(spec, odd)}; "
            "every batch must have the same names, dtypes and shapes, or each step would compile anew."
        )
    return batch


def _describe_arrays(arrays: Mapping[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {signature(arrays[name])}" if name in arrays else f"no {name}" for name in names)


def int_at_least(least: int, value: Any, name: str) -> int:
    """`value` as an int, if it is one and not too small."""
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # an array has an index too, but only one of a single int can give it
        count = None
    if count is None or count < least:
        what = repr(value) if np.isscalar(value) else signature(value)
        raise ValueError(f"{name} is {what} but is to be an int of at least {least}.")
    return count


def start_step(start: int | None, position: dict[str, Any] | None, what: str) -> int:
    """The step that a stream begins with, from `start` or a `position` or both."""
    start = None if start is None else int_at_least(0, start, f"{what}: start")
    if position is None:
        return start or 0
    if not isinstance(position, dict) or not isinstance(position.get("step"), int):
        raise TypeError(f'{what}: position is {position!r} but is to be what stream.position() gave: {{"step": 7}}.')
    if start is not None and start != position["step"]:
        raise ValueError(
            f"{what}: start is {start:,} but position is that of step {position['step']:,}; "
            "give one of them, or the position that was saved with this step."
        )
    return position["step"]


def count_items(start: int, stop: int | None, stacked: int, what: str) -> int | None:
    """How many times a stream gives `stacked` batches between two steps; None is without end."""
    stacked = int_at_least(1, stacked, f"{what}: stacked")
    if stop is None:
        return None
    stop = int_at_least(0, stop, f"{what}: stop")
    if stop > start and (stop - start) % stacked:
        raise ValueError(
            f"{what}: the {stop - start:,} steps from {start:,} to {stop:,} are not a multiple of stacked={stacked}, "
            f"and a shorter last stack would compile anew; stop at {stop - (stop - start) % stacked:,} and go on with "
            "stacked=1."
        )
    return max(0, stop - start) // stacked
