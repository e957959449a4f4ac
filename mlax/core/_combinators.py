"""F, Series, Parallel, Residual: layers from functions and from other layers."""

import collections
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any, Self

import jax

from mlax.core._composite import Composite, Sub
from mlax.core._display import Node, function_name
from mlax.core._errors import is_like_first, short_repr, signature, wrong_instance_message
from mlax.core._frozen import frozen, with_fields
from mlax.core._initializers import Initializer
from mlax.core._layer import Layer
from mlax.core._parts import check_layer

LayerLike = Layer | Callable[..., Any]  # a plain function is wrapped as F


@frozen
class F(Layer):
    """A function as a layer, without variables: `F(jax.nn.relu)`.

    A function with a parameter named `rng` or `inference_mode` is passed it by keyword. Functions are equal only
    if they are the same object: define a function once rather than a new lambda in each description.
    """

    function: Callable[..., Any]  # of the input, and of rng and inference_mode if it has such parameters

    def __post_init__(self) -> None:
        if isinstance(self.function, Layer):
            raise TypeError(f"F: {short_repr(self.function)} is already a layer; use it without F.")
        if isinstance(self.function, type) and hasattr(self.function, "__dataclass_fields__"):
            raise TypeError(wrong_instance_message("F", "function", self.function, Layer))
        if isinstance(self.function, Initializer):
            raise TypeError(
                f"F: {self.function!r} is an initializer, not a function of the input; for a layer that returns its "
                "input, write mlax.Series()."
            )
        if not callable(self.function):
            raise TypeError(f"F: {self.function!r} is not a function; F takes a function of the input.")

    def init(self, rng, x):
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        offered = {"rng": rng, "inference_mode": inference_mode}
        given = {name: value for name, value in offered.items() if name in _parameters(self.function)}
        if rng is None and "rng" in given and "inference_mode" not in given:
            raise ValueError(f"{short_repr(self)}: the function takes a key, but rng is None; pass rng= to fwd.")
        return self.function(x, **given), non_trainables

    def _tree(self, name: str = "") -> Node:
        return Node(name, function_name(self.function))


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return set()


@frozen
class Series(Composite):
    """Apply layers sequentially: `Series(nn.Linear(64), jax.nn.relu, head=nn.Linear(10))`.

    A layer passed by keyword is a part of that name; the others are named by their class and index, `linear_0`,
    `linear_1`. Name the parts of a model that will be edited, since inserting a layer renumbers them. A plain
    function is wrapped as `F`.

    >>> model, x = mlax.Series(nn.Linear(64), jax.nn.relu, head=nn.Linear(10)), jnp.ones((8, 16))
    >>> trainables, non_trainables = model.init(jax.random.key(0), x)
    >>> model.fwd(x, trainables, non_trainables)[0].shape
    (8, 10)
    """

    named: tuple[tuple[str, Layer], ...]

    def __init__(self, *layers: LayerLike, **named: LayerLike):
        object.__setattr__(self, "named", _name_parts(type(self).__name__, layers, named))

    def parts(self) -> Mapping[str, Layer]:
        return dict(self.named)

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        return with_fields(self, named=tuple({**self.parts(), **parts}.items()))

    def wire(self, sub: Sub, x: Any) -> Any:
        return sub.call_in_turn(x, *self.parts())

    def _arguments(self) -> list[tuple[str, Any]]:
        return [(f"{name}=", part) for name, part in self.named]


@frozen
class Parallel(Composite):
    """Apply each layer to the same input, and return the tuple of their outputs. Takes and names parts like Series.

    >>> model, x = mlax.Parallel(mean=nn.Linear(4), variance=nn.Linear(4)), jnp.ones((8, 16))
    >>> trainables, non_trainables = model.init(jax.random.key(0), x)
    >>> (mean, variance), non_trainables = model.fwd(x, trainables, non_trainables)
    """

    named: tuple[tuple[str, Layer], ...]

    def __init__(self, *layers: LayerLike, **named: LayerLike):
        if not layers and not named:
            raise TypeError(
                "Parallel: pass at least one layer; for a layer that returns its input, write mlax.Series()."
            )
        object.__setattr__(self, "named", _name_parts(type(self).__name__, layers, named))

    def parts(self) -> Mapping[str, Layer]:
        return dict(self.named)

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        return with_fields(self, named=tuple({**self.parts(), **parts}.items()))

    def wire(self, sub: Sub, x: Any) -> tuple[Any, ...]:
        return tuple(part(x) for part in sub)

    def _arguments(self) -> list[tuple[str, Any]]:
        return [(f"{name}=", part) for name, part in self.named]


@frozen
class Residual(Composite):
    """A residual (skip) connection: `layer(x) + x`, or `layer(x) + shortcut(x)` if there is a shortcut.

    Of several inputs, (x, t), the layer takes all, and its output is added to the first: `layer(x, t) + x`. A plain
    function is wrapped as `F`.

    >>> block = mlax.Residual(mlax.Series(nn.LayerNorm(), nn.MLP((64, 16))))
    >>> projected = mlax.Residual(nn.Conv(32, 3, strides=2), shortcut=nn.Conv(32, 1, strides=2))
    """

    layer: LayerLike  # a layer or a function
    _: KW_ONLY
    shortcut: LayerLike | None = None  # what the input passes through; None: nothing

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", _as_layer("Residual", "layer", self.layer))
        if self.shortcut is not None:
            object.__setattr__(self, "shortcut", _as_layer("Residual", "shortcut", self.shortcut))

    def wire(self, sub: Sub, x: Any) -> Any:
        y = sub.layer(x)
        if self.shortcut is not None:
            x = sub.shortcut(x)
        elif is_like_first(y, x):
            x = x[0]
        if signature(x) != signature(y):
            raise ValueError(
                f"{short_repr(self)}: the output is {signature(y)} but is added to {signature(x)}; "
                "pass a shortcut layer that maps the input to the same shape and dtype."
            )
        return jax.tree.map(lambda a, b: a + b, x, y)


def _as_layer(owner: str, what: str, part: Any) -> Any:
    if callable(part) and not isinstance(part, Layer | type):
        return F(part)
    check_layer(owner, what, part)
    return part


def _name_parts(
    owner: str, layers: tuple[LayerLike, ...], named: dict[str, LayerLike]
) -> tuple[tuple[str, Layer], ...]:
    indices = collections.Counter[str]()
    parts: dict[str, Layer] = {}
    for index, each in enumerate(layers):
        layer = _as_layer(owner, f"layer {index}", each)
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(layer).__name__).lower()
        parts[f"{kind}_{indices[kind]}"] = layer
        indices[kind] += 1
    for name, each in named.items():
        if name in parts:
            raise ValueError(f"{owner}: two parts are named {name!r}; rename one.")
        parts[name] = _as_layer(owner, name, each)
    return tuple(parts.items())
