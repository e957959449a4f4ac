"""Loss scaling, so that float16 gradients do not underflow."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import frozen


@frozen
class LossScale(abc.ABC):
    """By how much the loss is multiplied before it is differentiated; the gradients are divided by it in float32."""

    @abc.abstractmethod
    def init(self) -> Any:
        """What is kept from step to step: a dict with the `scale`, () float32, and whatever else is needed."""

    @abc.abstractmethod
    def after(self, kept: Any, fine: jax.Array) -> Any:
        """The same after a step whose gradients were all finite, or were not."""


@frozen
class StaticLossScale(LossScale):
    """Always the same factor."""

    scale: float = 2.0**15

    def __post_init__(self):
        _check_positive(self, "scale", self.scale)

    def init(self):
        return {"scale": jnp.float32(self.scale)}

    def after(self, kept, fine):
        return kept


@frozen
class DynamicLossScale(LossScale):
    """The largest power that overflows seldom: halved when a gradient is not finite, doubled after `every` good steps.

    Section 3.2 of https://arxiv.org/abs/1710.03740.
    """

    scale: float = 2.0**15
    every: int = 2000
    factor: float = 2.0
    least: float = 1.0
    most: float = 2.0**24

    def __post_init__(self):
        for name in ("scale", "every", "least", "most"):
            _check_positive(self, name, getattr(self, name))
        if not self.factor > 1:
            raise ValueError(f"DynamicLossScale: factor is {self.factor}, but must be above 1.")

    def init(self):
        return {"scale": jnp.float32(self.scale), "good": jnp.int32(0)}

    def after(self, kept, fine):
        good = jnp.where(fine, kept["good"] + 1, 0)
        grown = jnp.where(good >= self.every, kept["scale"] * self.factor, kept["scale"])
        scale = jnp.where(fine, grown, kept["scale"] / self.factor)
        return {
            "scale": jnp.clip(scale, self.least, self.most),
            "good": jnp.where(good >= self.every, 0, good),
        }


def _check_positive(scaling: LossScale, name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{type(scaling).__name__}: {name} is {value}, but must be above 0.")
