"""Loss scaling, so that float16 gradients do not underflow."""

import abc
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import Documented, frozen


@frozen
class LossScale(metaclass=Documented):
    """A factor that multiplies the loss before differentiation; the gradients are then divided by it in float32."""

    @abc.abstractmethod
    def init(self) -> Any:
        """The state before the first step: a dict with the `scale`, () float32, and whatever else `update` needs."""

    @abc.abstractmethod
    def update(self, state: Any, finite: jax.Array) -> Any:
        """The state after a step, given whether the loss and all gradients were finite, () bool."""


@frozen
class StaticLossScale(LossScale):
    """A loss scale that stays constant."""

    scale: float = 2.0**15  # of the loss

    def __post_init__(self):
        _check_positive(self, "scale", self.scale)

    def init(self):
        return {"scale": jnp.float32(self.scale)}

    def update(self, state, finite):
        return state


@frozen
class DynamicLossScale(LossScale):
    """A loss scale that adapts to the gradients: halved on overflow, doubled after `every` finite steps in a row.

    Section 3.2 of https://arxiv.org/abs/1710.03740. `factor` replaces the 2; the scale stays between
    `min_scale` and `max_scale`.
    """

    scale: float = 2.0**15  # the first
    every: int = 2000  # finite steps after which it grows
    factor: float = 2.0  # by which it grows or shrinks
    min_scale: float = 1.0  # the least
    max_scale: float = 2.0**24  # the largest

    def __post_init__(self):
        for name in ("scale", "factor", "min_scale", "max_scale"):
            _check_positive(self, name, getattr(self, name))
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"DynamicLossScale: every is {self.every!r}, but must be an int of at least 1.")
        if not self.factor > 1:
            raise ValueError(f"DynamicLossScale: factor is {self.factor}, but must be above 1.")
        if not self.min_scale <= self.scale <= self.max_scale:
            raise ValueError(
                f"DynamicLossScale: scale is {self.scale:g}, but must be between min_scale, {self.min_scale:g}, and "
                f"max_scale, {self.max_scale:g}."
            )

    def init(self):
        return {"scale": jnp.float32(self.scale), "good": jnp.int32(0)}

    def update(self, state, finite):
        good = jnp.where(finite, state["good"] + 1, 0)
        grown = jnp.where(good >= self.every, state["scale"] * self.factor, state["scale"])
        scale = jnp.where(finite, grown, state["scale"] / self.factor)
        return {
            "scale": jnp.clip(scale, self.min_scale, self.max_scale),
            "good": jnp.where(good >= self.every, 0, good),
        }


def _check_positive(scale: LossScale, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < math.inf:
        raise ValueError(f"{type(scale).__name__}: {name} is {value!r}, but must be a finite number above 0.")
