"""GLU: a linear map gated by another."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any

import jax

from mlax.core import Composite, Layer, Size, Sub, frozen
from mlax.nn._linear import Linear
from mlax.ops import glu


@frozen
class GLU(Composite):
    """Multiply a linear map of the input by the activation of another, the gate.

    (..., d) to (..., features), in the dtype of the input. Parts: gate and value, each a Linear. By activation this is
    GLU (`jax.nn.sigmoid`), SwiGLU (`jax.nn.silu`), GeGLU (`jax.nn.gelu`), ReGLU (`jax.nn.relu`) or the bilinear layer
    (`jax.nn.identity`); the feed-forward layer of a transformer is `Series(GLU(hidden), Linear(width, bias=False))`.
    https://arxiv.org/abs/2002.05202, equations 4 and 5.

    The two maps are two products: one over both was not faster beyond the noise, and its kernel could not be split
    over devices, or its gradient orthogonalised, without taking it apart again.
    """

    features: Size
    _: KW_ONLY
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    bias: bool = False

    def __post_init__(self):
        if isinstance(self.activation, Layer) or not callable(self.activation):
            raise TypeError(f"GLU: activation is {self.activation!r}, but must be a function, jax.nn.silu for one.")

    def parts(self) -> Mapping[str, Layer]:
        return {"gate": Linear(self.features, bias=self.bias), "value": Linear(self.features, bias=self.bias)}

    def wire(self, sub: Sub, x: Any) -> Any:
        return glu(sub.gate(x), sub.value(x), self.activation)
