"""Composite: a layer made of parts; the author writes the parts and how they are wired."""

import abc
import collections
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import jax
from jax.core import Tracer

from mlax._jax import abstract_key, named_key
from mlax.core._checks import check_is_dict, expect_array
from mlax.core._display import Node
from mlax.core._errors import SURGERY, error_scope, short_repr, signature
from mlax.core._frozen import call_repr, fields_of, frozen, repr_arguments, with_fields
from mlax.core._help import Documented
from mlax.core._layer import (
    CalledDescription,
    Layer,
    Tree,
    cached_by_shape,
    has_layers,
    header,
    jitted_init,
    join_outputs,
    prefix_outputs,
    shape_dtypes,
    split_outputs,
)
from mlax.core._parts import (
    join_parts,
    part_nodes,
    parts_of,
    replace_part,
    split_parts,
    unowned_paths,
    walk_parts,
    wire_access,
)

KEYS = "#rng"  # no part can be called that


class Sub(metaclass=Documented):
    """The parts of a composite, bound to their variables for one call of `wire`: `sub.name(x)` or `sub["name"](x)`.

    Each call passes a part its variables and its key, and collects its new state. Several inputs, `sub.name(x, t)`,
    are passed as the tuple (x, t). A tuple or dict of layers is indexed, `sub.layers[0](x)`, and iterated over,
    `for layer in sub.layers`.

    `sub.inference_mode` is that of the call: False in training. `sub.rng("noise")` is a random (PRNG) key.
    """

    def __init__(
        self,
        composite: "Composite",
        call: Callable[[str, Layer, Any], Any],
        rng: jax.Array | None,
        inference_mode: bool,
        keys: str = KEYS,
        join: Callable[[tuple[str, Layer], tuple[str, Layer], Any], Any] | None = None,
        split: Callable[[str, Layer, Any], Any] | None = None,
    ):
        self._parts = dict(parts_of(composite))
        self._composite = composite
        self._call = call  # of (name, part, x)
        self._rng = rng
        self._keys = keys  # the name from which those of `rng` derive
        self._join = join  # of two parts with their names, and x: the output of one after the other, or None
        self._split = split  # of (name, part, x): the part without the bias that it adds last, and the bias, or None
        self._drawn = collections.Counter[str]()
        self.inference_mode = inference_mode

    def rng(self, name: str = "") -> jax.Array:
        """A random (PRNG) key by name, for noise, masks and samples: `jax.random.normal(sub.rng("noise"), x.shape)`.

        It derives from the key of the composite and the name alone, so that no other name, and no part, changes it or
        has the same. Asking for a name again in one call of `wire` gives a different key. Without `rng=` in the call
        of `fwd`, it raises a ValueError.
        """
        if name == "":
            raise TypeError("sub.rng() needs a name, from which the key derives, such as sub.rng('noise').")
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"sub.rng({name!r}): the name of a key must be an identifier, such as sub.rng('noise').")
        if self._rng is None:
            raise ValueError(
                f"{short_repr(self._composite)}: wire asks for the key sub.rng({name!r}), but rng is None; pass rng= "
                "to fwd, or ask for it only `if not sub.inference_mode`."
            )
        self._drawn[name] += 1
        return named_key(named_key(self._rng, self._keys), number_call(name, self._drawn[name]))

    def take_bias(self, name: str, x: Any) -> jax.Array | None:
        """The bias that a part adds last, for a norm to add; the part leaves it out then. None where that is no faster.

        `x` is like what the part will be called on: `x, y = sub.norm(x, sub.take_bias("linear", x))`, and then
        `x + sub.linear(y)`. See `ops.residual_layer_norm`.
        """
        taken = None if self._split is None else self._split(name, self._parts[name], x)
        if taken is None:
            return None
        self._parts[name], bias = taken
        return bias

    def call_in_turn(self, x: Any, *names: str) -> Any:
        """The output of these parts, each called on the output of the one before it; two at once where that is faster.

        `sub.call_in_turn(x, "up", "down")` is `sub.down(sub.up(x))`.
        """
        while names:
            y = self._call_joined(names[:2], x)
            x = self[names[0]](x) if y is None else y
            names = names[1 if y is None else 2 :]
        return x

    def _call_joined(self, names: tuple[str, ...], x: Any) -> Any | None:
        if self._join is None or len(names) < 2 or not all(name in self._parts for name in names):
            return None
        first, second = ((name, self._parts[name]) for name in names)
        return self._join(first, second, x)

    def __getitem__(self, name: str) -> Any:
        if name in self._parts:
            return functools.partial(self._call_part, name)
        if any(part.startswith(f"{name}/") for part in self._parts):
            return _SubGroup(self, name)
        close = difflib.get_close_matches(name, self._parts, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        names = ", ".join(self._parts) or "none"
        raise AttributeError(f"{short_repr(self._composite)} has no part {name!r}; its parts are {names}.{hint}")

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return (self[name] for name in self._parts)

    def _call_part(self, name: str, /, *inputs: Any, **named: Any) -> Any:
        if named or not inputs:
            call = f"sub.{wire_access(name)}"
            given = f"got {', '.join(named)} by keyword" if named else "got none"
            raise TypeError(f"{call}: {given}, but a part takes its inputs by position: {call}(x), or {call}(x, t).")
        return self._call(name, self._parts[name], inputs[0] if len(inputs) == 1 else inputs)


class _SubGroup:
    """The bound parts of one tuple or dict of layers, in order."""

    def __init__(self, sub: Sub, path: str):
        below = [name.removeprefix(f"{path}/") for name in sub._parts if name.startswith(f"{path}/")]
        self._sub = sub
        self._path = path
        self._keys = list(dict.fromkeys(name.partition("/")[0] for name in below))

    def __getitem__(self, key: int | str) -> Any:
        name = self._keys[key] if isinstance(key, int) and -len(self._keys) <= key < 0 else str(key)
        if name not in self._keys:
            raise LookupError(f"there is no part {self._path}/{name}; {self._path} holds {', '.join(self._keys)}.")
        return self._sub[f"{self._path}/{name}"]

    def __iter__(self) -> Iterator[Any]:
        return (self[key] for key in self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __call__(self, *inputs: Any) -> Any:
        raise TypeError(
            f"sub.{self._path} is a group of {len(self._keys)} parts; call one of them, as "
            f"sub.{wire_access(f'{self._path}/{self._keys[0]}')}(x)."
        )


@frozen
class Composite(Layer):
    """A layer that owns layers: write `wire`, and `parts` unless they are simply the layer-valued fields.

    A field may be a tuple or a dict of layers: the layers of `blocks: tuple[Layer, ...]` are the parts blocks/0,
    blocks/1 and so on, which `wire` calls as `sub.blocks[0](x)`.

    Inside `wire`, `sub.inference_mode` is False in training, and `sub.rng("noise")` is a random (PRNG) key. A `wire`
    with several inputs, `wire(self, sub, x, t)`, takes them from a tuple: `init(rng, (x, t))`, `fwd((x, t), ...)` and,
    where the composite is itself a part, `sub.name(x, t)`. Inputs with a default may be left out, the last ones first.

    Variables: one entry for each part that has any, under the part's name.
    """

    has_dict_fields: ClassVar[bool] = True

    edits: tuple[tuple[str, Layer], ...] = dataclasses.field(default=(), kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "wire" in vars(cls):
            _input_names(vars(cls)["wire"])  # raises for one that cannot be called

    def parts(self) -> Mapping[str, Any]:
        """The parts by name: layers, or tuples and dicts of layers."""
        fields = {name: value for name, value in fields_of(self).items() if name != "edits"}
        return {name: value for name, value in fields.items() if has_layers(value)}

    @abc.abstractmethod
    def wire(self, sub: Sub, *inputs: Any) -> Any:
        """Compute the output from the input, or several, by calling the parts: `sub.name(x)`."""

    def infer_sizes(self, x: Any) -> Self:
        """The composite with its `None` sizes inferred from the input; itself, unless a subclass has such sizes."""
        return self

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        """The same composite with these parts in place of its own of the same names."""
        own, edits = Composite.parts(self), dict(self.edits)
        for path, part in parts.items():
            name, *keys = path.split("/")
            if (name, *keys) in dict(walk_parts((), own)):
                own = {**own, name: replace_part(own[name], keys, part)}
            else:
                edits[path] = part
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
        return join_parts(trainables), join_parts(non_trainables)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        own, state = (split_parts(self, tree) for tree in (trainables, non_trainables))
        calls = collections.Counter[str]()
        outputs: dict[str, Any] = {}

        def call(name: str, part: Layer, x: Any) -> Any:
            with error_scope(name, x):
                calls[name] += 1
                numbered = number_call(name, calls[name])
                key = None if rng is None else named_key(rng, numbered)
                y, new = part.fwd(x, own.get(name), state.get(name), rng=key, inference_mode=inference_mode)
                new, found = split_outputs(new)
                outputs.update(prefix_outputs(numbered, found))
                if new is not None:
                    state[name] = new
                return y

        def join(first: tuple[str, Layer], second: tuple[str, Layer], x: Any) -> Any:
            (name, part), (next_name, following) = first, second
            if state.get(name) is not None or state.get(next_name) is not None:
                return None
            with error_scope(name, x):
                return part.fwd_with_next(x, own.get(name), following, own.get(next_name))

        def split(name: str, part: Layer, x: Any) -> tuple[Layer, jax.Array] | None:
            found = part.split_bias(x, own.get(name), inference_mode)
            if found is None:
                return None
            part, own[name], bias = found
            return part, bias

        composite = self.infer_sizes(x)
        y = _call_wire(composite, Sub(composite, call, rng, inference_mode, join=join, split=split), x)
        return y, join_outputs(join_parts(state), outputs)

    def __repr__(self) -> str:
        own = call_repr(type(self).__name__, repr_arguments(self))
        edits = [(f"{name!r}: ", part) for name, part in getattr(self, "edits", ())]
        return call_repr(f"{own}.with_parts", edits, "({})") if edits else own

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != SURGERY]  # what a completion offers

    def _tree(self, name: str = "") -> Node:
        below = tuple(part_nodes(parts_of(self)))
        return Node(name, header(self, has_below=bool(below)), below)

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        for what, tree in (("trainables", trainables), ("non_trainables", non_trainables)):
            check_is_dict(self, what, tree)
            extra = list(unowned_paths(tree, "", parts_of(self)))
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

        _call_wire(composite, Sub(composite, call, rng, inference_mode), x)

    for inference_mode in (True, False):  # training may need what is not bound yet, such as a mesh axis name
        if len(inputs) < len(parts_of(composite)):
            jax.eval_shape(functools.partial(trace, inference_mode=inference_mode), abstract_key(), x)
    unused = [name for name in parts_of(composite) if name not in inputs]
    if unused:
        raise ValueError(
            f"{short_repr(composite)}: wire never calls {', '.join(map(repr, unused))}; call it as "
            f"sub.{wire_access(unused[0])}(x), or leave it out of the parts."
        )
    return inputs


def _call_wire(composite: Composite, sub: Sub, x: Any) -> Any:
    """The output of `wire`, which must be an output alone, from parts called through `sub`."""
    try:
        with expect_array(composite, x):
            y = composite.wire(sub, *_unpack_inputs(composite, x))
    except CalledDescription as error:
        own = [keys for keys, part in walk_parts((), Composite.parts(composite)) if part is error.layer]
        if own:
            part = wire_access("/".join(own[0]))
            raise TypeError(
                f"{type(composite).__name__}: wire calls self.{part}(x), which is a description; write sub.{part}(x)."
            ) from None
        raise
    except TypeError as error:
        if "PRNG key" in str(error) and "method" in str(error):
            error.add_note("sub.rng is a method: write sub.rng('noise') for a key.")
        raise
    except AttributeError as error:
        if error.obj is composite and error.name in parts_of(composite):
            name = type(composite).__name__
            raise AttributeError(f"{name}: wire reads self.{error.name}; write sub.{error.name}(x).") from None
        raise
    if y is None or (isinstance(y, tuple) and len(y) == 2 and y[1] is None):
        advice = "`sub` collects the state, so return y alone" if y is not None else "return the output"
        raise TypeError(f"{short_repr(composite)}: wire returned {signature(y)}; {advice}.")
    return y


def _unpack_inputs(composite: Composite, x: Any) -> tuple[Any, ...]:
    """The arguments of `wire` after `sub`: the input itself, or the entries of the tuple if `wire` takes several."""
    names, required = _input_names(type(composite).wire)
    if len(names) == 1 and not names[0].startswith("*"):
        return (x,)
    inputs = x if isinstance(x, tuple) else (x,)
    if required <= len(inputs) and (len(inputs) <= len(names) or names[-1].startswith("*")):
        return inputs
    got = f"a {type(x).__name__}" if isinstance(x, list | dict) else signature(x)
    wanted = ", ".join(names)
    raise TypeError(
        f"{short_repr(composite)}: the input is {got}, but wire(self, sub, {wanted}) takes the tuple ({wanted}): write "
        f"fwd(({wanted}), ...), or sub.name({wanted}) inside the wire of another composite."
    )


@functools.cache
def _input_names(wire: Callable[..., Any]) -> tuple[tuple[str, ...], int]:
    """The names of the inputs that `wire` takes, a starred one last, and how many of them have no default."""
    parameters = list(inspect.signature(wire).parameters.values())[2:]  # without self and sub
    keyword = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    inputs = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    starred = [f"*{each.name}" for each in parameters if each.kind is each.VAR_POSITIONAL]
    names = [*(each.name for each in inputs), *starred]
    if keyword or not names:
        wanted = ", ".join([*names, *keyword]) or "x"
        raise TypeError(
            f"{wire.__qualname__}{inspect.signature(wire)}: inputs are passed by position; write "
            f"wire(self, sub, {wanted})."
        )
    return tuple(names), sum(each.default is each.empty for each in inputs)


def number_call(name: str, number: int) -> str:
    """The name of the first, second, third call of a part in one call of `wire`: name, name#2, name#3."""
    return name if number == 1 else f"{name}#{number}"
