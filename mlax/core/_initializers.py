"""Initializers: frozen descriptions of the initial values of variables."""

import abc
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mlax._jax import constant, sample
from mlax.core._frozen import frozen
from mlax.core._help import Documented


@frozen
class Initializer(metaclass=Documented):
    """A description of initial values: `initializer(rng, shape, dtype)` returns the array.

    `in_axis` and `out_axis` are the input and output axes of a kernel; the others are its window.
    """

    @abc.abstractmethod
    def __call__(
        self, rng: jax.Array, shape: tuple[int, ...], dtype: Any, *, in_axis: int = -2, out_axis: int = -1
    ) -> jax.Array: ...


@frozen
class Constant(Initializer):
    """Initialize with one value."""

    value: float  # of every element

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        return constant(self.value, rng, shape, dtype)


@frozen
class Zeros(Initializer):
    """Initialize with zeros."""

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        return constant(0.0, rng, shape, dtype)


@frozen
class Ones(Initializer):
    """Initialize with ones."""

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        return constant(1.0, rng, shape, dtype)


@frozen
class Normal(Initializer):
    """Initialize from the normal distribution with mean 0 and standard deviation `std`."""

    std: float = 0.01  # the standard deviation

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        return sample(jax.random.normal, rng, shape, dtype, self.std)


@frozen
class TruncatedNormal(Initializer):
    """Initialize from the normal distribution with mean 0 and standard deviation `std`, truncated at two deviations."""

    std: float = 0.01  # the standard deviation, before the truncation

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        return sample(_truncated_normal, rng, shape, dtype, self.std)


@frozen
class Uniform(Initializer):
    """Initialize from the uniform distribution from -`limit` to `limit`."""

    limit: float = 0.01  # values are between -limit and limit

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        return sample(_symmetric_uniform, rng, shape, dtype, self.limit)


@frozen
class VarianceScaling(Initializer):
    """Samples with the variance `scale` / fan, where the fan is the number of inputs, of outputs, or their mean.

    The truncated normal distribution is scaled to have that variance after truncation.
    """

    scale: float = 1.0  # the variance times the fan
    fan: Literal["in", "out", "mean"] = "in"  # "in", "out" or their "mean"
    distribution: Literal["normal", "truncated", "uniform"] = "truncated"  # "normal", "truncated" or "uniform"

    def __post_init__(self) -> None:
        if self.fan not in ("in", "out", "mean"):
            raise ValueError(f"{type(self).__name__}: fan is {self.fan!r}, but must be in, out or mean.")
        if self.distribution not in ("normal", "truncated", "uniform"):
            raise ValueError(
                f"{type(self).__name__}: distribution is {self.distribution!r}, "
                "but must be normal, truncated or uniform."
            )

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        if len(shape) < 2:
            raise ValueError(
                f"{self}: the shape {shape} has fewer than two axes, so it has no input and output axes; "
                "use Normal or Uniform."
            )
        window = math.prod(shape) / max(1, shape[in_axis] * shape[out_axis])
        fan_in, fan_out = shape[in_axis] * window, shape[out_axis] * window
        fan = {"in": fan_in, "out": fan_out, "mean": (fan_in + fan_out) / 2}[self.fan]
        std = math.sqrt(self.scale / max(1.0, fan))
        match self.distribution:
            case "normal":
                return sample(jax.random.normal, rng, shape, dtype, std)
            case "truncated":
                return sample(_truncated_normal, rng, shape, dtype, std / TRUNCATED_STD)
            case "uniform":
                return sample(_symmetric_uniform, rng, shape, dtype, std * math.sqrt(3))


def lecun(distribution: Literal["normal", "truncated", "uniform"] = "truncated") -> VarianceScaling:
    """LeCun initialization: variance 1 / inputs.

    Section 4.6 of http://yann.lecun.com/exdb/publis/pdf/lecun-98b.pdf.
    """
    return VarianceScaling(1.0, "in", distribution)


def he(distribution: Literal["normal", "truncated", "uniform"] = "truncated") -> VarianceScaling:
    """He (Kaiming) initialization: variance 2 / inputs, for layers before a relu. Equation 10 of https://arxiv.org/abs/1502.01852."""
    return VarianceScaling(2.0, "in", distribution)


def glorot(distribution: Literal["normal", "truncated", "uniform"] = "uniform") -> VarianceScaling:
    """Glorot (Xavier) initialization: variance 2 / (inputs + outputs). Equation 16 of https://proceedings.mlr.press/v9/glorot10a.html."""
    return VarianceScaling(1.0, "mean", distribution)


@frozen
class Orthogonal(Initializer):
    """Initialize with orthonormal rows or columns, whichever are fewer, times `scale`; outputs by all other axes.

    Sampled and factored in float32 or wider, since there is no narrower QR. https://arxiv.org/abs/1312.6120
    """

    scale: float = 1.0  # of the matrix

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        if len(shape) < 2:
            raise ValueError(f"{self}: the shape {shape} has fewer than two axes; use Normal.")
        outputs = shape[out_axis]
        others = math.prod(shape) // max(1, outputs)
        wide = jnp.promote_types(dtype, jnp.float32)
        draws = sample(jax.random.normal, rng, (max(others, outputs), min(others, outputs)), wide, 1.0)
        q, r = jnp.linalg.qr(draws)
        q = q * jnp.sign(jnp.diagonal(r))  # uniform over the orthogonal matrices
        q = (q.T if others < outputs else q) * self.scale  # (others, outputs)
        rest = [size for axis, size in enumerate(shape) if axis != out_axis % len(shape)]
        return jnp.moveaxis(q.reshape(*rest, outputs), -1, out_axis).astype(dtype)


@frozen
class Identity(Initializer):
    """Initialize with the identity matrix times `scale`, at the center of the window if there is one."""

    scale: float = 1.0  # of the diagonal

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        if len(shape) < 2:
            raise ValueError(f"{self}: the shape {shape} has fewer than two axes; use Ones.")
        axes = {in_axis % len(shape), out_axis % len(shape)}
        middle = tuple(slice(None) if axis in axes else size // 2 for axis, size in enumerate(shape))
        eye = jnp.eye(shape[in_axis], shape[out_axis], dtype=dtype) * self.scale
        if out_axis % len(shape) < in_axis % len(shape):
            eye = eye.T
        return jnp.zeros(shape, dtype).at[middle].set(eye)


TRUNCATED_STD = 0.87962566103423978  # of the standard normal distribution truncated at two deviations


def _truncated_normal(rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.truncated_normal(rng, -2.0, 2.0, shape, dtype)


def _symmetric_uniform(rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(rng, shape, dtype, -1.0, 1.0)
