"""Rounding: how weights computed in a wide dtype are stored in a narrow one."""

import abc
import zlib
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlax.core import Documented, frozen
from mlax.optim._slots import Slot


@frozen
class Rounding(metaclass=Documented):
    """The conversion of stored weights to the compute dtype and back; unused where both dtypes are the same."""

    reads_weights: ClassVar[bool] = True  # False if a slot replaces them

    def slots(self) -> dict[str, Slot]:
        """The slots that it stores for a narrow parameter."""
        return {}

    def read(self, w: jax.Array, slots: dict[str, jax.Array], dtype: Any) -> jax.Array:
        """The parameter in `dtype`, the compute dtype."""
        return w.astype(dtype)

    @abc.abstractmethod
    def write(
        self, new: jax.Array, dtype: Any, step: jax.Array, path: str, row: Any = 0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The parameter, or some of its rows starting at `row`, in its own dtype, and the slots."""


@frozen
class RoundToNearest(Rounding):
    """Round to nearest. A change of less than half the distance to the next representable value is lost."""

    def write(self, new, dtype, step, path, row=0):
        return new.astype(dtype), {}


@frozen
class MasterWeights(Rounding):
    """Master weights: round to nearest, from a copy of the weights in the wide dtype. https://arxiv.org/abs/1710.03740

    The update reads the slot `master` and not the weights: after replacing the weights, make a new state.

    >>> optimizer = optim.AdamW(3e-4, rounding=optim.MasterWeights())
    >>> optimizer.init({"kernel": jnp.ones((4, 3), "bfloat16")})._fields
    ('step', 'mean', 'square', 'master')
    """

    reads_weights = False

    def slots(self):
        return {"master": Slot(copy=True, wide=True)}

    def read(self, w, slots, dtype):
        return slots["master"]

    def write(self, new, dtype, step, path, row=0):
        return new.astype(dtype), {"master": new}


@frozen
class KahanSummation(Rounding):
    """Kahan (compensated) summation: round to nearest, and add the rounding error, stored in the slot `remainder`, to
    the weights in the next step.

    Compensated summation, https://doi.org/10.1145/363707.363723. The slot has the dtype of the weights.

    >>> optimizer = optim.AdamW(3e-4, rounding=optim.KahanSummation())
    >>> optimizer.init({"kernel": jnp.ones((4, 3), "bfloat16")})._fields
    ('step', 'mean', 'square', 'remainder')
    """

    def slots(self):
        return {"remainder": Slot()}

    def read(self, w, slots, dtype):
        return w.astype(dtype) + slots["remainder"].astype(dtype)

    def write(self, new, dtype, step, path, row=0):
        # XLA would remove a cast to the narrow dtype and back
        w = lax.reduce_precision(new, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        return w.astype(dtype), {"remainder": new - w}


@frozen
class StochasticRounding(Rounding):
    """Stochastic rounding: up or down at random, with probabilities that make the mean exact.
    https://arxiv.org/abs/2010.06192

    The random bits are a function of `seed`, the step, the path, the index of the element and its value: members of
    an ensemble under `jax.vmap` round independently of each other, and equal ones equally.

    >>> optimizer = optim.AdamW(3e-4, rounding=optim.StochasticRounding())
    >>> optimizer.init({"kernel": jnp.ones((4, 3), "bfloat16")})._fields
    ('step', 'mean', 'square')
    """

    seed: int = 0  # of the random numbers

    def write(self, new, dtype, step, path, row=0):
        seed = zlib.crc32(f"{self.seed} {path}".encode())
        return stochastic_round(new, dtype, hash_bits(new.shape, step, seed, row, new)), {}


class LeafPolicy(NamedTuple):
    """The compute dtype for a parameter, the dtypes of its slots by name, and how its weights are rounded."""

    accum_dtype: Any = None  # None: the parameter's, or float32 if that is narrower
    slot_dtypes: tuple[tuple[str, Any], ...] = ()
    rounding: Rounding = RoundToNearest()


def stochastic_round(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
    """`x` rounded to one of its two neighbours in a narrower dtype, the nearer the likelier, by 32 random bits each.

    Beyond the largest finite value, rounded to nearest: a finite `x` that fits never becomes infinite by chance.
    """
    wide, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    word = jnp.dtype(f"uint{wide.bits}")
    dropped = wide.nmant - narrow.nmant  # bits
    mask = jnp.asarray((1 << dropped) - 1, word)
    noise = bits.astype(word) << jnp.asarray(max(0, dropped - 32), word)
    perturbed = lax.bitcast_convert_type(x, word) + (noise & mask)
    rounded = lax.bitcast_convert_type(perturbed & ~mask, x.dtype)
    if narrow.nexp < wide.nexp:  # subnormal values are evenly spaced
        spacing = float(narrow.smallest_subnormal)
        uniform = (bits >> 9).astype(x.dtype) * 2.0**-23
        subnormal = lax.sign(x) * lax.floor(lax.abs(x) * (1 / spacing) + uniform) * spacing
        rounded = lax.select(lax.abs(x) < float(narrow.tiny), subnormal, rounded)
    return lax.select(lax.abs(x) <= float(narrow.max), rounded, x).astype(dtype)


def hash_bits(
    shape: tuple[int, ...], step: jax.Array, seed: int, row: Any = 0, values: jax.Array | None = None
) -> jax.Array:
    """32 pseudorandom bits per element: a hash of its index, the step, the seed and, if given, its value.

    `row` is the index of the first row, if this is a slice of a larger array. A few operations per element, which
    fuse with the update, where JAX's generators take another pass over memory. The hash, applied twice, is that of
    https://github.com/skeeto/hash-prospector
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index if axis else index + jnp.asarray(row).astype(jnp.uint32)
    bits = _hash(index ^ jnp.uint32(seed)) ^ _hash(step.astype(jnp.uint32) + jnp.uint32(seed >> 1))
    return _hash(bits if values is None else bits ^ _words(values))


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element, folded into 32."""
    words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    if words.dtype == jnp.uint64:
        words = words ^ (words >> 32)
    return words.astype(jnp.uint32)


def _hash(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
