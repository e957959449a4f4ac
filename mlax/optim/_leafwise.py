"""Leafwise: an optimizer that is the same mathematics at each leaf."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from mlax._jax import widest_dtype
from mlax.core import DType, frozen, matches
from mlax.optim._layout import Policy
from mlax.optim._now import Now
from mlax.optim._numbers import Numbers
from mlax.optim._optimizer import Advanced, Flat, Optimizer
from mlax.optim._patterns import Patterns
from mlax.optim._rounding import Nearest, Rounding
from mlax.optim._slot import Slot


@frozen
class Leafwise(Optimizer):
    """An optimizer written as what it keeps beside a leaf, `keeps`, and how that leaf takes a step, `step`.

    The arithmetic runs in `accum_dtype`: the weights' own dtype, or float32 if that is narrower, unless given. Slots
    are stored in the weights' dtype, but those that change too slowly for a narrow one, mean squares say, in that of
    the arithmetic; or as `slot_dtypes` says: `(("mean", "float32"),)`. `rounding` is how narrow weights are stored.
    `stacked` are patterns of leaves whose first axis counts layers, as `Repeat` stacks them, so that each layer is a
    leaf of its own to algorithms that look at whole leaves.
    """

    accum_dtype: DType = dataclasses.field(default=None, kw_only=True)
    slot_dtypes: tuple[tuple[str, str], ...] = dataclasses.field(default=(), kw_only=True)
    rounding: Rounding = dataclasses.field(default=Nearest(), kw_only=True)
    stacked: Patterns = dataclasses.field(default=(), kw_only=True)

    @abc.abstractmethod
    def keeps(self, path: str, w: Any) -> dict[str, Slot]:
        """The slots of one leaf."""

    @abc.abstractmethod
    def step(
        self, now: Numbers, g: jax.Array, w: jax.Array, slots: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The next weights and slots of one leaf. `now` has the fields that are numbers, `now.rate` say."""

    def shared(self, now: Numbers, scalars: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Numbers that all leaves share, in the dtype of `now`: the next scalars, and others that it shall have."""
        return {}

    def policy(self, path):
        return Policy(self.accum_dtype, self.slot_dtypes, self.rounding)

    def patterns(self):
        return (*self.stacked, *(getattr(self, "decayed", None) or ()))

    def slots(self, path, w):
        if not self._stacks(path):
            return self.keeps(path, w)
        inner = self.keeps(path, jax.ShapeDtypeStruct(w.shape[1:], w.dtype))
        return {name: _stacked(slot) for name, slot in inner.items()}

    def in_pieces(self, path):
        return self.elementwise or self._stacks(path)

    def advance(self, now: Now, grads: Flat, weights: Flat, slots: Mapping[str, Any]) -> Advanced:
        values = now.numbers(self)
        wide = widest_dtype(g.dtype for g in grads.values())
        shared = self.shared(Numbers(now.step, values, dtype=wide), {name: slots[name] for name in self.scalars()})
        values |= shared
        new: dict[str, jax.Array] = {}
        after: dict[str, Any] = {name: {} for name in slots if isinstance(slots[name], Mapping)}
        for path, g in grads.items():
            here = dict(values)
            if "decay" in here and not self._decays(path):
                here["decay"] = 0.0
            numbers = Numbers(now.step, here, path, g.dtype, now.factors.get(path))
            own = {name: slots[name][path] for name in self.slots(path, weights[path])}
            with jax.named_scope(path):
                new[path], kept = self._stepped(numbers, g, weights[path], own)
            for name, leaf in kept.items():
                after[name][path] = leaf
        scalars = {name: shared[name] for name in self.scalars()}
        return Advanced(new, {"step": slots["step"], **scalars, **after})

    def _stepped(self, now: Numbers, g: Any, w: Any, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._stacks(now.path):
            return self.step(now, g, w, slots)

        def one(factor: Any, g: Any, w: Any, slots: Any) -> Any:
            return self.step(dataclasses.replace(now, factor=factor), g, w, slots)

        each = 0 if getattr(now.factor, "ndim", 0) else None
        return jax.vmap(one, (each, 0, 0, 0))(now.factor, g, w, slots)

    def _stacks(self, path: str) -> bool:
        return any(matches(pattern, path) for pattern in self.stacked)

    def _decays(self, path: str) -> bool:
        return chosen(getattr(self, "decayed", ("**",)), path)


def chosen(patterns: Patterns | None, path: str, names: tuple[str, ...] = ("kernel", "table")) -> bool:
    """Whether a leaf matches one of the patterns or, where there are none, has one of the names."""
    if patterns is None:
        return path.split("/")[-1] in names
    return any(matches(pattern, path) for pattern in patterns)


def _stacked(slot: Slot) -> Slot:
    """The slot of a stack of leaves, given that of one."""
    if slot.axes is ...:
        return slot
    return slot._replace(axes=(0, *(None if axis is None else axis + 1 for axis in slot.axes)))
