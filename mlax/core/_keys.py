"""named_key: a key of one's own for each name, whatever the other names are."""

import zlib

import jax
import numpy as np


def named_key(rng: jax.Array, name: str) -> jax.Array:
    """The key that belongs to `name` under `rng`: adding or renaming another name never changes it."""
    return jax.random.fold_in(rng, salt(name))


def salt(name: str) -> np.uint32:
    """The number that a name stands for."""
    return np.uint32(zlib.crc32(name.encode()))
