"""Bidirectional and stacked recurrent layers."""

from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp

from mlax.core import (
    Composite,
    Layer,
    Recurrent,
    Sub,
    check_layer,
    frozen,
    short_repr,
    signature,
    unpack_sequence,
    with_fields,
)


@frozen
class Bidirectional(Composite):
    """A bidirectional recurrent layer: `forward` and `backward` read x from opposite ends; outputs are concatenated.

    x (b, t, ...) to y (b, t, ..., forward's width + backward's), in the dtype of x. `backward` is a `Recurrent`
    with `reverse=True`. Both take the carry, or the lengths, or neither: the input is then like theirs, (x, lengths)
    for example, but with a pair of carries, and the output (carries, y).

    >>> forward, backward = mlax.Recurrent(nn.GRUCell(32)), mlax.Recurrent(nn.GRUCell(32), reverse=True)
    >>> layer, x = nn.Bidirectional(forward, backward), jnp.ones((8, 20, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 64)
    """

    forward: Recurrent  # from the first time step
    backward: Recurrent  # from the last time step

    def __post_init__(self):
        for name, part, reverse in (("forward", self.forward, False), ("backward", self.backward, True)):
            if not isinstance(part, Recurrent) or part.reverse is not reverse:
                raise ValueError(f"Bidirectional: {name} is {part!r}, but must be a Recurrent with reverse={reverse}.")
        for field in ("axis", "carry", "lengths"):
            if getattr(self.forward, field) != getattr(self.backward, field):
                raise ValueError(f"Bidirectional: forward and backward differ in `{field}`; set it equally on both.")

    @property
    def carry(self) -> bool:
        """Whether the input holds a pair of carries."""
        return self.forward.carry

    @property
    def lengths(self) -> bool:
        """Whether the input holds lengths."""
        return self.forward.lengths

    def wire(self, sub: Sub, x: Any) -> Any:
        carries, _, _ = unpack_sequence(self, x)
        if not self.carry:
            return jnp.concatenate([sub.forward(x), sub.backward(x)], -1)
        _check_carries(self, carries, 2)
        (forward_carry, backward_carry), *rest = x
        forward_carry, y = sub.forward((forward_carry, *rest))
        backward_carry, z = sub.backward((backward_carry, *rest))
        return (forward_carry, backward_carry), jnp.concatenate([y, z], -1)


@frozen
class Stacked(Composite):
    """A stack of recurrent layers, which passes carries and lengths to the layers that take them.

    x (b, t, ...) to the output of the last layer. With `lengths=True` the input is (x, lengths); with `carry=True` it
    is (carries, x) or (carries, x, lengths), a tuple with one carry for each recurrent layer, and the output
    (carries, y). The recurrent layers, each `Recurrent` or `Bidirectional`, must have the same `carry` and `lengths`;
    others, such as `Dropout`, may stand between them. Parts: layer_0, layer_1 and so on. Without carries and lengths,
    `Series` does the same.

    >>> lstm = [mlax.Recurrent(nn.LSTMCell(32), lengths=True) for _ in range(2)]
    >>> layer, x = nn.Stacked(*lstm, lengths=True), (jnp.ones((8, 20, 16)), jnp.full(8, 15))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 32)
    """

    layers: tuple[Layer, ...]
    carry: bool = False
    lengths: bool = False

    def __init__(self, *layers: Layer, carry: bool = False, lengths: bool = False):
        if any(isinstance(layer, list | tuple) for layer in layers):
            raise TypeError("Stacked: pass the layers themselves, nn.Stacked(*layers), rather than a sequence of them.")
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "carry", carry)
        object.__setattr__(self, "lengths", lengths)
        self.__post_init__()

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            check_layer("Stacked", f"layer {index}", layer)
            inner = _recurrent_of(layer)
            if inner is not None and (inner.carry, inner.lengths) != (self.carry, self.lengths):
                raise ValueError(
                    f"Stacked: carry={self.carry} and lengths={self.lengths}, but a layer has carry={inner.carry} and "
                    f"lengths={inner.lengths}; set them equally on all."
                )

    def parts(self) -> Mapping[str, Layer]:
        return {f"layer_{number}": layer for number, layer in enumerate(self.layers)}

    def with_parts(self, parts: Mapping[str, Layer]) -> Self:
        return with_fields(self, layers=tuple({**self.parts(), **parts}.values()))

    def wire(self, sub: Sub, x: Any) -> Any:
        if not self.carry and not self.lengths:
            return sub.call_in_turn(x, *self.parts())
        first, y, lengths = unpack_sequence(self, x)
        if self.carry:
            _check_carries(self, first, sum(_recurrent_of(layer) is not None for layer in self.layers))
        lengths = (lengths,) if self.lengths else ()
        carries, new_carries = iter(first) if self.carry else None, []
        for layer, part in zip(self.layers, sub, strict=True):
            if _recurrent_of(layer) is None:
                y = part(y)
            elif carries is None:
                y = part((y, *lengths) if lengths else y)
            else:
                carry, y = part((next(carries), y, *lengths))
                new_carries.append(carry)
        return (tuple(new_carries), y) if self.carry else y

    def _arguments(self) -> list[tuple[str, Any]]:
        options = [(f"{name}=", True) for name in ("carry", "lengths") if getattr(self, name)]
        return [*(("", layer) for layer in self.layers), *options]


def _check_carries(layer: Any, carries: Any, number: int) -> None:
    if not isinstance(carries, tuple) or len(carries) != number:
        raise ValueError(
            f"{short_repr(layer)}: the carry is {signature(carries)}, but must be a tuple of {number}, one for each "
            "recurrent layer."
        )


def _recurrent_of(layer: Layer) -> Recurrent | None:
    layer = layer.forward if isinstance(layer, Bidirectional) else layer
    return layer if isinstance(layer, Recurrent) else None
