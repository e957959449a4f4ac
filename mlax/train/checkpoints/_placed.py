"""A saved array as a leaf of the target: its shape and dtype are checked, and it goes where the target is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from mlax._jax import with_weak_type
from mlax.train.checkpoints._matched import Unlike
from mlax.train.checkpoints._reading import Reading


def placed(reading: Reading, saved: str, name: str, target: Any) -> Any:
    """The array, as `target` is: a number, or an array of NumPy or of JAX, committed or not."""
    if isinstance(target, bool | int | float | complex):
        _check(reading, saved, name, np.asarray(target), None)
        return type(target)(reading.whole(saved).item())
    if isinstance(target, np.ndarray | np.generic):
        _check(reading, saved, name, target, None)
        return reading.whole(saved) if isinstance(target, np.ndarray) else reading.whole(saved)[()]
    if not isinstance(target, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(
            f"restore: the target has a {type(target).__name__} at {name!r}, but an array or a ShapeDtypeStruct is "
            "wanted; give a state as `init` makes it, or jax.eval_shape of that."
        )
    if jnp.issubdtype(target.dtype, jax.dtypes.prng_key):
        return _keys(reading, saved, name, target)
    _check(reading, saved, name, target, None)
    sharding = _sharding(target)
    if sharding is None:
        array = jax.device_put(reading.whole(saved))
        if array.dtype != target.dtype:
            raise ValueError(f"restore: {name!r} is {target.dtype}, which JAX makes only with jax_enable_x64 on.")
    else:
        array = jax.make_array_from_callback(target.shape, sharding, lambda index: reading.part(saved, index or ()))
    return with_weak_type(array) if getattr(target, "weak_type", False) else array


def _keys(reading: Reading, saved: str, name: str, target: Any) -> jax.Array:
    data = jax.eval_shape(jax.random.key_data, target)
    impl = reading.manifest.arrays[saved].key
    mine = jax.random.key_impl(target) if isinstance(target, jax.Array) else impl
    _check(reading, saved, name, data, str(mine))
    keys = jax.random.wrap_key_data(jax.device_put(reading.whole(saved)), impl=mine)
    if keys.dtype != target.dtype:
        raise ValueError(f"restore: {name!r} was saved as keys of {impl}, but the target's are {target.dtype}.")
    sharding = _sharding(target)
    return keys if sharding is None else jax.make_array_from_callback(target.shape, sharding, lambda index: keys[index])


def _check(reading: Reading, saved: str, name: str, target: Any, key: str | None) -> None:
    record = reading.manifest.arrays[saved]
    if record.key != key:
        words = {True: "plain numbers", False: "typed keys"}
        raise ValueError(
            f"restore: {name!r} was saved as {record.key or 'plain numbers'}, but the target has "
            f"{key or words[key is None]}; use the same algorithm, or jax.random.key_data or wrap_key_data."
        )
    if record.shape != target.shape or record.dtype != np.dtype(target.dtype).name:
        came, wanted = f"{record.dtype}{list(record.shape)}", f"{np.dtype(target.dtype).name}{list(target.shape)}"
        advice = "build the same model, or leave it out by only=(...) and convert it yourself"
        raise Unlike(f"{name!r} was saved as {came}, but the target has {wanted}", advice)


def _sharding(target: Any) -> Any:
    """Where the array has to be; None where it may be anywhere."""
    sharding = target.sharding
    if isinstance(target, jax.Array) and not target.committed:
        return None
    return None if isinstance(getattr(sharding, "mesh", None), AbstractMesh) else sharding
