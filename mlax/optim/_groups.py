"""Groups: one optimizer for some leaves, another for others."""

from collections.abc import Mapping
from typing import Any

from mlax.core import NoMatch, frozen, matches
from mlax.optim._optimizer import Advanced, Optimizer, among, check_inside


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
            check_inside(self, group[1])

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
            moved, kept = optimizer.advance(now, among(grads, mine), among(weights, mine), own)
            new |= moved
            for name, slot in kept.items():
                if isinstance(slot, Mapping):
                    after.setdefault(name, {}).update(slot)  # a group with no leaf that moves may name one of its own
                else:
                    after[names.get(name, name)] = slot
        return Advanced(new, after)

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
