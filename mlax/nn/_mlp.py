"""MLP: linear maps with an activation between them."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any

import jax

from mlax.core import Composite, Layer, Sub, frozen
from mlax.nn._linear import Linear


@frozen
class MLP(Composite):
    """Apply one linear map for each of `widths`, with `activation` between them and none after the last.

    (..., d) to (..., widths[-1]), in the dtype of the input. Parts: linear_0, linear_1 and so on, each a Linear; other
    fields of theirs are set by surgery, as in `mlax.override(mlp, nn.Linear, kernel_init=mlax.he())`.
    """

    widths: tuple[int, ...]
    _: KW_ONLY
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu
    bias: bool = True

    def __post_init__(self):
        if not isinstance(self.widths, tuple) or not self.widths or not all(isinstance(w, int) for w in self.widths):
            raise TypeError(f"MLP: widths is {self.widths!r}, but must be a tuple of whole numbers, one for each map.")
        if isinstance(self.activation, Layer) or not callable(self.activation):
            raise TypeError(f"MLP: activation is {self.activation!r}, but must be a function, jax.nn.gelu for one.")

    def parts(self) -> Mapping[str, Layer]:
        return {f"linear_{rank}": Linear(width, bias=self.bias) for rank, width in enumerate(self.widths)}

    def wire(self, sub: Sub, x: Any) -> Any:
        for rank, part in enumerate(sub):
            x = part(x if rank == 0 else self.activation(x))
        return x
