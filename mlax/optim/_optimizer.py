"""Optimizer: a frozen description that turns gradients into new weights, leaf beside leaf."""

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mlax._jax import is_on_host, to_device
from mlax.core import Tree, frozen, short_repr
from mlax.optim._hosted import Part, Update
from mlax.optim._layout import Layout, Policy, layout_of
from mlax.optim._now import Now
from mlax.optim._numbers import check, check_given, ranges
from mlax.optim._patterns import settle_patterns
from mlax.optim._slot import Slot
from mlax.optim._state import State, state
from mlax.optim._table import table
from mlax.optim._trees import Leaves, leaves_of, like

Flat = Mapping[str, Any]  # the leaves of a tree by path


class Advanced(NamedTuple):
    """What `advance` gives: new weights by path, and new slots, each by path, and scalars, by name."""

    weights: dict[str, jax.Array]
    slots: dict[str, Any]


@frozen
class Optimizer(abc.ABC):
    """A description of how weights follow from gradients. Its state has a place for each leaf of the weights.

        state = optimizer.init(trainables)
        trainables, state = jax.jit(optimizer.update)(grads, state, trainables)

    The state is a named tuple: `step`, the number of updates made; slots, each with exactly the tree of the
    trainables; and scalars, if the algorithm has any. A leaf of a slot has the shape of its parameter, or some of its
    axes and some of its own, as `slots` declares; (0,) stands for nothing. Wrapping an optimizer moves no slot.
    `update` keeps the shape, dtype and placement of every leaf.
    """

    stands_alone: ClassVar[str] = ""  # for one that goes inside no other: why, and what to do instead
    elementwise: ClassVar[bool] = False  # True where the step of a number depends on no other number of any leaf

    def __post_init__(self) -> None:
        check(self)
        settle_patterns(self)

    @abc.abstractmethod
    def slots(self, path: str, w: Any) -> dict[str, Slot]:
        """What is kept beside the parameter at `path`, of which only shape and dtype are looked at."""

    def scalars(self) -> dict[str, float | int]:
        """What is kept once: the first value of each scalar, a float for a float32 and an int for an int32."""
        return {}

    @abc.abstractmethod
    def advance(self, now: Now, grads: Flat, weights: Flat, slots: Mapping[str, Any]) -> Advanced:
        """One step for the leaves in `grads`, all in the dtype of the arithmetic; a leaf that is left out stays."""

    @abc.abstractmethod
    def policy(self, path: str) -> Policy:
        """The dtypes and the rounding at this leaf."""

    def patterns(self) -> tuple[str, ...]:
        """Every path pattern in the description: one that matches no leaf is an error."""
        return ()

    def within(self) -> "tuple[Optimizer, ...]":
        """The optimizers that this one wraps."""
        return ()

    def in_pieces(self, path: str) -> bool:
        """Whether a leaf in host memory can take its step some rows at a time; if not, it is fetched as a whole."""
        return self.elementwise and all(one.in_pieces(path) for one in self.within())

    def shows(self, path: str, w: jax.Array, slots: Flat, step: jax.Array) -> jax.Array:
        """The weights of one leaf to evaluate with, given those that are trained and what is kept beside them."""
        return w

    def init(self, trainables: Tree) -> State:
        """The first state, laid over the devices as the trainables are, and in the same memory."""
        leaves = leaves_of(self, trainables)
        layout = layout_of(self, leaves)
        _check_devices(self, leaves)
        # a scalar of the weights' own devices: another place would compile `update` anew after its first step
        anchor = min(leaves.by_path.values(), key=is_on_host, default=jnp.zeros(()))
        fields = {"step": to_device(Slot(()).first(anchor, jnp.int32))}
        for name in layout.names:
            fields[name] = leaves.tree({path: layout.first(name, path, w) for path, w in leaves.by_path.items()})
        for name, start in layout.scalars.items():
            fields[name] = to_device(Slot((), start=start).first(anchor, layout.scalar_dtype(name)))
        return state(fields)

    def update(
        self,
        grads: Tree,
        state: State,
        trainables: Tree,
        *,
        value: Any = None,
        loss: Callable[[Any], Any] | None = None,
        take: jax.Array | None = None,
        **numbers: Any,
    ) -> tuple[Any, State]:
        """New trainables and the next state.

        `numbers` replace fields, `rate=0.1` say, and may be arrays: no change of theirs compiles anew. `value`, the
        loss, is for optimizers that look at it; `loss`, a function of the trainables, for those that evaluate more.
        Where `take`, a () bool, is False, everything stays as it was.

        Leaves in host memory, be they gradients, weights or slots, stay there: a few rows at a time are fetched,
        updated and put back, if the optimizer works on each number by itself or the leaf is one of its `stacked`.
        """
        leaves = leaves_of(self, trainables)
        given = leaves.of_gradients(grads)
        layout = layout_of(self, leaves)
        layout.check(state)
        _check_names(self, numbers)
        now = Now(state.step, numbers, value=value, evaluate=_evaluated(leaves, layout, loss))
        scalars = {name: getattr(state, name) for name in layout.scalars}
        part = Part(given, leaves.by_path, layout.slots_of(state))
        return _gathered(leaves, layout, state, *Update(self, layout, now, scalars, take)(part))

    def averaged(self, state: State, trainables: Tree) -> Any:
        """The weights to evaluate with: those that are trained, unless an optimizer in here shows others."""
        leaves = leaves_of(self, trainables)
        layout = layout_of(self, leaves)
        layout.check(state)
        kept = layout.slots_of(state)
        slots = layout.opened(kept)
        shown = dict(leaves.by_path)
        for path, leaf in leaves.by_path.items():
            w = layout.read(path, leaf, kept)
            new = self.shows(path, w, {name: slot[path] for name, slot in slots.items() if path in slot}, state.step)
            if new is not w:
                shown[path] = like(new, leaf)
        return leaves.tree(shown)

    def partition(self, specs: Tree, trainables: Tree = None) -> State:
        """The state's PartitionSpecs or Shardings from those of the trainables.

        `trainables`, arrays or `jax.ShapeDtypeStruct`s, are needed if the shapes decide which axes a slot keeps.
        """
        return layout_of(self, leaves_of(self, trainables if trainables is not None else specs)).partition(specs)

    def describe(self, trainables: Tree) -> str:
        """A table of the slots: which dtypes, how many numbers and bytes."""
        return table(layout_of(self, leaves_of(self, trainables)))


def check_inside(outer: Optimizer, inner: Any) -> None:
    """Refuse what is no optimizer, and an optimizer that goes inside no other."""
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{type(outer).__name__}: {inner!r} is no optimizer; it goes around one.")
    if inner.stands_alone:
        raise TypeError(f"{type(outer).__name__}: around {short_repr(inner)}, which {inner.stands_alone}")


def _check_devices(optimizer: Optimizer, leaves: Leaves) -> None:
    """Refuse weights that no one program could update, since they were put on different devices."""
    placed = {
        path: leaf.devices()
        for path, leaf in leaves.by_path.items()
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
    }
    first = next(iter(placed), None)
    for path, devices in placed.items():
        if first is not None and devices != placed[first]:
            here, there = (", ".join(sorted(map(str, some))) for some in (placed[first], devices))
            raise ValueError(
                f"{short_repr(optimizer)}: {first} is on {here} and {path} on {there}, but a program runs on one set "
                "of devices; keep a state for each part: {name: optimizer.init(part) for name, part in w.items()}."
            )


def among(leaves: Flat, paths: Iterable[str]) -> dict[str, Any]:
    """Those of the leaves."""
    return {path: leaves[path] for path in paths}


def _gathered(
    leaves: Leaves, layout: Layout, before: State, new: Part, scalars: Mapping[str, Any]
) -> tuple[Any, State]:
    """The trainables and the state, with the leaves of slots that a parameter does not need as they were."""
    slots = {name: leaves.same(getattr(before, name), name) | new.slots[name] for name in layout.names}
    fields = {name: leaves.tree(slot) for name, slot in slots.items()}
    return leaves.tree(new.weights), state(
        {"step": scalars["step"], **fields, **{name: scalars[name] for name in layout.scalars}}
    )


def _evaluated(leaves: Leaves, layout: Layout, loss: Callable[[Any], Any] | None) -> Callable[[Flat], Any] | None:
    """The loss and its gradient as functions of wide weights by path."""
    if loss is None:
        return None

    def evaluate(weights: Flat) -> tuple[jax.Array, dict[str, jax.Array]]:
        narrow = {path: w.astype(leaves.by_path[path].dtype) for path, w in weights.items()}
        value, grads = jax.value_and_grad(loss)(leaves.tree({**leaves.by_path, **narrow}))
        return value, {path: layout.widened(path, g) for path, g in leaves.of_gradients(grads).items()}

    return evaluate


def _check_names(optimizer: Optimizer, numbers: Mapping[str, Any]) -> None:
    """Each number must be a field, of this optimizer or of one inside, and of one of them only."""
    for name in numbers:
        owners = [one for one in _nest(optimizer) if name in ranges(type(one))]
        if not owners:
            known = sorted({field for one in _nest(optimizer) for field in ranges(type(one))})
            raise TypeError(
                f"{short_repr(optimizer)}: update has no number {name!r}; it has {', '.join(known) or 'none'}."
            )
        levels = {type(one).__name__ for one in owners}
        if len(levels) > 1:
            raise TypeError(
                f"{short_repr(optimizer)}: {name!r} is a field of {' and of '.join(sorted(levels))}, so whose is "
                "meant is "
                "not clear; give that field a schedule instead."
            )
        check_given(owners[0], {name: numbers[name]})


def _nest(optimizer: Optimizer) -> list[Optimizer]:
    return [optimizer, *(one for inner in optimizer.within() for one in _nest(inner))]
