"""How new weights, computed in a wide dtype, are stored in a narrow one."""

import abc
import zlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import frozen
from mlax.optim._slots import Slot


@frozen
class Rounding(abc.ABC):
    """How weights are read into the dtype of the arithmetic, and written back. Without effect if they are one."""

    reads_weights: ClassVar[bool] = True  # False where a slot alone tells them

    def slots(self) -> dict[str, Slot]:
        """What it keeps beside a narrow parameter."""
        return {}

    def read(self, w: jax.Array, slots: dict[str, jax.Array], wide: Any) -> jax.Array:
        """The parameter in the wide dtype."""
        return w.astype(wide)

    @abc.abstractmethod
    def write(
        self, new: jax.Array, dtype: Any, step: jax.Array, path: str, row: Any = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The parameter, or some rows of it from `row` on, in its own dtype, and the slots."""


@frozen
class RoundToNearest(Rounding):
    """To the nearest number. A change smaller than half of the distance to the next one is lost."""

    def write(self, new, dtype, step, path, row=0):
        return new.astype(dtype), {}


@frozen
class MasterWeights(Rounding):
    """To the nearest number, of weights that the slot `master` keeps in the wide dtype.

    https://arxiv.org/abs/1710.03740. The slot rules: weights that are replaced from outside need a new state.
    """

    reads_weights = False

    def slots(self):
        return {"master": Slot(copies=True, wide=True)}

    def read(self, w, slots, wide):
        return slots["master"]

    def write(self, new, dtype, step, path, row=0):
        return new.astype(dtype), {"master": new}


@frozen
class KahanSummation(Rounding):
    """To the nearest number, and what that lost is kept in the slot `remainder` and added the next time.

    The compensated summation of https://doi.org/10.1145/363707.363723. The slot has the dtype of the weights.
    """

    def slots(self):
        return {"remainder": Slot()}

    def read(self, w, slots, wide):
        return w.astype(wide) + slots["remainder"].astype(wide)

    def write(self, new, dtype, step, path, row=0):
        w = lax.reduce_precision(new, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)  # XLA would drop a cast and back
        return w.astype(dtype), {"remainder": new - w}


@frozen
class StochasticRounding(Rounding):
    """Up or down at random, the nearer the likelier, so that the mean is exact: small changes add up.

    The draws follow from `seed`, the step, the path and the place in the leaf. https://arxiv.org/abs/2010.06192
    """

    seed: int = 0

    def write(self, new, dtype, step, path, row=0):
        seed = zlib.crc32(f"{self.seed} {path}".encode())
        return stochastic_round(new, dtype, hash_bits(new.shape, step, seed, row)), {}


def stochastic_round(x: jax.Array, dtype: Any, draws: jax.Array) -> jax.Array:
    """`x` rounded to one of its two neighbours in a narrower dtype, each as likely as it is near, by 32 random bits.

    Beyond the largest number, which has a neighbour on one side only, to the nearest: chance makes no infinity.
    """
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    word = jnp.dtype(f"uint{wide.bits}")
    gone = wide.nmant - narrow.nmant  # bits
    mask = jnp.asarray((1 << gone) - 1, word)
    high = draws.astype(word) << jnp.asarray(max(0, gone - 32), word)
    bits = lax.bitcast_convert_type(x, word) + (high & mask)
    rounded = lax.bitcast_convert_type(bits & ~mask, x.dtype)
    if narrow.nexp < wide.nexp:  # below its normal numbers all neighbours are as far apart
        grid = float(narrow.smallest_subnormal)
        uniform = (draws >> 9).astype(x.dtype) * 2.0**-23
        tiny = lax.sign(x) * lax.floor(lax.abs(x) * (1 / grid) + uniform) * grid
        rounded = lax.select(lax.abs(x) < float(narrow.tiny), tiny, rounded)
    return lax.select(lax.abs(x) <= float(narrow.max), rounded, x).astype(dtype)


def hash_bits(shape: tuple[int, ...], step: jax.Array, seed: int, row: Any = 0) -> jax.Array:
    """32 bits for each place, which look random: a hash of the place, of the step and of the seed.

    `row` is where the first axis begins, in a larger array of which this is a piece.

    A few operations beside each number, fused with the update that needs them, where JAX's generators are a pass of
    their own. The hash and its constants are https://github.com/skeeto/hash-prospector's, applied twice.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place if axis else place + jnp.asarray(row).astype(jnp.uint32)
    return _hash(_hash(place ^ jnp.uint32(seed)) ^ _hash(step.astype(jnp.uint32) + jnp.uint32(seed >> 1)))


def _hash(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
