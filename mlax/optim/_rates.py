"""Rates: other learning rates for some leaves."""

import dataclasses
from typing import Any

import numpy as np

from mlax.core import frozen, matches
from mlax.optim._around import Around
from mlax.optim._patterns import Patterns


@frozen
class Rates(Around):
    """The rate times a factor for the leaves that match a pattern, the first that does: `(("**/table", 0.1),)`."""

    elementwise = True
    factors: tuple[tuple[str, float], ...] = ()

    def patterns(self):
        return (*(pattern for pattern, _ in self.factors), *self.optimizer.patterns())

    def advance(self, now, grads, weights, slots):
        found = {path: self._factor(path) for path in grads}
        scaled = {path: factor for path, factor in found.items() if factor is not None}
        return self.optimizer.advance(now.scaled(scaled), grads, weights, slots)

    def _factor(self, path: str) -> float | None:
        return next((factor for pattern, factor in self.factors if matches(pattern, path)), None)


@frozen
class LayerwiseRates(Around):
    """Rates that fall by `factor` from each layer to the one before it, down from the last, which keeps the rate.

    `layers` are patterns in the order of the layers, from the input on. One of those that are `stacked`, weights of a
    `Repeat`, stands for as many layers as its first axis is long. https://arxiv.org/abs/2106.08254
    """

    layers: Patterns
    factor: float = 0.75
    stacked: Patterns = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        unknown = set(self.stacked) - set(self.layers)
        if unknown:
            raise ValueError(f"LayerwiseRates: {min(unknown)!r} is stacked, but is none of the layers.")

    def patterns(self):
        return (*self.layers, *self.optimizer.patterns())

    def in_pieces(self, path):
        return not self.stacked and self.optimizer.in_pieces(path)  # a piece does not know which layers it holds

    def advance(self, now, grads, weights, slots):
        return self.optimizer.advance(
            now.scaled(self.factors({path: g.shape for path, g in grads.items()})), grads, weights, slots
        )

    def factors(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        """The factor of each leaf: a number, or for a stacked one an array that its first axis counts."""
        own = {pattern: [path for path in shapes if matches(pattern, path)] for pattern in self.layers}
        deep = {p: shapes[own[p][0]][0] if p in self.stacked and own[p] else 1 for p in self.layers}
        above, found = 0, {}
        for pattern in reversed(self.layers):
            for path in own[pattern]:
                if pattern in self.stacked:
                    each = self.factor ** (above + np.arange(deep[pattern])[::-1])
                    found[path] = each.reshape(-1, *[1] * (len(shapes[path]) - 1))
                else:
                    found[path] = self.factor**above
            above += deep[pattern]
        return found
