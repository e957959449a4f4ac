"""The update of leaves in host memory, in chunks."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlax._jax import map_chunks_inplace, plan_chunks, sum_chunks, to_device, to_memory_of
from mlax.optim._slot_layout import SlotLayout
from mlax.optim._trees import cast_like
from mlax.optim._update import UpdateContext


class Part(NamedTuple):
    """Some leaves, or some rows of them, as they are stored."""

    grads: dict[str, Any]  # by path
    weights: dict[str, Any]
    slots: dict[str, dict[str, Any]]  # by name and path

    def of(self, paths: Iterable[str]) -> "Part":
        """The part with these leaves only."""
        chosen = list(paths)
        slots = {name: {path: slot[path] for path in chosen if path in slot} for name, slot in self.slots.items()}
        return Part({p: self.grads[p] for p in chosen}, {p: self.weights[p] for p in chosen}, slots)

    def arrays(self, path: str) -> list[Any]:
        """All there is at a path, its weights first."""
        return [self.weights[path], self.grads[path], *(slot[path] for slot in self.slots.values() if path in slot)]


@dataclasses.dataclass(frozen=True)
class Update:
    """An update under way: `take` says if it is to be taken, and leaves everything as it was if it is not."""

    optimizer: Any
    layout: SlotLayout
    now: UpdateContext
    scalars: Mapping[str, jax.Array]
    take: jax.Array | None = None

    def __call__(self, part: Part) -> tuple[Part, dict[str, Any]]:
        """The leaves after it, each where it was, and the step and the scalars."""
        cut = plan_chunks({p: part.arrays(p) for p in part.weights if self.optimizer.in_pieces(p)})
        if not cut:
            return self._whole(part, self.now)
        apart = {path for paths, _ in cut for path in paths}
        rest = part.of(path for path in part.weights if path not in apart)
        totals: list[jax.Array] = []  # of what the optimizer adds up over all leaves, in the order it asks for them
        while True:
            now = _knowing(self.now, totals)
            try:
                new, scalars = self._whole(rest, now)
                break
            except Unknown as asked:
                amount = asked.amount
                for paths, number in cut:
                    amount = sum_chunks(lambda piece: self._amount(piece, totals), part.of(paths), number, amount)
                totals.append(amount)
        for paths, number in cut:
            piece = self._cut(part.of(paths), number, totals)
            new.weights.update(piece.weights)
            for name, slot in piece.slots.items():
                new.slots[name].update(slot)
        return new, scalars

    def _whole(self, part: Part, now: UpdateContext) -> tuple[Part, dict[str, Any]]:
        new, scalars = self._taken(to_device(part), now)
        return to_memory_of(new, part._replace(grads=new.grads)), scalars

    def _cut(self, part: Part, number: int, totals: list[jax.Array]) -> Part:
        def step(row: Any, written: Any, grads: Any) -> Any:
            new, _ = self._taken(Part(grads, *written), _knowing(self.now, totals), row)
            return new.weights, new.slots

        return Part(part.grads, *map_chunks_inplace(step, (part.weights, part.slots), part.grads, number))

    def _amount(self, piece: Part, totals: list[jax.Array]) -> jax.Array:
        try:
            self._taken(piece, _knowing(self.now, totals))
        except Unknown as asked:
            return asked.amount
        raise TypeError(
            f"{self.layout.leaves.owner}: what it adds up over all leaves by `now.total` depends on which leaves it "
            "sees; call it equally often for any of them."
        )

    def _taken(self, part: Part, now: UpdateContext, row: Any = 0) -> tuple[Part, dict[str, Any]]:
        """The update of leaves on the device, whose first row is `row` in the whole."""
        layout, before = self.layout, {"step": now.step, **self.scalars}
        old = {path: layout.read(path, w, part.slots) for path, w in part.weights.items()}
        weights, after = self.optimizer.advance(
            now,
            {path: layout.widened(path, g) for path, g in part.grads.items()},
            old,
            {**before, "step": now.step + 1, **layout.opened(part.slots)},
        )
        new, slots = dict(part.weights), {name: dict(slot) for name, slot in part.slots.items()}
        for path, w in weights.items():
            if not layout.reads_weights(path):  # nor are they fetched to stay as they were
                stored, remembered = layout.write(path, self._chosen(w, old[path]), now.step, row)
                new[path] = cast_like(stored, new[path])
            else:
                stored, remembered = layout.write(path, w, now.step, row)
                new[path] = self._chosen(cast_like(stored, new[path]), new[path])
            for name, leaf in remembered.items():
                slots[name][path] = self._chosen(leaf, slots[name][path])
        for name in layout.names:
            for path, leaf in after.get(name, {}).items():
                slots[name][path] = self._chosen(cast_like(leaf, slots[name][path]), slots[name][path])
        scalars = {name: self._chosen(after[name].astype(old.dtype), old) for name, old in before.items()}
        return Part(part.grads, new, slots), scalars

    def _chosen(self, new: jax.Array, old: jax.Array) -> jax.Array:
        return new if self.take is None or new is old else jnp.where(self.take, new, old)


class Unknown(Exception):
    """A sum over all leaves was asked for, of which only this amount is known."""

    def __init__(self, amount: jax.Array):
        super().__init__("a sum over all leaves is not known yet")
        self.amount = amount


def _knowing(now: UpdateContext, totals: list[jax.Array]) -> UpdateContext:
    """The moment, in which the sums over all leaves that are asked for first are these."""
    known = iter(totals)

    def total(amount: jax.Array) -> jax.Array:
        found = next(known, None)
        if found is None:
            raise Unknown(amount)
        return found

    return dataclasses.replace(now, total=total, in_pieces=True)
