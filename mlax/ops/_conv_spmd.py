"""Convolutions that are not split over devices where XLA cannot be trusted with the pieces.

Its gradients are wrong then, without any error, with JAX 0.10.2 to 0.12 on CPUs (tests/nn/test_split_images.py).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from mlax._jax import with_jvps
from mlax.ops._layout import Layout

Convolve = Callable[[Array, Array], Array]  # of (x, kernel)


def unshard_spatial_axes(x: Array, axes: Layout) -> Array:
    """`x`, each of its images on one device, if it lies on a mesh over whose axes the compiler may split arrays.

    The axes of examples and channels stay as they are, so nothing changes where only these are split.
    """
    if not jax.typeof(x).sharding.mesh.auto_axes:
        return x
    return _constrain(x, [None if axis in axes.spatial else PartitionSpec.UNCONSTRAINED for axis in range(x.ndim)])


def has_several_auto_axes(x: Array) -> bool:
    """Whether `x` lies on a mesh that has more than one axis which the compiler may split arrays over."""
    mesh = jax.typeof(x).sharding.mesh
    return sum(mesh.shape[name] > 1 for name in mesh.auto_axes) > 1


def with_unsharded_kernel_grad(convolve: Convolve) -> Convolve:
    """The same function, whose derivative by the kernel has both its factors whole on each device.

    Split over one axis of a mesh of several, the gradient of a grouped kernel is summed over the others too.
    """

    def by_x(dot: Array, x: Array, kernel: Array) -> Array:
        return made(dot, kernel)

    def by_kernel(dot: Array, x: Array, kernel: Array) -> Array:
        return _unshard(made(_unshard(x), dot))

    made = with_jvps(convolve, by_x, by_kernel)
    return made


def _unshard(x: Array) -> Array:
    return _constrain(x, [None] * x.ndim)


def _constrain(x: Array, entries: list[Any]) -> Array:
    """`x` so laid on its own mesh, which need not be the one that is set."""
    return lax.with_sharding_constraint(x, NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*entries)))
