"""Random keys by name, abstract keys for shape inference, and sampling without a compilation for each shape."""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.random import define_prng_impl, threefry_2x32

Sampler = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]  # of a key, a shape and a dtype

CHUNK_SIZES = (1 << 14, 1 << 18, 1 << 22)  # elements; the smallest size that gives at most 16 chunks is used


def named_key(rng: jax.Array, name: str) -> jax.Array:
    """The key for `name` derived from `rng`: adding or renaming other names never changes it."""
    return fold_in(rng, name_hash(name))


@functools.partial(jax.jit, inline=True)
def fold_in(rng: jax.Array, data: Any) -> jax.Array:
    """`jax.random.fold_in`, which outside of `jax.jit` takes ten times as long as one compiled call."""
    return jax.random.fold_in(rng, data)


def name_hash(name: str) -> np.uint32:
    """The integer by which `named_key` folds a name into a key."""
    return np.uint32(zlib.crc32(name.encode()))


@functools.cache
def abstract_key() -> Any:
    """A key for `jax.eval_shape`, a `jax.ShapeDtypeStruct` on no mesh, whose samples are zeros and cheap to trace."""
    key = jax.eval_shape(lambda: jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_abstract_impl()))
    return jax.ShapeDtypeStruct(key.shape, key.dtype)


def is_abstract_key(rng: jax.Array) -> bool:
    """Whether `rng` is an `abstract_key`."""
    return rng.dtype == abstract_key().dtype


@functools.cache
def _abstract_impl() -> Any:
    def zeros(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        return jnp.zeros(shape, f"uint{width}")

    return define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros(1, jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
        random_bits=zeros,
        fold_in=lambda key, data: key,
        name="mlax_shapes_only",
    )


def constant(value: float, rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`jnp.full(shape, value, dtype)`; unless `rng` is traced, a small array is transferred and compiles nothing."""
    if isinstance(rng, Tracer) or math.prod(shape) > 1 << 16:
        return jnp.full(shape, value, dtype)
    return jax.device_put(np.full(shape, value, jnp.dtype(dtype)))


def sample(draw: Sampler, rng: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    """`draw(rng, shape, dtype) * scale`, bitwise, where `draw` is a function that calls `jax.random` once.

    XLA takes about 200 ms on a CPU to compile the sampling of one leaf, for each distinct shape. With JAX's default
    generator the element at flat position i depends only on the key and on i. So leaves are cut from chunks whose
    start is an argument: one program for each sampler, and a cheap slice for each shape.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"random variables of {dtype} cannot be initialized; pass a floating input or param_dtype.")
    total = math.prod(shape)
    factor = np.asarray(scale, jnp.dtype(dtype))
    if is_abstract_key(rng):
        return jnp.zeros(shape, dtype)
    if not 0 < total < 1 << 32 or not _is_seekable(rng):
        return _sample_whole(draw, rng, shape, dtype, factor)
    size = next((size for size in CHUNK_SIZES if total <= 16 * size), CHUNK_SIZES[-1])
    data = jax.random.key_data(rng)
    chunks = [_sample_chunk(draw, data, np.uint32(start), size, dtype, factor) for start in range(0, total, size)]
    return _join_chunks(chunks, shape)


def is_typed_key(value: Any) -> bool:
    """Whether `value` is an array of typed keys, concrete, traced or abstract; legacy uint32 keys are not."""
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def key_data(rng: Any) -> Any:
    """The data of a key, or its shape."""
    is_shape = isinstance(rng, jax.ShapeDtypeStruct)
    return jax.eval_shape(jax.random.key_data, rng) if is_shape else jax.random.key_data(rng)


def wrap_key_data(data: jax.Array, *, like: Any) -> jax.Array:
    """The key with this data, of the kind of another key, or of its shape; a legacy uint32 key is its own data."""
    if not is_typed_key(like):
        return data
    kinds: list[Any] = []
    jax.eval_shape(lambda rng: kinds.append(jax.random.key_impl(rng)), like)
    return jax.random.wrap_key_data(data, impl=kinds[0])


def _is_seekable(rng: jax.Array) -> bool:
    """Whether `rng` is one concrete key of a generator that can start at any position."""
    return (
        not isinstance(rng, Tracer)
        and rng.ndim == (0 if is_typed_key(rng) else 1)
        and str(jax.random.key_impl(rng)) == "threefry2x32"
        and jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    )


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _sample_whole(draw: Sampler, rng: jax.Array, shape: tuple[int, ...], dtype: Any, factor: jax.Array) -> jax.Array:
    return draw(rng, shape, dtype) * factor


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _sample_chunk(
    draw: Sampler, data: jax.Array, start: jax.Array, size: int, dtype: Any, factor: jax.Array
) -> jax.Array:
    key = jax.random.wrap_key_data(jnp.append(data, start), impl=_seekable_threefry())
    return draw(key, (size,), dtype) * factor


def _join_chunks(chunks: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    small_on_cpu = math.prod(shape) <= 1 << 20 and {device.platform for device in chunks[0].devices()} == {"cpu"}
    return (_join_unoptimized if small_on_cpu else _join_optimized)(chunks, shape)


def _join(chunks: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return lax.reshape(lax.slice(lax.concatenate(chunks, 0), (0,), (math.prod(shape),)), shape)


_join_optimized = jax.jit(_join, static_argnums=1)
_join_unoptimized = jax.jit(_join, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def _seekable_threefry() -> Any:
    """JAX's default generator, with the start position as a third word of the key."""

    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        low = key[2] + lax.iota(np.uint32, math.prod(shape))
        counts = lax.concatenate([lax.full_like(low, 0), low], 0)
        left, right = lax.split(threefry_2x32((key[0], key[1]), counts), (low.size, low.size))
        if width == 64:
            words = lax.shift_left(left.astype(np.uint64), np.uint64(32)) | right.astype(np.uint64)
        else:
            words = (left ^ right).astype(f"uint{width}")
        return words.reshape(shape)

    def unsupported(*_: Any) -> Any:
        raise TypeError("a seekable key is for one draw; it cannot be seeded, split or folded.")

    return define_prng_impl(
        key_shape=(3,),
        seed=unsupported,
        split=unsupported,
        random_bits=bits,
        fold_in=unsupported,
        name="threefry2x32_seekable",
    )
