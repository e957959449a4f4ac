"""OneCycle: half a cosine up, a longer half down."""

import dataclasses

import jax.numpy as jnp

from mlax.core import frozen
from mlax.optim.schedules._between import between, cosine
from mlax.optim.schedules._checks import check_numbers, check_positive, check_steps, is_number
from mlax.optim.schedules._schedule import Schedule


@frozen
class OneCycle(Schedule):
    """From peak / first to `peak` over the fraction `rise` of `total`, then to peak / first / last, by half cosines.

    The last value is that of step total - 1, the last update, and the peak lies at step rise * total - 1, whole or
    not: the OneCycleLR of PyTorch, in two phases. https://arxiv.org/abs/1708.07120
    """

    peak: float
    total: int
    rise: float = 0.3
    first: float = 25.0
    last: float = 1e4

    def __post_init__(self) -> None:
        check_numbers(self, "peak")
        check_steps(self, "total", least=2)
        check_positive(self, "rise", "first", "last")
        if not 1 / self.total < self.rise < 1:
            raise ValueError(
                f"OneCycle: rise is {self.rise} of {self.total} steps, but must be less than all of them and more than "
                "one step; pass a fraction such as 0.3."
            )

        start, end = self.peak / self.first, self.peak / self.first / self.last
        if not (is_number(start) and is_number(end)):
            raise ValueError(
                f"OneCycle: it begins at {start} and ends at {end}, which no float32 holds; raise first or last."
            )

    @property
    def length(self) -> int:
        return self.total - 1

    @property
    def marks(self) -> tuple[int, ...]:
        return tuple(sorted({int(self._top), -int(-self._top // 1), self.total - 1}))

    def stretched(self, times: int) -> "OneCycle":
        total = (self.total - 1) * times + 1
        return dataclasses.replace(self, total=total, rise=(self._top * times + 1) / total)

    def at(self, step):
        start, whole = self.peak / self.first, int(self._top)
        past = (step - whole).astype(jnp.float32) - (self._top - whole)
        up = between(start, self.peak, step, -past, cosine)
        down = between(self.peak, start / self.last, past, self.total - 1 - step, cosine)
        return jnp.where(step <= whole, up, down)

    @property
    def _top(self) -> float:
        return self.rise * self.total - 1
