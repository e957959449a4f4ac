"""Bidirectional: two recurrent layers over the same sequence, one from each end."""

from typing import Any

import jax.numpy as jnp

from mlax.core import Composite, Recurrent, Sub, frozen


@frozen
class Bidirectional(Composite):
    """The outputs of `forward` and of `backward`, each reading x from its own end, side by side on the last axis.

    x (b, t, ...) to y (b, t, ..., forward's width + backward's), in the dtype of x. `backward` is a `Recurrent`
    with `reverse=True`. Both take the carry, or the lengths, or neither: the input is then like theirs, (x, lengths)
    say, but with a pair of carries, and the output (carries, y).
    """

    forward: Recurrent
    backward: Recurrent

    def __post_init__(self):
        for name, part, reverse in (("forward", self.forward, False), ("backward", self.backward, True)):
            if not isinstance(part, Recurrent) or part.reverse is not reverse:
                raise ValueError(f"Bidirectional: {name} is {part!r}, but must be a Recurrent with reverse={reverse}.")
        for field in ("axis", "carry", "lengths"):
            if getattr(self.forward, field) != getattr(self.backward, field):
                raise ValueError(f"Bidirectional: forward and backward differ in `{field}`; give both the same.")

    def wire(self, sub: Sub, x: Any) -> Any:
        if not self.forward.carry:
            return jnp.concatenate([sub.forward(x), sub.backward(x)], -1)
        (ahead, back), *rest = x
        ahead, y = sub.forward((ahead, *rest))
        back, z = sub.backward((back, *rest))
        return (ahead, back), jnp.concatenate([y, z], -1)
