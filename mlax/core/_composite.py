"""Composite: a layer made of parts; the author says which parts and how they are wired."""

import abc
import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Self

import jax
from jax.core import Tracer

from mlax.core._checks import refuse_other_than_dict
from mlax.core._frozen import fields_of, frozen, with_fields
from mlax.core._keys import named_key
from mlax.core._layer import Layer, Tree, cached_by_shape, init_for, structs
from mlax.core._notes import brief, located, signature
from mlax.core._parts import Sub, parts_of
from mlax.core._shape_key import shape_key


@frozen
class Composite(Layer):
    """A layer that owns layers: write `wire`, and `parts` if they are not simply the layer-valued fields.

    Variables: one entry for each part that has any, under the part's name. `edits` holds the parts that
    surgery has put in place of the author's own.
    """

    edits: tuple[tuple[str, Layer], ...] = dataclasses.field(default=(), kw_only=True)

    def parts(self) -> Mapping[str, Layer]:
        """The parts by name."""
        return {name: value for name, value in fields_of(self).items() if isinstance(value, Layer)}

    @abc.abstractmethod
    def wire(self, sub: Sub, x: Any) -> Any:
        """Compute the output from the input by calling the parts: `sub.name(x)`."""

    def sized(self, x: Any) -> Self:
        """The same composite with what it reads off its input filled in; itself, unless it reads anything."""
        return self

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        """The same composite with these parts in place of its own of the same names."""
        own = {name: part for name, part in parts.items() if isinstance(fields_of(self).get(name), Layer)}
        edits = {**dict(self.edits), **{name: part for name, part in parts.items() if name not in own}}
        return with_fields(self, **own, edits=tuple(edits.items()))

    def init(self, rng, x):
        sized, inputs = self.sized(x), part_inputs(self, x)
        trainables, non_trainables = {}, {}
        for name, part in parts_of(sized).items():
            with located(name, inputs[name]):
                key = named_key(rng, name)
                traced = isinstance(rng, Tracer)
                made = init_for(part, inputs[name])(key) if traced else part.init(key, inputs[name])
                trainables[name], non_trainables[name] = made
        return _present(trainables), _present(non_trainables)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state = dict(non_trainables or {})
        calls = collections.Counter[str]()

        def call(name: str, part: Layer, x: Any) -> Any:
            calls[name] += 1
            key = None if rng is None else named_key(rng, name if calls[name] == 1 else f"{name}#{calls[name]}")
            y, new = part.fwd(x, (trainables or {}).get(name), state.get(name), rng=key, inference_mode=inference_mode)
            if new is not None:
                state[name] = new
            return y

        sized = self.sized(x)
        return sized.wire(Sub(sized, call, inference_mode), x), _present(state)

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        for what, tree in (("trainables", trainables), ("non_trainables", non_trainables)):
            refuse_other_than_dict(self, what, tree)
            extra = [name for name in tree or {} if name not in parts_of(self)]
            if extra:
                raise ValueError(
                    f"{brief(self)}: {what} has extra {', '.join(map(repr, extra))}; the parts are "
                    f"{', '.join(parts_of(self))}. Pass what init returned for this layer."
                )


@cached_by_shape
def part_inputs(composite: Composite, x: Any) -> dict[str, Any]:
    """What each part is called on when the composite is called on inputs like `x`; nothing is allocated."""
    composite = composite.sized(x)
    inputs: dict[str, Any] = {}
    variables: dict[str, Any] = {}

    def trace(rng: jax.Array, x: Any, inference_mode: bool) -> None:
        def call(name: str, part: Layer, x: Any) -> Any:
            # jit, so that JAX traces equal parts once
            made = init_for(part, x)(rng)
            if structs(made) != variables.setdefault(name, structs(made)):
                raise ValueError(
                    f"{brief(composite)}: part {name!r} is called on {signature(inputs[name])} and on {signature(x)}, "
                    "which need different variables; make it two parts."
                )
            inputs.setdefault(name, structs(x))
            fwd = jax.jit(part.fwd, static_argnames="inference_mode")
            return fwd(x, *made, rng=rng, inference_mode=inference_mode)[0]

        composite.wire(Sub(composite, call, inference_mode), x)

    for inference_mode in (True, False):  # training may need what is not there yet, such as the name of a mesh axis
        if len(inputs) < len(parts_of(composite)):
            jax.eval_shape(functools.partial(trace, inference_mode=inference_mode), shape_key(), x)
    never = [name for name in parts_of(composite) if name not in inputs]
    if never:
        raise ValueError(
            f"{brief(composite)}: wire never calls {', '.join(map(repr, never))}; call it as sub.{never[0]}(x), "
            "or leave it out of the parts."
        )
    return inputs


def _present(variables: dict[str, Tree]) -> Tree:
    return {name: tree for name, tree in variables.items() if tree is not None} or None
