"""GRUCell: the gated recurrent unit."""

from dataclasses import KW_ONLY
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from mlax import ops
from mlax.core import CompositeCell, DType, Initializer, Size, Zeros, frozen, lecun
from mlax.nn._linear import Linear


@frozen
class GRUCell(CompositeCell):
    """A gate z blends the old h with a candidate n, for which a gate r may forget it: `y = h' = z h + (1 - z) n`.

    (h, x) to (h, y): h and y (b, features), x (b, d), in the dtype of x. `reset` says where r acts:
    - "after" the product, `n = tanh(W x + b + r (U h + c))`, as cuDNN and PyTorch have it;
    - "before" it, `n = tanh(W x + b + U (r h))`, equation 8 of https://arxiv.org/abs/1406.1078.
    Parts: input, a Linear (d, 3 features) for r, z and n. "after": recurrent, a Linear (features, 3 features).
    "before": recurrent, a Linear (features, 2 features) for r and z, and candidate, (features, features), no biases.
    """

    features: Size
    _: KW_ONLY
    reset: Literal["after", "before"] = "after"
    bias: bool = True
    kernel_init: Initializer = lecun()
    recurrent_init: Initializer = lecun()
    bias_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        if self.reset not in ("after", "before"):
            raise ValueError(f"{self}: reset is {self.reset!r}, but must be 'after' or 'before' (the product).")

    def parts(self):
        shared = {"precision": self.precision, "accum_dtype": self.accum_dtype, "param_dtype": self.param_dtype}
        parts = {
            "input": Linear(
                3 * self.features, bias=self.bias, kernel_init=self.kernel_init, bias_init=self.bias_init, **shared
            )
        }
        if self.reset == "after":
            recurrent = Linear(
                3 * self.features, bias=self.bias, kernel_init=self.recurrent_init, bias_init=self.bias_init, **shared
            )
            return {**parts, "recurrent": recurrent}
        return {
            **parts,
            "recurrent": Linear(2 * self.features, bias=False, kernel_init=self.recurrent_init, **shared),
            "candidate": Linear(self.features, bias=False, kernel_init=self.recurrent_init, **shared),
        }

    def start(self, x):
        return jnp.zeros((*x.shape[:-1], self.features), x.dtype)

    def ahead(self, sub, x):
        return sub.input(x)

    def step(self, sub, carry, ahead):
        if self.reset == "after":
            h = ops.gru(ahead, sub.recurrent(carry), carry)
            return h, h
        gates, n = jnp.split(ahead, (2 * self.features,), -1)
        r, z = jnp.split(lax.logistic(gates + sub.recurrent(carry)), 2, -1)
        h = ops.blend(z, carry, lax.tanh(n + sub.candidate(r * carry)))
        return h, h
