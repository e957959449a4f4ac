"""Random leaves made from a few compiled pieces: the numbers of `jax.random`, without its compilations.

Compiling the draw of one leaf takes XLA about 200 ms on a CPU, for each distinct shape. With JAX's default
keys the number at flat position i depends on the key and on i alone, so every leaf can be cut from chunks
whose first position is an argument: one program for each kind of draw, and a cheap cut for each shape.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax.core._private import define_prng_impl, threefry_2x32
from mlax.core._shape_key import is_shape_key

Draw = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]  # of a key, a shape and a dtype

SIZES = (1 << 14, 1 << 18, 1 << 22)  # elements in a chunk; the smallest that makes at most 16 of them


def filled(value: float, rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jnp.full(shape, value, dtype)`; a small one is sent as data, as any number would be, and compiles nothing."""
    if isinstance(rng, Tracer) or math.prod(shape) > 1 << 16:
        return jnp.full(shape, value, dtype)
    return jax.device_put(np.full(shape, value, jnp.dtype(dtype)))


def drawn(draw: Draw, rng: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    """`draw(rng, shape, dtype) * scale`, to the bit, where `draw` is a function that calls `jax.random` once."""
    total = math.prod(shape)
    factor = np.asarray(scale, jnp.dtype(dtype))
    if is_shape_key(rng):
        return jnp.zeros(shape, dtype)
    if not 0 < total < 1 << 32 or not _can_be_entered(rng):
        return _whole(draw, rng, shape, dtype, factor)
    size = next((size for size in SIZES if total <= 16 * size), SIZES[-1])
    data = jax.random.key_data(rng)
    chunks = [_chunk(draw, data, np.uint32(start), size, dtype, factor) for start in range(0, total, size)]
    return _cut(chunks, shape)


def _can_be_entered(rng: jax.Array) -> bool:
    """Whether `rng` is one known key, of a generator whose stream can be entered at any position."""
    return (
        not isinstance(rng, Tracer)
        and rng.ndim == (0 if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else 1)
        and str(jax.random.key_impl(rng)) == "threefry2x32"
        and jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    )


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _whole(draw: Draw, rng: jax.Array, shape: tuple[int, ...], dtype: Any, factor: jax.Array) -> jax.Array:
    return draw(rng, shape, dtype) * factor


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _chunk(draw: Draw, data: jax.Array, start: jax.Array, size: int, dtype: Any, factor: jax.Array) -> jax.Array:
    entered = jax.random.wrap_key_data(jnp.append(data, start), impl=_entered_threefry())
    return draw(entered, (size,), dtype) * factor


def _cut(chunks: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    small_on_cpu = math.prod(shape) <= 1 << 20 and {device.platform for device in chunks[0].devices()} == {"cpu"}
    return (_cut_unoptimised if small_on_cpu else _cut_optimised)(chunks, shape)


def _first(chunks: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return lax.reshape(lax.slice(lax.concatenate(chunks, 0), (0,), (math.prod(shape),)), shape)


_cut_optimised = jax.jit(_first, static_argnums=1)
_cut_unoptimised = jax.jit(_first, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def _entered_threefry() -> Any:
    """JAX's default generator with the first position as a third word of the key."""

    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        low = key[2] + lax.iota(np.uint32, math.prod(shape))
        counts = lax.concatenate([lax.full_like(low, 0), low], 0)
        left, right = lax.split(threefry_2x32((key[0], key[1]), counts), (low.size, low.size))
        if width == 64:
            words = lax.shift_left(left.astype(np.uint64), np.uint64(32)) | right.astype(np.uint64)
        else:
            words = (left ^ right).astype(f"uint{width}")
        return words.reshape(shape)

    def refuse(*_: Any) -> Any:
        raise TypeError("an entered key serves one draw and is neither seeded, split nor folded.")

    return define_prng_impl(
        key_shape=(3,),
        seed=refuse,
        split=refuse,
        random_bits=bits,
        fold_in=refuse,
        name="threefry2x32_entered",
    )
