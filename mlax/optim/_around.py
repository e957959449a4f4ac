"""Around: an optimizer that changes what another one is given, or what it gives."""

from collections.abc import Mapping
from typing import Any

from mlax.core import frozen, short_repr
from mlax.optim._now import Now
from mlax.optim._optimizer import Advanced, Flat, Optimizer, check_inside
from mlax.optim._slot import Slot


@frozen
class Around(Optimizer):
    """An optimizer around another, whose slots stay where they are. It may add some, by `adds`."""

    optimizer: Optimizer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_inside(self, self.optimizer)

    def adds(self, path: str, w: Any) -> dict[str, Slot]:
        """The slots of its own beside one leaf."""
        return {}

    def within(self):
        return (self.optimizer,)

    def adds_scalars(self) -> dict[str, float | int]:
        """The scalars of its own."""
        return {}

    def slots(self, path, w):
        return self._joined("slot", self.optimizer.slots(path, w), self.adds(path, w))

    def scalars(self):
        return self._joined("scalar", self.optimizer.scalars(), self.adds_scalars())

    def policy(self, path):
        return self.optimizer.policy(path)

    def patterns(self):
        return self.optimizer.patterns()

    def advance(self, now: Now, grads: Flat, weights: Flat, slots: Mapping[str, Any]) -> Advanced:
        return self.optimizer.advance(now, grads, weights, slots)

    def shows(self, path, w, slots, step):
        return self.optimizer.shows(path, w, slots, step)

    def _joined(self, kind: str, inner: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        both = inner.keys() & own.keys()
        if both:
            raise ValueError(
                f"{type(self).__name__}: {short_repr(self.optimizer)} inside has a {kind} {min(both)!r} already; "
                "put only one of the two around it."
            )
        return {**inner, **own}
