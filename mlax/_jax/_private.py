"""What mlax takes from JAX's private modules, and why; no other file does.

`define_prng_impl` and `threefry_2x32` are public as `jax.extend.random`, but that path brings all of `jax.extend` and
Pallas with it, 0.1 s at the first use of a layer. So they are taken from where they lie, as long as they lie there.

No public function gives an array the weak type of a Python number. An optimizer must, if the weights came with it, or
what they are given to would be compiled a second time.
"""

import jax
from jax._src.lax.lax import _convert_element_type

try:
    from jax._src.extend.random import define_prng_impl
    from jax._src.random.threefry2x32 import threefry_2x32
except ImportError:
    from jax.extend.random import define_prng_impl, threefry_2x32

__all__ = ["define_prng_impl", "threefry_2x32", "with_weak_type"]


def with_weak_type(x: jax.Array) -> jax.Array:
    """`x` as if a Python number had made it."""
    return _convert_element_type(x, x.dtype, weak_type=True)  # pyright: ignore[reportReturnType]
