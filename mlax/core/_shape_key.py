"""A key for traces that only ask for shapes: whatever is drawn from it is zero, and costs next to nothing to trace."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core._private import define_prng_impl


@functools.cache
def shape_key() -> Any:
    """The shape and dtype of that key, to pass to `jax.eval_shape`, on no mesh."""
    key = jax.eval_shape(lambda: jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_impl()))
    return jax.ShapeDtypeStruct(key.shape, key.dtype)


def is_shape_key(rng: jax.Array) -> bool:
    """Whether `rng` is that key, so that a draw may just as well be zeros."""
    return rng.dtype == shape_key().dtype


@functools.cache
def _impl() -> Any:
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
