"""Freeze: leaves that stay as they are."""

from mlax.core import frozen, matches
from mlax.optim._around import Around
from mlax.optim._layout import Policy
from mlax.optim._optimizer import among
from mlax.optim._patterns import Patterns


@frozen
class Freeze(Around):
    """The leaves that match a pattern of `frozen` stay to the bit, and have no slots."""

    frozen: Patterns = ()

    elementwise = True

    def patterns(self):
        return (*self.frozen, *self.optimizer.patterns())

    def slots(self, path, w):
        return {} if self._is_frozen(path) else super().slots(path, w)

    def policy(self, path):
        return Policy() if self._is_frozen(path) else super().policy(path)

    def shows(self, path, w, slots, step):
        return w if self._is_frozen(path) else super().shows(path, w, slots, step)

    def advance(self, now, grads, weights, slots):
        live = [path for path in grads if not self._is_frozen(path)]
        return self.optimizer.advance(now, among(grads, live), among(weights, live), slots)

    def _is_frozen(self, path: str) -> bool:
        return any(matches(pattern, path) for pattern in self.frozen)
