"""Tied: weight tying, where leaves that are equal to others are stored once."""

from dataclasses import KW_ONLY
from typing import Any

from mlax.core._errors import short_repr
from mlax.core._frozen import frozen
from mlax.core._help import Documented
from mlax.core._layer import Layer, Tree, variable_shapes
from mlax.core._paths import flatten_paths, no_match_message, stacked_axes, unflatten_paths
from mlax.core._surgery import find_layers, get, replace
from mlax.core._wrappers import Wrapper


@frozen
class Tie(metaclass=Documented):
    """Ties the trainable at path `leaf` to the one at path `to`, transposed if `transpose`."""

    leaf: str  # the path of the leaf that is not stored
    to: str  # the path of the leaf that it equals
    _: KW_ONLY
    transpose: bool = False  # whether it is transposed


@frozen
class Tied(Wrapper):
    """Compute `layer` with tied weights: `Tied(model, Tie("head/kernel", to="embed/table", transpose=True))`.

    Variables: those of `layer` without the tied leaves. The gradient of a leaf sums over all its uses.

    >>> model = mlax.Series(embed=nn.Embed(100, 16), head=nn.Linear(100, bias=False))
    >>> tied = mlax.Tied(model, mlax.Tie("head/kernel", to="embed/table", transpose=True))
    >>> trainables, _ = tied.init(jax.random.key(0), jnp.zeros((8, 20), "int32"))
    >>> mlax.paths(trainables)
    ('embed/table',)
    """

    ties: tuple[Tie, ...]

    def __init__(self, layer: Layer, *ties: Tie):
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "ties", ties)
        super().__post_init__()
        if not ties:
            raise TypeError("Tied: pass at least one tie: Tied(model, Tie(leaf, to=path)).")
        for tie in ties:
            if not isinstance(tie, Tie):
                raise TypeError(f"Tied: {tie!r} is not an mlax.Tie; pass Tied(model, Tie(leaf, to=path), ...).")
        leaves = [tie.leaf for tie in ties]
        for tie in ties:
            if leaves.count(tie.leaf) > 1:
                raise ValueError(f"Tied: {tie.leaf!r} is tied twice; tie it once.")
            if tie.to in leaves:
                raise ValueError(
                    f"Tied: {tie.leaf!r} is tied to {tie.to!r}, which is tied itself and not stored; tie both to a "
                    "third leaf."
                )

    def init(self, rng, x):
        leaves = flatten_paths(variable_shapes(self.layer, x)[0])
        for tie in self.ties:
            self._check(tie, leaves)
        trainables, non_trainables = self.layer.init(rng, x)
        tied = {tie.leaf for tie in self.ties}
        kept = unflatten_paths((path, leaf) for path, leaf in flatten_paths(trainables).items() if path not in tied)
        return kept, non_trainables

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        untied = self.untie(trainables)
        return self.layer.fwd(x, untied, non_trainables, rng=rng, inference_mode=inference_mode)

    def untie(self, trainables: Tree) -> Tree:
        """The trainables of `layer` itself, in which each tied leaf is the one that it is tied to."""
        leaves = flatten_paths(trainables)
        for tie in self.ties:
            if tie.to not in leaves:
                raise ValueError(f"{short_repr(self)}: trainables lacks the leaf {no_match_message(tie.to, leaves)}")
            leaves[tie.leaf] = _transpose(tie.to, leaves[tie.to]) if tie.transpose else leaves[tie.to]
        return unflatten_paths(leaves.items())

    def _check(self, tie: Tie, leaves: dict[str, Any]) -> None:
        for path in (tie.leaf, tie.to):
            if path not in leaves:
                raise ValueError(f"{short_repr(self)}: the layer has no such leaf: {no_match_message(path, leaves)}")
        axes = stacked_axes(tie.to)
        shape = leaves[tie.to].shape
        shape = (*shape[:axes], *shape[axes:][::-1]) if tie.transpose else shape
        if axes != stacked_axes(tie.leaf):
            raise ValueError(
                f"{short_repr(self)}: {tie.leaf} and {tie.to} are not in the same stack of layers, so their "
                "axes differ in meaning; tie leaves of the same stack, or of none."
            )
        if leaves[tie.leaf].shape != shape:
            raise ValueError(
                f"{short_repr(self)}: {tie.leaf} has the shape {leaves[tie.leaf].shape} but {tie.to} would give "
                f"{shape}; "
                f"pass transpose={not tie.transpose}, or tie leaves of the same shape."
            )

    def _arguments(self) -> list[tuple[str, Any]]:
        return [("", value) for value in (self.layer, *self.ties)]


def _transpose(path: str, leaf: Any) -> Any:
    """The leaf with its axes reversed, those of a stack excepted."""
    stacked = stacked_axes(path)
    return leaf.transpose(*range(stacked), *reversed(range(stacked, leaf.ndim)))


def untie(model: Layer, trainables: Tree) -> Tree:
    """The trainables of a model with every tied leaf in place, as if nothing were tied."""
    for path, tied in reversed(find_layers(model, Tied)):  # the outer ones first
        own = tied.untie(get(trainables, path) if path else trainables)
        trainables = replace(trainables, path, own) if path else own
    return trainables
