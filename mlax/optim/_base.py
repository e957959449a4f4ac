"""Optimizer: a frozen description of how gradients update weights."""

import abc
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mlax._jax import are_on_one_device, at_least_float32, is_on_host, to_device
from mlax.core import Documented, Tree, check_not_donated, frozen, short_repr
from mlax.optim._estimate import update_estimates
from mlax.optim._hyperparams import (
    check_fields,
    check_override,
    hyperparam_ranges,
)
from mlax.optim._offload import apply_offloaded
from mlax.optim._rounding import LeafPolicy
from mlax.optim._slot_layout import SlotLayout, slot_layout, slot_table
from mlax.optim._slots import OptimizerState, Slot, make_state
from mlax.optim._state_average import fill_in_average, init_average, move_average
from mlax.optim._trees import FlatTree, cast_like, flatten_trainables
from mlax.optim._update import LeafArrays, Update, UpdateContext

LeavesByPath = Mapping[str, Any]  # leaves by path


class StepResult(NamedTuple):
    """New weights by path; new slots by name and path, together with the new scalars by name."""

    weights: dict[str, jax.Array]
    slots: dict[str, Any]


@frozen
class Optimizer(metaclass=Documented):
    """A frozen description of an optimizer; its state has slots with the tree structure of the trainables.

        state = optimizer.init(trainables)
        trainables, state = jax.jit(optimizer.update)(grads, state, trainables)

    The state is a named tuple: `step`, the number of updates so far; slots, each with exactly the tree structure of
    the trainables; and scalars, if the algorithm has any. A leaf of a slot has the shape of its parameter, or some of
    its axes and new ones, as `slots` declares; one that a parameter does not need has shape (0,). Wrapping an
    optimizer moves no slot. `update` preserves the shape, dtype, weak type and sharding of every leaf.
    """

    _listed = ("init", "update", "eval_trainables", "eval_non_trainables", "partition", "describe")  # by `help`

    shadows_overrides: ClassVar[bool] = False  # whether overrides of its fields are not passed to those inside
    nesting_error: ClassVar[str] = ""  # for an optimizer that cannot be wrapped: why, and what to do instead
    elementwise: ClassVar[bool] = False  # whether the update of each element depends on no other element

    def __post_init__(self) -> None:
        check_fields(self)

    @abc.abstractmethod
    def slots(self, path: str, w: Any) -> dict[str, Slot]:
        """The slots of the parameter at `path`, of which only the shape and dtype may be used."""

    def scalars(self) -> dict[str, float | int]:
        """The initial values of the scalars: a float is stored in at least float32, an int as int32."""
        return {}

    @abc.abstractmethod
    def update_leaves(
        self, context: UpdateContext, grads: LeavesByPath, weights: LeavesByPath, slots: Mapping[str, Any]
    ) -> StepResult:
        """The new weights and slots of the leaves in `grads`, in the compute dtype; leaves left out do not change.

        `slots` has slots by name and path, scalars by name, and the next `step`.
        """

    @abc.abstractmethod
    def policy(self, path: str) -> LeafPolicy:
        """The dtypes and the rounding of a leaf."""

    def patterns(self) -> tuple[str, ...]:
        """All path patterns of the description: one that matches no leaf is an error."""
        return ()

    def check_paths(self, paths: Collection[str]) -> None:
        """Raise an error if the description does not fit trainables with these paths."""
        for inner in self.inner_optimizers():
            inner.check_paths(paths)

    def override_error(self, name: str) -> str:
        """Why `update` cannot override a hyperparameter, and what to do instead; empty if it can."""
        return "it is None; construct the optimizer with a number." * (getattr(self, name) is None)

    def inner_optimizers(self) -> "tuple[Optimizer, ...]":
        """The optimizers that this one wraps."""
        return ()

    def is_chunkable(self, path: str) -> bool:
        """Whether a leaf in host memory can be updated some rows at a time, instead of fetched whole."""
        return self.elementwise and all(inner.is_chunkable(path) for inner in self.inner_optimizers())

    def is_frozen(self, path: str) -> bool:
        """Whether the leaf never changes: it needs no gradient, has no slots, and is not passed to `update_leaves`."""
        return False

    def is_bounded(self, path: str) -> bool:
        """Whether a gradient whose norm is finite, at a rate in reason, leaves finite weights of the leaf finite.

        Then `skip_nonfinite` need not compute the new weights before it stores any of them: one pass over memory less.
        """
        return False

    def eval_weights(self, path: str, w: jax.Array, slots: LeavesByPath, step: jax.Array) -> jax.Array:
        """The weights of a leaf to evaluate with, from the trained ones and its slots."""
        return w

    def average_weight(self, context: UpdateContext, path: str) -> jax.Array | None:
        """How far an update moves the average at `path` towards the new value, from 0 to 1; None if there is none."""
        found = (inner.average_weight(context, path) for inner in self.inner_optimizers())
        return next((weight for weight in found if weight is not None), None)

    def estimate_every(self) -> int | None:
        """After how many updates `estimate` is due again; None if nothing is estimated."""
        found = (inner.estimate_every() for inner in self.inner_optimizers())
        return next((every for every in found if every is not None), None)

    def estimate_leaf(
        self, step: jax.Array, path: str, g: jax.Array, slots: LeavesByPath, examples: jax.Array
    ) -> dict[str, jax.Array]:
        """The estimated slots of a leaf; see `estimate`."""
        return {}

    def learning_rates(
        self, context: UpdateContext, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The metric `rate` of an update, given the scalars before and after it; of `Groups`, one for each group."""
        if "rate" in hyperparam_ranges(type(self)):
            return {"rate": context.hyperparams(self)["rate"]}
        found = (inner.learning_rates(context, before, after) for inner in self.inner_optimizers())
        return next((rates for rates in found if rates), {})

    def init(self, trainables: Tree) -> OptimizerState:
        """The initial state, sharded like the trainables, and in the same memory; of shapes, its shapes."""
        check_not_donated(short_repr(self), trainables=trainables)
        tree = flatten_trainables(self, trainables)
        if tree.is_abstract:
            return jax.eval_shape(self.init, trainables)
        layout = slot_layout(self, tree)
        _check_devices(tree)
        if are_on_one_device(trainables):
            return jax.jit(self.init)(trainables)  # one program, and not three for each shape
        # scalars on the devices of the weights, or `update` would recompile after its first step
        anchor = min(tree.by_path.values(), key=is_on_host, default=jnp.zeros(()))
        fields = {"step": to_device(Slot(()).init_value(anchor, jnp.int32))}
        for name in layout.names:
            leaves = {
                p: leaf.slot(name).init_value(leaf.parameter, leaf.slot_dtype(name))
                for p, leaf in layout.leaves.items()
            }
            fields[name] = tree.unflatten(leaves)
        for name, start in layout.scalars.items():
            fields[name] = to_device(Slot((), start=start).init_value(anchor, layout.scalar_dtype(name)))
        return make_state(fields)

    def update(
        self,
        grads: Tree,
        state: OptimizerState,
        trainables: Tree,
        *,
        value: Any = None,
        loss: Callable[[Any], Any] | None = None,
        loss_scale: jax.Array | None = None,
        apply_if: jax.Array | None = None,
        skip_nonfinite: bool = False,
        **overrides: Any,
    ) -> tuple[Any, OptimizerState]:
        """The new trainables and the new state. Gradients of frozen leaves may be left out, or be None.

        `overrides` replace hyperparameters, such as `rate=0.1`, and may be arrays: new values do not recompile.
        `value`, the loss, and `loss`, a function of the trainables, are for optimizers that need them. Those multiply
        `loss` by `loss_scale` before they differentiate it, and divide its gradients by it: in float16 they might
        underflow otherwise. If `apply_if`, a () bool, is False, nothing changes, not even `step`; with `skip_nonfinite`
        nothing changes either if a new weight is not finite, unless it is updated in host memory. Adam and AdamW check
        the norm of the gradient and the rate instead, which bound their steps.

        On a GPU `jax.jit(optimizer.update, donate_argnums=(1, 2))` updates in place. A CPU makes no copies either if
        the arguments are in the order of the results, as in `train.step`:
        `jax.jit(lambda trainables, state, grads: optimizer.update(grads, state, trainables), donate_argnums=(0, 1))`.

        Arrays in host memory, whether gradients, weights or slots, stay there: they are updated a few rows at a time,
        if the optimizer is elementwise or the leaf is a stack of layers.
        """
        check_not_donated(short_repr(self), gradients=grads, state=state, trainables=trainables)
        tree = flatten_trainables(self, trainables)
        live = [path for path in tree.by_path if not self.is_frozen(path)]
        flat_grads = tree.flatten_gradients(grads, live)
        layout = slot_layout(self, tree)
        slots = layout.flatten_slots(state)
        self.check_overrides(overrides)
        context = UpdateContext(state.step, overrides, value=value, evaluate=_loss_and_grad(layout, loss, loss_scale))
        update = Update(
            self, layout, context, {name: getattr(state, name) for name in layout.scalars}, apply_if, skip_nonfinite
        )
        arrays = LeafArrays(flat_grads, subset(tree.by_path, live), layout.drop_empty(slots))
        new, scalars = apply_offloaded(update, arrays) if arrays.any_on_host() else update.apply(arrays)
        new_slots = {name: tree.unflatten({**slots[name], **new.slots[name]}) for name in layout.names}
        return tree.unflatten({**tree.by_path, **new.weights}), state._replace(**new_slots, **scalars)

    def estimate(self, sampled: Tree, state: OptimizerState, examples: Any) -> OptimizerState:
        """The state with new estimates, of the curvature say, which the optimizer needs every `estimate_every` updates.

        `sampled` are gradients of the mean loss over `examples` labels that are sampled from the predictions of the
        model: `jax.random.categorical(rng, logits)`. `train.step(sampled=objective)` computes them.
        """
        return update_estimates(self, sampled, state, examples)

    def check_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Raise an error unless each is a hyperparameter of one type of optimizer inside, and in its range."""
        _check_overrides(self, overrides)

    def eval_trainables(self, state: OptimizerState, trainables: Tree) -> Any:
        """The weights to evaluate with: an average, if the optimizer or one inside has one, else the trainables."""
        check_not_donated(short_repr(self), state=state, trainables=trainables)
        tree = flatten_trainables(self, trainables)
        layout = slot_layout(self, tree)
        stored = layout.drop_empty(layout.flatten_slots(state))
        upcast = layout.upcast_slots(stored)
        new = dict(tree.by_path)
        for path, leaf in tree.by_path.items():
            if self.is_frozen(path):
                continue
            w = layout.leaves[path].read(leaf, _slots_at(stored, path))
            shown = self.eval_weights(path, w, _slots_at(upcast, path), state.step)
            if shown is not w:
                new[path] = cast_like(shown, leaf)
        return tree.unflatten(new)

    def init_average(self, non_trainables: Tree) -> Tree:
        """The first average of the running statistics, the floating leaves named `mean` or `var`, as in BatchNorm.

        Averaged weights need statistics that are averaged likewise:

            average = optimizer.init_average(non_trainables)
            ...  # after each update
            average = optimizer.update_average(average, non_trainables, state)
            ...  # to evaluate
            trainables = optimizer.eval_trainables(state, trainables)
            non_trainables = optimizer.eval_non_trainables(average, non_trainables)

        Other state, such as counts and singular vectors, is not averaged, nor is that of a group in `Groups` whose
        optimizer does not average. If nothing is averaged, it is None, and the other two return what they are given.
        """
        context = UpdateContext(jnp.zeros((), jnp.int32), {})
        return init_average(non_trainables, functools.partial(self.average_weight, context))

    def update_average(self, average: Tree, non_trainables: Tree, state: OptimizerState) -> Tree:
        """The average of the statistics after the update that returned `state`."""
        context = UpdateContext(jnp.maximum(state.step - 1, 0), {})
        return move_average(average, non_trainables, functools.partial(self.average_weight, context))

    def eval_non_trainables(self, average: Tree, non_trainables: Tree) -> Any:
        """The non_trainables to evaluate `eval_trainables` with: averaged statistics, and other state as it is."""
        return fill_in_average(average, non_trainables)

    def partition(self, specs: Tree, trainables: Tree = None) -> OptimizerState:
        """The PartitionSpecs or Shardings of the state, from those of the trainables.

        `trainables`, arrays or `jax.ShapeDtypeStruct`s, are needed if the axes of a slot depend on shapes.
        """
        tree = flatten_trainables(self, trainables if trainables is not None else specs)
        return slot_layout(self, tree).partition(specs)

    def describe(self, trainables: Tree) -> str:
        """A table of the slots, with their dtypes, elements and bytes."""
        return slot_table(slot_layout(self, flatten_trainables(self, trainables)))


def check_wrappable(outer: Optimizer, inner: Any) -> None:
    """Raise an error unless `inner` is an optimizer that can be wrapped."""
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{type(outer).__name__}: {inner!r} is not an optimizer; pass one to wrap.")
    if inner.nesting_error:
        raise TypeError(f"{type(outer).__name__}: around {short_repr(inner)}, which {inner.nesting_error}")


def subset(leaves: LeavesByPath, paths: Iterable[str]) -> dict[str, Any]:
    """Some of the leaves."""
    return {path: leaves[path] for path in paths}


def _slots_at(slots: Mapping[str, LeavesByPath], path: str) -> dict[str, Any]:
    return {name: slot[path] for name, slot in slots.items() if path in slot}


def _loss_and_grad(
    layout: SlotLayout, loss: Callable[[Any], Any] | None, scale: jax.Array | None
) -> Callable[[LeavesByPath], Any] | None:
    """The loss as a function of some weights by path, with its gradient with respect to these in the compute dtype."""
    if loss is None:
        return None
    tree = layout.tree

    def scaled_loss(weights: LeavesByPath) -> tuple[jax.Array, jax.Array]:
        value = loss(tree.unflatten({**tree.by_path, **weights}))
        return value if scale is None else value * scale.astype(value.dtype), value

    def unscale(path: str, g: jax.Array) -> jax.Array:
        if scale is None:
            return layout.leaves[path].upcast(g)
        wide = at_least_float32(g.dtype)
        return layout.leaves[path].upcast(g.astype(wide) / scale.astype(wide))

    def evaluate(weights: LeavesByPath) -> tuple[jax.Array, dict[str, jax.Array]]:
        cast = {path: cast_like(w, tree.by_path[path]) for path, w in weights.items()}
        (_, value), grads = jax.value_and_grad(scaled_loss, has_aux=True)(cast)
        return value, {path: unscale(path, g) for path, g in grads.items()}

    return evaluate


def _check_devices(tree: FlatTree) -> None:
    """Raise an error if the weights are committed to different devices: no program could update them all."""
    devices = {
        path: leaf.devices()
        for path, leaf in tree.by_path.items()
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
    }
    first = next(iter(devices), None)
    for path, found in devices.items():
        if first is not None and found != devices[first]:
            here, there = (", ".join(sorted(map(str, some))) for some in (devices[first], found))
            raise ValueError(
                f"{tree.owner}: {first} is on {here} and {path} on {there}, but a program runs on one set of devices; "
                "use a separate state for each part: {name: optimizer.init(part) for name, part in w.items()}."
            )


def _check_overrides(optimizer: Optimizer, overrides: Mapping[str, Any]) -> None:
    """Check that each override is a hyperparameter of exactly one type of optimizer in the nest, and in its range."""
    for name, value in overrides.items():
        nested = _nested_optimizers(optimizer)
        owners = _override_owners(optimizer, name)
        if not owners:
            known = sorted({field for one in nested for field in hyperparam_ranges(type(one))})
            raise TypeError(
                f"{short_repr(optimizer)}: update has no hyperparameter {name!r}; it has {', '.join(known) or 'none'}."
            )
        types = {type(one).__name__ for one in owners}
        if len(types) > 1:
            raise TypeError(
                f"{short_repr(optimizer)}: {name!r} is ambiguous: it is a field of {' and of '.join(sorted(types))}; "
                "set that field to a schedule instead."
            )
        check_override(owners[0], name, value)


def _override_owners(optimizer: Optimizer, name: str) -> list[Optimizer]:
    """The optimizers of a nest that an override of this name reaches."""
    own = [optimizer] if name in hyperparam_ranges(type(optimizer)) else []
    if own and optimizer.shadows_overrides:
        return own
    return [*own, *(one for inner in optimizer.inner_optimizers() for one in _override_owners(inner, name))]


def _nested_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    return [optimizer, *(one for inner in optimizer.inner_optimizers() for one in _nested_optimizers(inner))]
