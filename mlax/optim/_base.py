"""Optimizer and Leafwise: frozen descriptions of how new weights follow from gradients."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mlax._jax import is_on_host, to_device, widest_dtype
from mlax.core import DType, Tree, frozen, matches, short_repr
from mlax.optim._hyperparams import (
    Hyperparams,
    Patterns,
    check_hyperparams,
    check_overrides,
    hyperparam_ranges,
    normalize_patterns,
)
from mlax.optim._offload import Part, Update
from mlax.optim._rounding import Rounding, RoundToNearest
from mlax.optim._slot_layout import LeafPolicy, SlotLayout, slot_layout, slot_table
from mlax.optim._slots import OptimizerState, Slot, make_state
from mlax.optim._trees import FlatTree, cast_like, flatten_trainables
from mlax.optim._update import UpdateContext

ByPath = Mapping[str, Any]  # the leaves of a tree by path


class StepResult(NamedTuple):
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
        check_hyperparams(self)
        normalize_patterns(self)

    @abc.abstractmethod
    def slots(self, path: str, w: Any) -> dict[str, Slot]:
        """What is kept beside the parameter at `path`, of which only shape and dtype are looked at."""

    def scalars(self) -> dict[str, float | int]:
        """What is kept once: the first value of each scalar, a float for a float32 and an int for an int32."""
        return {}

    @abc.abstractmethod
    def advance(self, now: UpdateContext, grads: ByPath, weights: ByPath, slots: Mapping[str, Any]) -> StepResult:
        """One step for the leaves in `grads`, all in the dtype of the arithmetic; a leaf that is left out stays."""

    @abc.abstractmethod
    def policy(self, path: str) -> LeafPolicy:
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

    def shows(self, path: str, w: jax.Array, slots: ByPath, step: jax.Array) -> jax.Array:
        """The weights of one leaf to evaluate with, given those that are trained and what is kept beside them."""
        return w

    def init(self, trainables: Tree) -> OptimizerState:
        """The first state, laid over the devices as the trainables are, and in the same memory."""
        leaves = flatten_trainables(self, trainables)
        layout = slot_layout(self, leaves)
        _check_devices(self, leaves)
        # a scalar of the weights' own devices: another place would compile `update` anew after its first step
        anchor = min(leaves.by_path.values(), key=is_on_host, default=jnp.zeros(()))
        fields = {"step": to_device(Slot(()).first(anchor, jnp.int32))}
        for name in layout.names:
            fields[name] = leaves.tree({path: layout.first(name, path, w) for path, w in leaves.by_path.items()})
        for name, start in layout.scalars.items():
            fields[name] = to_device(Slot((), start=start).first(anchor, layout.scalar_dtype(name)))
        return make_state(fields)

    def update(
        self,
        grads: Tree,
        state: OptimizerState,
        trainables: Tree,
        *,
        value: Any = None,
        loss: Callable[[Any], Any] | None = None,
        take: jax.Array | None = None,
        **numbers: Any,
    ) -> tuple[Any, OptimizerState]:
        """New trainables and the next state.

        `numbers` replace fields, `rate=0.1` say, and may be arrays: no change of theirs compiles anew. `value`, the
        loss, is for optimizers that look at it; `loss`, a function of the trainables, for those that evaluate more.
        Where `take`, a () bool, is False, everything stays as it was.

        Leaves in host memory, be they gradients, weights or slots, stay there: a few rows at a time are fetched,
        updated and put back, if the optimizer works on each number by itself or the leaf is one of its `stacked`.
        """
        leaves = flatten_trainables(self, trainables)
        given = leaves.of_gradients(grads)
        layout = slot_layout(self, leaves)
        layout.check(state)
        _check_override_names(self, numbers)
        now = UpdateContext(state.step, numbers, value=value, evaluate=_loss_and_grad(leaves, layout, loss))
        scalars = {name: getattr(state, name) for name in layout.scalars}
        part = Part(given, leaves.by_path, layout.slots_of(state))
        return _unflatten_results(leaves, layout, state, *Update(self, layout, now, scalars, take)(part))

    def averaged(self, state: OptimizerState, trainables: Tree) -> Any:
        """The weights to evaluate with: those that are trained, unless an optimizer in here shows others."""
        leaves = flatten_trainables(self, trainables)
        layout = slot_layout(self, leaves)
        layout.check(state)
        kept = layout.slots_of(state)
        slots = layout.opened(kept)
        shown = dict(leaves.by_path)
        for path, leaf in leaves.by_path.items():
            w = layout.read(path, leaf, kept)
            new = self.shows(path, w, {name: slot[path] for name, slot in slots.items() if path in slot}, state.step)
            if new is not w:
                shown[path] = cast_like(new, leaf)
        return leaves.tree(shown)

    def partition(self, specs: Tree, trainables: Tree = None) -> OptimizerState:
        """The state's PartitionSpecs or Shardings from those of the trainables.

        `trainables`, arrays or `jax.ShapeDtypeStruct`s, are needed if the shapes decide which axes a slot keeps.
        """
        return slot_layout(self, flatten_trainables(self, trainables if trainables is not None else specs)).partition(
            specs
        )

    def describe(self, trainables: Tree) -> str:
        """A table of the slots: which dtypes, how many numbers and bytes."""
        return slot_table(slot_layout(self, flatten_trainables(self, trainables)))


def check_wrappable(outer: Optimizer, inner: Any) -> None:
    """Refuse what is no optimizer, and an optimizer that goes inside no other."""
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{type(outer).__name__}: {inner!r} is no optimizer; it goes around one.")
    if inner.stands_alone:
        raise TypeError(f"{type(outer).__name__}: around {short_repr(inner)}, which {inner.stands_alone}")


def _check_devices(optimizer: Optimizer, leaves: FlatTree) -> None:
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


def subset(leaves: ByPath, paths: Iterable[str]) -> dict[str, Any]:
    """Those of the leaves."""
    return {path: leaves[path] for path in paths}


def _unflatten_results(
    leaves: FlatTree, layout: SlotLayout, before: OptimizerState, new: Part, scalars: Mapping[str, Any]
) -> tuple[Any, OptimizerState]:
    """The trainables and the state, with the leaves of slots that a parameter does not need as they were."""
    slots = {name: leaves.same(getattr(before, name), name) | new.slots[name] for name in layout.names}
    fields = {name: leaves.tree(slot) for name, slot in slots.items()}
    return leaves.tree(new.weights), make_state(
        {"step": scalars["step"], **fields, **{name: scalars[name] for name in layout.scalars}}
    )


def _loss_and_grad(
    leaves: FlatTree, layout: SlotLayout, loss: Callable[[Any], Any] | None
) -> Callable[[ByPath], Any] | None:
    """The loss and its gradient as functions of wide weights by path."""
    if loss is None:
        return None

    def evaluate(weights: ByPath) -> tuple[jax.Array, dict[str, jax.Array]]:
        narrow = {path: w.astype(leaves.by_path[path].dtype) for path, w in weights.items()}
        value, grads = jax.value_and_grad(loss)(leaves.tree({**leaves.by_path, **narrow}))
        return value, {path: layout.widened(path, g) for path, g in leaves.of_gradients(grads).items()}

    return evaluate


def _check_override_names(optimizer: Optimizer, numbers: Mapping[str, Any]) -> None:
    """Each number must be a field, of this optimizer or of one inside, and of one of them only."""
    for name in numbers:
        owners = [one for one in _nested_optimizers(optimizer) if name in hyperparam_ranges(type(one))]
        if not owners:
            known = sorted({field for one in _nested_optimizers(optimizer) for field in hyperparam_ranges(type(one))})
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
        check_overrides(owners[0], {name: numbers[name]})


def _nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    return [optimizer, *(one for inner in optimizer.within() for one in _nested_optimizers(inner))]


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
    rounding: Rounding = dataclasses.field(default=RoundToNearest(), kw_only=True)
    stacked: Patterns = dataclasses.field(default=(), kw_only=True)

    @abc.abstractmethod
    def keeps(self, path: str, w: Any) -> dict[str, Slot]:
        """The slots of one leaf."""

    @abc.abstractmethod
    def step(
        self, now: Hyperparams, g: jax.Array, w: jax.Array, slots: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The next weights and slots of one leaf. `now` has the fields that are numbers, `now.rate` say."""

    def shared(self, now: Hyperparams, scalars: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Numbers that all leaves share, in the dtype of `now`: the next scalars, and others that it shall have."""
        return {}

    def policy(self, path):
        return LeafPolicy(self.accum_dtype, self.slot_dtypes, self.rounding)

    def patterns(self):
        return (*self.stacked, *(getattr(self, "decayed", None) or ()))

    def slots(self, path, w):
        if not self._stacks(path):
            return self.keeps(path, w)
        inner = self.keeps(path, jax.ShapeDtypeStruct(w.shape[1:], w.dtype))
        return {name: _stack_slot(slot) for name, slot in inner.items()}

    def in_pieces(self, path):
        return self.elementwise or self._stacks(path)

    def advance(self, now: UpdateContext, grads: ByPath, weights: ByPath, slots: Mapping[str, Any]) -> StepResult:
        values = now.numbers(self)
        wide = widest_dtype(g.dtype for g in grads.values())
        shared = self.shared(Hyperparams(now.step, values, dtype=wide), {name: slots[name] for name in self.scalars()})
        values |= shared
        new: dict[str, jax.Array] = {}
        after: dict[str, Any] = {name: {} for name in slots if isinstance(slots[name], Mapping)}
        for path, g in grads.items():
            here = dict(values)
            if "decay" in here and not self._decays(path):
                here["decay"] = 0.0
            numbers = Hyperparams(now.step, here, path, g.dtype, now.factors.get(path))
            own = {name: slots[name][path] for name in self.slots(path, weights[path])}
            with jax.named_scope(path):
                new[path], kept = self._stepped(numbers, g, weights[path], own)
            for name, leaf in kept.items():
                after[name][path] = leaf
        scalars = {name: shared[name] for name in self.scalars()}
        return StepResult(new, {"step": slots["step"], **scalars, **after})

    def _stepped(self, now: Hyperparams, g: Any, w: Any, slots: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._stacks(now.path):
            return self.step(now, g, w, slots)

        def one(factor: Any, g: Any, w: Any, slots: Any) -> Any:
            return self.step(dataclasses.replace(now, factor=factor), g, w, slots)

        each = 0 if getattr(now.factor, "ndim", 0) else None
        return jax.vmap(one, (each, 0, 0, 0))(now.factor, g, w, slots)

    def _stacks(self, path: str) -> bool:
        return any(matches(pattern, path) for pattern in self.stacked)

    def _decays(self, path: str) -> bool:
        return matches_any(getattr(self, "decayed", ("**",)), path)


def matches_any(patterns: Patterns | None, path: str, names: tuple[str, ...] = ("kernel", "table")) -> bool:
    """Whether a leaf matches one of the patterns or, where there are none, has one of the names."""
    if patterns is None:
        return path.split("/")[-1] in names
    return any(matches(pattern, path) for pattern in patterns)


def _stack_slot(slot: Slot) -> Slot:
    """The slot of a stack of leaves, given that of one."""
    if slot.axes is ...:
        return slot
    return slot._replace(axes=(0, *(None if axis is None else axis + 1 for axis in slot.axes)))
