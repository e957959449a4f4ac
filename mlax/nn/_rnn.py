"""RNNCell: the simple recurrent cell."""

from dataclasses import KW_ONLY
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from mlax.core import CompositeCell, DType, Initializer, Size, Zeros, frozen, lecun
from mlax.nn._linear import Linear


@frozen
class RNNCell(CompositeCell):
    """`h' = activation(input(x) + recurrent(h))`, and `y = h'`.

    (h, x) to (h, y): h and y (b, features), x (b, d), in the dtype of x.
    Parts: input, a Linear (d, features); recurrent, one of (features, features) without a bias.
    Elman 1990, https://doi.org/10.1207/s15516709cog1402_1.
    """

    features: Size
    _: KW_ONLY
    activation: Literal["tanh", "relu"] = "tanh"
    bias: bool = True
    kernel_init: Initializer = lecun()
    recurrent_init: Initializer = lecun()
    bias_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        if self.activation not in ("tanh", "relu"):
            raise ValueError(f"{self}: activation is {self.activation!r}, but must be 'tanh' or 'relu'.")

    def parts(self):
        shared = {"precision": self.precision, "accum_dtype": self.accum_dtype, "param_dtype": self.param_dtype}
        return {
            "input": Linear(
                self.features, bias=self.bias, kernel_init=self.kernel_init, bias_init=self.bias_init, **shared
            ),
            "recurrent": Linear(self.features, bias=False, kernel_init=self.recurrent_init, **shared),
        }

    def start(self, x):
        return jnp.zeros((*x.shape[:-1], self.features), x.dtype)

    def ahead(self, sub, x):
        return sub.input(x)

    def feedback(self, sub, carry):
        return sub.recurrent(carry)

    def step(self, sub, carry, ahead):
        h = lax.tanh(ahead) if self.activation == "tanh" else lax.max(ahead, jnp.zeros_like(ahead))
        return h, h
