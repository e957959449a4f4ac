"""Composite: a layer made of parts; the author writes the parts and how they are wired."""

import abc
import collections
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
from jax.core import Tracer

from mlax._jax import abstract_key, name_hash, named_key
from mlax.core._checks import check_is_dict
from mlax.core._errors import error_scope, short_repr, signature
from mlax.core._frozen import fields_of, frozen, with_fields
from mlax.core._layer import Layer, Tree, cached_by_shape, header, jitted_init, shape_dtypes


class Sub:
    """The parts of a composite, bound to their variables for one call of `wire`: `sub.name(x)` or `sub["name"](x)`.

    Each call passes a part its variables and its key, and collects its new state.
    """

    def __init__(self, composite: "Composite", call: Callable[[str, Layer, Any], Any], inference_mode: bool):
        self._parts = parts_of(composite)
        self._composite = composite
        self._call = call  # of (name, part, x)
        self.inference_mode = inference_mode

    def __getitem__(self, name: str) -> Callable[[Any], Any]:
        if name not in self._parts:
            close = difflib.get_close_matches(name, self._parts, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            names = ", ".join(self._parts) or "none"
            raise AttributeError(f"{short_repr(self._composite)} has no part {name!r}; its parts are {names}.{hint}")
        return functools.partial(self._call, name, self._parts[name])

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return self[name]

    def __iter__(self) -> Iterator[Callable[[Any], Any]]:
        return (self[name] for name in self._parts)


@frozen
class Composite(Layer):
    """A layer that owns layers: write `wire`, and `parts` unless they are simply the layer-valued fields.

    Variables: one entry for each part that has any, under the part's name. `edits` holds the parts that
    surgery has put in place of the author's.
    """

    edits: tuple[tuple[str, Layer], ...] = dataclasses.field(default=(), kw_only=True)

    def parts(self) -> Mapping[str, Layer]:
        """The parts by name."""
        return {name: value for name, value in fields_of(self).items() if isinstance(value, Layer)}

    @abc.abstractmethod
    def wire(self, sub: Sub, x: Any) -> Any:
        """Compute the output from the input by calling the parts: `sub.name(x)`."""

    def infer_sizes(self, x: Any) -> Self:
        """The composite with its `None` sizes inferred from the input; itself, unless a subclass has such sizes."""
        return self

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        """The same composite with these parts in place of its own of the same names."""
        own = {name: part for name, part in parts.items() if isinstance(fields_of(self).get(name), Layer)}
        edits = {**dict(self.edits), **{name: part for name, part in parts.items() if name not in own}}
        return with_fields(self, **own, edits=tuple(edits.items()))

    def init(self, rng, x):
        composite, inputs = self.infer_sizes(x), part_inputs(self, x)
        trainables, non_trainables = {}, {}
        for name, part in parts_of(composite).items():
            with error_scope(name, inputs[name]):
                key = named_key(rng, name)
                traced = isinstance(rng, Tracer)
                made = jitted_init(part, inputs[name])(key) if traced else part.init(key, inputs[name])
                trainables[name], non_trainables[name] = made
        return _drop_empty(trainables), _drop_empty(non_trainables)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state = dict(non_trainables or {})
        calls = collections.Counter[str]()

        def call(name: str, part: Layer, x: Any) -> Any:
            with error_scope(name, x):
                calls[name] += 1
                key = None if rng is None else named_key(rng, name if calls[name] == 1 else f"{name}#{calls[name]}")
                own = (trainables or {}).get(name)
                y, new = part.fwd(x, own, state.get(name), rng=key, inference_mode=inference_mode)
                if new is not None:
                    state[name] = new
                return y

        composite = self.infer_sizes(x)
        return composite.wire(Sub(composite, call, inference_mode), x), _drop_empty(state)

    def tree_lines(self) -> list[str]:
        lines = [header(self)]
        for name, part in parts_of(self).items():
            first, *rest = part.tree_lines()
            lines += [f"  {name}: {first}", *(f"  {line}" for line in rest)]
        return lines

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        for what, tree in (("trainables", trainables), ("non_trainables", non_trainables)):
            check_is_dict(self, what, tree)
            extra = [name for name in tree or {} if name not in parts_of(self)]
            if extra:
                raise ValueError(
                    f"{short_repr(self)}: {what} has extra {', '.join(map(repr, extra))}; the parts are "
                    f"{', '.join(parts_of(self))}. Pass what init returned for this layer."
                )


@cached_by_shape
def part_inputs(composite: Composite, x: Any) -> dict[str, Any]:
    """The shapes and dtypes that each part is called on when the composite is called on inputs like `x`.

    `wire` is traced by `jax.eval_shape`, so nothing is allocated.
    """
    composite = composite.infer_sizes(x)
    inputs: dict[str, Any] = {}
    variables: dict[str, Any] = {}

    def trace(rng: jax.Array, x: Any, inference_mode: bool) -> None:
        def call(name: str, part: Layer, x: Any) -> Any:
            with error_scope(name, x):
                made = jitted_init(part, x)(rng)  # jitted, so that JAX traces equal parts once
                if shape_dtypes(made) != variables.setdefault(name, shape_dtypes(made)):
                    raise ValueError(
                        f"{short_repr(composite)}: part {name!r} is called on {signature(inputs[name])} and on "
                        f"{signature(x)}, which need different variables; make it two parts."
                    )
                inputs.setdefault(name, shape_dtypes(x))
                fwd = jax.jit(part.fwd, static_argnames="inference_mode")
                return fwd(x, *made, rng=rng, inference_mode=inference_mode)[0]

        composite.wire(Sub(composite, call, inference_mode), x)

    for inference_mode in (True, False):  # training may need what is not bound yet, such as a mesh axis name
        if len(inputs) < len(parts_of(composite)):
            jax.eval_shape(functools.partial(trace, inference_mode=inference_mode), abstract_key(), x)
    unused = [name for name in parts_of(composite) if name not in inputs]
    if unused:
        raise ValueError(
            f"{short_repr(composite)}: wire never calls {', '.join(map(repr, unused))}; call it as "
            f"sub.{unused[0]}(x), or leave it out of the parts."
        )
    return inputs


@functools.lru_cache(maxsize=4096)
def parts_of(composite: Composite) -> Mapping[str, Layer]:
    """The parts of a composite, edits included, checked once for each distinct description."""
    parts = {**composite.parts(), **dict(composite.edits)}
    for name, part in parts.items():
        if not name.isidentifier() or name.startswith("_") or name == "inference_mode":
            raise ValueError(
                f"{short_repr(composite)}: {name!r} cannot name a part; use an identifier without a leading "
                "underscore, other than inference_mode, since `wire` calls it as sub.name."
            )
        check_layer(short_repr(composite), f"part {name!r}", part)
    hashes = {name_hash(name): name for name in parts}
    for name in parts:
        if hashes[name_hash(name)] != name:  # by which `named_key` derives their keys
            raise ValueError(
                f"{short_repr(composite)}: the names {name!r} and {hashes[name_hash(name)]!r} have the same hash, so "
                "both parts would be initialized from the same key; rename one."
            )
    return parts


def check_layer(owner: str, what: str, part: Any) -> None:
    """Raise a TypeError unless `part` is a layer, and say how to make one of it."""
    if isinstance(part, Layer):
        return
    name = getattr(part, "__name__", None)
    got, advice = f"a {type(part).__name__}", "pass a layer."
    if isinstance(part, type) and issubclass(part, Layer):
        given = "..." if any(each.default is each.empty for each in inspect.signature(part).parameters.values()) else ""
        got, advice = f"the class {name}", f"did you mean {name}({given})?"
    elif callable(part):
        got, advice = f"the function {name}" if name else got, f"wrap it: mlax.F({name or '...'})."
    elif isinstance(part, list | tuple | dict):
        stars = "**" if isinstance(part, dict) else "*"
        advice = f"pass the layers themselves: mlax.Series({stars}layers)."
    raise TypeError(f"{owner}: {what} is {got}, which is not a layer; {advice}")


def _drop_empty(variables: dict[str, Tree]) -> Tree:
    return {name: tree for name, tree in variables.items() if tree is not None} or None
