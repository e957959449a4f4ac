"""Groups, Freeze, Rates and LayerwiseRates: different treatment of different leaves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlax.core import NoMatch, frozen, matches
from mlax.optim._base import Optimizer, StepResult, check_wrappable, subset
from mlax.optim._hyperparams import Patterns
from mlax.optim._slot_layout import LeafPolicy
from mlax.optim._wrappers import OptimizerWrapper


@frozen
class Groups(Optimizer):
    """Each leaf goes to the optimizer of the first pattern that matches it: `Groups(("**/table", a), ("**", b))`.

    A slot has one tree over all leaves, with nothing beside those whose optimizer does not keep it. A scalar of the
    second group, if the first has one of that name, is called `name_1`, and so on.
    """

    groups: tuple[tuple[str, Optimizer], ...]

    def __init__(self, *groups: tuple[str, Optimizer]):
        object.__setattr__(self, "groups", groups)
        self.__post_init__()

    def __post_init__(self):
        for group in self.groups:
            if not (isinstance(group, tuple) and len(group) == 2 and isinstance(group[1], Optimizer)):
                raise TypeError(
                    f'Groups: {group!r} is no pair of a pattern and an optimizer; pass ("**/kernel", Adam(1e-3)).'
                )
            check_wrappable(self, group[1])

    def within(self):
        return tuple(optimizer for _, optimizer in self.groups)

    def patterns(self):
        inner = (pattern for optimizer in self.within() for pattern in optimizer.patterns())
        return (*(pattern for pattern, _ in self.groups), *inner)

    def slots(self, path, w):
        return self.within()[self._group(path)].slots(path, w)

    def policy(self, path):
        return self.within()[self._group(path)].policy(path)

    def scalars(self):
        return {ours: start for places in self._scalars() for ours, start in places.values()}

    def advance(self, now, grads, weights, slots):
        new: dict[str, Any] = {}
        after = {name: dict(slot) if isinstance(slot, Mapping) else slot for name, slot in slots.items()}
        for place, optimizer in enumerate(self.within()):
            mine = [path for path in grads if self._group(path) == place]
            names = {theirs: ours for theirs, (ours, _) in self._scalars()[place].items()}
            own = {name: slot for name, slot in slots.items() if isinstance(slot, Mapping) or name == "step"}
            own |= {theirs: slots[ours] for theirs, ours in names.items()}
            moved, kept = optimizer.advance(now, subset(grads, mine), subset(weights, mine), own)
            new |= moved
            for name, slot in kept.items():
                if isinstance(slot, Mapping):
                    after.setdefault(name, {}).update(slot)  # a group with no leaf that moves may name one of its own
                else:
                    after[names.get(name, name)] = slot
        return StepResult(new, after)

    def in_pieces(self, path):
        return self.within()[self._group(path)].in_pieces(path)

    def shows(self, path, w, slots, step):
        return self.within()[self._group(path)].shows(path, w, slots, step)

    def _group(self, path: str) -> int:
        for place, (pattern, _) in enumerate(self.groups):
            if matches(pattern, path):
                return place
        raise NoMatch(f'Groups: no pattern matches {path!r}; end with a group for the rest, ("**", ...).')

    def _scalars(self) -> list[dict[str, tuple[str, float | int]]]:
        """For each group, its scalars' names to ours and the first value."""
        taken: set[str] = set()
        found = []
        for place, optimizer in enumerate(self.within()):
            own = {
                name: (f"{name}_{place}" if name in taken else name, start)
                for name, start in optimizer.scalars().items()
            }
            taken |= {ours for ours, _ in own.values()}
            found.append(own)
        return found

    def __repr__(self) -> str:
        return f"Groups({', '.join(map(repr, self.groups))})"


@frozen
class Freeze(OptimizerWrapper):
    """The leaves that match a pattern of `frozen` stay to the bit, and have no slots."""

    frozen: Patterns = ()

    elementwise = True

    def patterns(self):
        return (*self.frozen, *self.optimizer.patterns())

    def slots(self, path, w):
        return {} if self._is_frozen(path) else super().slots(path, w)

    def policy(self, path):
        return LeafPolicy() if self._is_frozen(path) else super().policy(path)

    def shows(self, path, w, slots, step):
        return w if self._is_frozen(path) else super().shows(path, w, slots, step)

    def advance(self, now, grads, weights, slots):
        live = [path for path in grads if not self._is_frozen(path)]
        return self.optimizer.advance(now, subset(grads, live), subset(weights, live), slots)

    def _is_frozen(self, path: str) -> bool:
        return any(matches(pattern, path) for pattern in self.frozen)


@frozen
class Rates(OptimizerWrapper):
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
class LayerwiseRates(OptimizerWrapper):
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
