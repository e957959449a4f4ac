"""Groups, Freeze, Rates and LayerwiseRates: different updates for different leaves."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from mlax.core import NoMatch, as_patterns, frozen, matches, short_repr, stacked_axes, with_fields
from mlax.optim._base import Optimizer, StepResult, check_wrappable, subset
from mlax.optim._hyperparams import Patterns, Range, matches_any
from mlax.optim._optax import FromOptax
from mlax.optim._slots import unused_name
from mlax.optim._wrappers import OptimizerWrapper


@frozen
class Groups(Optimizer):
    """Parameter groups: update each leaf by the optimizer of the first pattern, or tuple of patterns, that matches.

    `train.step` reports the learning rate of each group, as `rate/head` for the pattern "head/**" and `rate` for "**".
    A slot has one tree for all leaves, empty where the optimizer of a leaf does not have it. If the second group has a
    scalar of the same name as the first, it is stored as `name_1`, and so on. A group that gets no leaf is an error.

    >>> optimizer = optim.Groups(("**/table", optim.SGD(0.1)), ("**", optim.AdamW(3e-4)))
    >>> optimizer.init({"embed": {"table": jnp.ones((9, 4))}, "head": {"kernel": jnp.ones((4, 9))}})._fields
    ('step', 'mean', 'square')
    """

    groups: tuple[tuple[Patterns, Optimizer], ...]  # of channels

    def __init__(self, *groups: tuple[Patterns, Optimizer]):
        object.__setattr__(self, "groups", groups)
        self.__post_init__()

    def __post_init__(self):
        for group in self.groups:
            if not (isinstance(group, tuple) and len(group) == 2 and isinstance(group[1], Optimizer)) or not all(
                isinstance(pattern, str) for pattern in as_patterns(group[0])
            ):
                raise TypeError(
                    f'Groups: {group!r} is not a pair of a pattern and an optimizer; pass ("**/kernel", Adam(1e-3)).'
                )
            check_wrappable(self, group[1])

    def inner_optimizers(self):
        return tuple(optimizer for _, optimizer in self.groups)

    def patterns(self):
        inner = (pattern for optimizer in self.inner_optimizers() for pattern in optimizer.patterns())
        return (*(pattern for patterns, _ in self.groups for pattern in as_patterns(patterns)), *inner)

    def check_paths(self, paths):
        super().check_paths(paths)
        used = {self._group_index(path) for path in paths}
        for index, (patterns, optimizer) in enumerate(self.groups):
            if index not in used:
                raise NoMatch(
                    f"Groups: no leaf is left for ({patterns!r}, {short_repr(optimizer)}), since those before it "
                    "match all of its leaves; put it before them, or remove it."
                )

    def slots(self, path, w):
        return self._optimizer_of(path).slots(path, w)

    def policy(self, path):
        return self._optimizer_of(path).policy(path)

    def scalars(self):
        return {stored: start for names in self._scalar_names() for stored, start in names.values()}

    def update_leaves(self, context, grads, weights, slots):
        context = dataclasses.replace(context, shared_step=True)
        new: dict[str, Any] = {}
        new_slots = {name: dict(slot) if isinstance(slot, Mapping) else slot for name, slot in slots.items()}
        for index, optimizer in enumerate(self.inner_optimizers()):
            paths = [path for path in grads if self._group_index(path) == index]
            names = {name: stored for name, (stored, _) in self._scalar_names()[index].items()}
            own = {name: slot for name, slot in slots.items() if isinstance(slot, Mapping) or name == "step"}
            own |= {name: slots[stored] for name, stored in names.items()}
            group_new, group_slots = optimizer.update_leaves(context, subset(grads, paths), subset(weights, paths), own)
            new |= group_new
            for name, slot in group_slots.items():
                if isinstance(slot, Mapping):
                    new_slots.setdefault(name, {}).update(slot)  # a group without leaves may return new names
                else:
                    new_slots[names.get(name, name)] = slot
        return StepResult(new, new_slots)

    def is_frozen(self, path):
        return self._optimizer_of(path).is_frozen(path)

    def estimate_leaf(self, step, path, g, slots, examples):
        return self._optimizer_of(path).estimate_leaf(step, path, g, slots, examples)

    def learning_rates(self, context, before, after):
        rates: dict[str, Any] = {}
        for index, ((patterns, optimizer), names) in enumerate(zip(self.groups, self._scalar_names(), strict=True)):
            own = [{name: scalars[stored] for name, (stored, _) in names.items()} for scalars in (before, after)]
            for name, rate in optimizer.learning_rates(context, *own).items():
                rates[unused_name(_name_rate(name, patterns), rates, index)] = rate
        return rates

    def is_chunkable(self, path):
        return self._optimizer_of(path).is_chunkable(path)

    def is_bounded(self, path):
        return self._optimizer_of(path).is_bounded(path)

    def eval_weights(self, path, w, slots, step):
        return self._optimizer_of(path).eval_weights(path, w, slots, step)

    def average_weight(self, context, path):
        own = [optimizer for patterns, optimizer in self.groups if matches(patterns, path)][:1]
        # patterns such as **/kernel need not match the path of a statistic
        found = (optimizer.average_weight(context, path) for optimizer in own or self.inner_optimizers())
        return next((weight for weight in found if weight is not None), None)

    def _optimizer_of(self, path: str) -> Optimizer:
        return self.groups[self._group_index(path)][1]

    def _group_index(self, path: str) -> int:
        for index, (patterns, _) in enumerate(self.groups):
            if matches(patterns, path):
                return index
        raise NoMatch(f'Groups: no pattern matches {path!r}; end with a group for the rest, ("**", ...).')

    def _scalar_names(self) -> list[dict[str, tuple[str, float | int]]]:
        """For each group, the names of its scalars to their names in the state and their initial values."""
        used: set[str] = set()
        groups = []
        for index, optimizer in enumerate(self.inner_optimizers()):
            names = {name: (unused_name(name, used, index), start) for name, start in optimizer.scalars().items()}
            used |= {stored for stored, _ in names.values()}
            groups.append(names)
        return groups

    def __repr__(self) -> str:
        return f"Groups({', '.join(map(repr, self.groups))})"


def _name_rate(name: str, patterns: str | tuple[str, ...]) -> str:
    """The metric name of a group's rate: with its first pattern, without wildcards, after `rate`."""
    first = next((pattern for pattern in as_patterns(patterns) if not pattern.startswith("!")), "")
    words = filter(None, first.replace("*", "").split("/"))
    return "/".join(("rate", *words)) + name.removeprefix("rate")


@frozen
class Freeze(OptimizerWrapper):
    """Freeze the leaves that match `frozen`: they stay bitwise unchanged. `"!**/lora/*"` freezes all others.

    They have no slots, their gradients count in no norm, and `update` does not need these: differentiate the others
    only, as `train.step` does.

    >>> optimizer = optim.Freeze(optim.AdamW(3e-4), frozen=("embed/**",))
    >>> optimizer.init({"embed": {"table": jnp.ones((9, 4))}, "head": {"kernel": jnp.ones((4, 9))}})._fields
    ('step', 'mean', 'square')
    """

    frozen: Patterns = ()  # patterns of the leaves that do not change

    elementwise = True
    keeps_bounds = True

    def patterns(self):
        return (*self.frozen, *self.optimizer.patterns())

    def is_frozen(self, path):
        return matches(self.frozen, path) or super().is_frozen(path)


def train_only(optimizer: Optimizer, trained: tuple[str, ...]) -> Optimizer:
    """The optimizer with all leaves frozen but those that match the patterns."""
    if isinstance(optimizer, FromOptax):
        return with_fields(optimizer, trained=trained)
    excluded = tuple(pattern.removeprefix("!") for pattern in trained if pattern.startswith("!"))
    others = tuple(f"!{pattern}" for pattern in trained if not pattern.startswith("!"))
    for patterns in filter(None, (others, excluded)):
        optimizer = Freeze(optimizer, patterns)
    return optimizer


@frozen
class Rates(OptimizerWrapper):
    """Learning rates of parameter groups: multiply that of each leaf by the factor of the first matching pattern.

    >>> optimizer = optim.Rates(optim.AdamW(3e-4), factors=(("**/table", 0.1),))
    >>> optimizer.init({"embed": {"table": jnp.ones((9, 4))}, "head": {"kernel": jnp.ones((4, 9))}})._fields
    ('step', 'mean', 'square')
    """

    elementwise = True
    keeps_bounds = True
    factors: tuple[tuple[str, float], ...] = ()  # (pattern, factor) pairs; the first match counts

    def __post_init__(self):
        super().__post_init__()
        for pair in self.factors:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and _is_factor(pair[1])):
                raise TypeError(
                    f"Rates: {pair!r} is not a pair of a pattern and a factor of at least 0; pass pairs, such as "
                    "(('**/bias', 0.1),)."
                )

    def patterns(self):
        return (*(pattern for pattern, _ in self.factors), *self.optimizer.patterns())

    def update_leaves(self, context, grads, weights, slots):
        factors = {path: self._factor(path) for path in grads}
        context = context.scale_rates({path: factor for path, factor in factors.items() if factor is not None})
        return self.optimizer.update_leaves(context, grads, weights, slots)

    def _factor(self, path: str) -> float | None:
        return next((factor for pattern, factor in self.factors if matches(pattern, path)), None)


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value in Range()


@frozen
class LayerwiseRates(OptimizerWrapper):
    """Layer-wise learning rate decay: the last layer has the full rate, each layer before it `factor` times that of the
    next.

    `layers` are patterns in order from the input. One that is `stacked` counts as many layers as the first axis of its
    leaves: None means those all of whose leaves are in a stack, as in `Repeat` (`mlax.stacked_axes`); name those of
    `layers` that were stacked by hand, or pass () for experts, which are not in sequence.
    https://arxiv.org/abs/2106.08254

    >>> blocks = tuple(f"blocks/{i}/**" for i in range(12))
    >>> optimizer = optim.LayerwiseRates(optim.AdamW(3e-4), layers=("embed/**", *blocks, "head/**"), factor=0.75)
    """

    layers: Patterns  # patterns, from the input to the output
    factor: Annotated[float, Range()] = 0.75  # of the rate, from layer to layer
    stacked: Patterns | None = dataclasses.field(default=None, kw_only=True)  # those that are stacks; None: by path

    def __post_init__(self):
        super().__post_init__()
        unknown = set(self.stacked or ()) - set(self.layers)
        if unknown:
            raise ValueError(f"LayerwiseRates: {min(unknown)!r} is stacked, but is not one of the layers.")

    def patterns(self):
        return (*self.layers, *self.optimizer.patterns())

    def is_chunkable(self, path):
        # a chunk does not know which layers it has
        stacked = bool(stacked_axes(path)) if self.stacked is None else matches_any(self.stacked, path)
        return not stacked and self.optimizer.is_chunkable(path)

    def update_leaves(self, context, grads, weights, slots):
        context = context.scale_rates(self.factors({path: g.shape for path, g in grads.items()}))
        return self.optimizer.update_leaves(context, grads, weights, slots)

    def factors(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        """The factor of each leaf: a number or, if it is stacked, an array that broadcasts along its first axis."""
        above, factors = 0, {}
        for pattern in reversed(self.layers):
            own = {path: shape for path, shape in shapes.items() if matches(pattern, path)}
            depth = self._depth(pattern, own)
            for path, shape in own.items():
                factors[path] = self.factor**above
                if depth is not None:
                    each = self.factor ** (above + np.arange(depth)[::-1])
                    factors[path] = each.reshape(-1, *[1] * (len(shape) - 1))
            above += 1 if depth is None else depth
        return factors

    def _depth(self, pattern: str, shapes: dict[str, tuple[int, ...]]) -> int | None:
        """The number of layers along the first axis of these leaves; None if they are not stacked."""
        stacked = bool(shapes) and all(map(stacked_axes, shapes)) if self.stacked is None else pattern in self.stacked
        if not stacked:
            return None
        depths = {shape[0] if shape else 0 for shape in shapes.values()}
        if len(depths) > 1:
            raise ValueError(
                f"LayerwiseRates: the leaves of {pattern!r} have first axes of {sorted(depths)}, so they are not one "
                "stack of layers; give each stack a separate pattern."
            )
        return depths.pop() if depths else None
