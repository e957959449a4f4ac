"""What mlax takes from JAX's private modules, and why; no other file does.

Both names are public as `jax.extend.random`, but that path brings all of `jax.extend` and Pallas with it, 0.1 s at the
first use of a layer. So they are taken from where they lie, as long as they lie there.
"""

try:
    from jax._src.extend.random import define_prng_impl
    from jax._src.random.threefry2x32 import threefry_2x32
except ImportError:
    from jax.extend.random import define_prng_impl, threefry_2x32

__all__ = ["define_prng_impl", "threefry_2x32"]
