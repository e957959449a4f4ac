"""MGUCell: the minimal gated unit."""

from dataclasses import KW_ONLY

import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from mlax import ops
from mlax.core import CompositeCell, DType, Initializer, Size, Zeros, frozen, lecun
from mlax.nn._linear import Linear


@frozen
class MGUCell(CompositeCell):
    """One gate `f` both forgets and blends: `y = h' = (1 - f) h + f n`, with `n = tanh(W x + b + U (f h))`.

    (h, x) to (h, y): h and y (b, features), x (b, d), in the dtype of x. https://arxiv.org/abs/1603.09420
    Parts: input, a Linear (d, 2 features) for f and n; recurrent and candidate, each a Linear (features, features)
    without a bias, for f and for n.
    """

    features: Size
    _: KW_ONLY
    bias: bool = True
    kernel_init: Initializer = lecun()
    recurrent_init: Initializer = lecun()
    bias_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def parts(self):
        shared = {"precision": self.precision, "accum_dtype": self.accum_dtype, "param_dtype": self.param_dtype}
        return {
            "input": Linear(
                2 * self.features, bias=self.bias, kernel_init=self.kernel_init, bias_init=self.bias_init, **shared
            ),
            "recurrent": Linear(self.features, bias=False, kernel_init=self.recurrent_init, **shared),
            "candidate": Linear(self.features, bias=False, kernel_init=self.recurrent_init, **shared),
        }

    def start(self, x):
        return jnp.zeros((*x.shape[:-1], self.features), x.dtype)

    def ahead(self, sub, x):
        return sub.input(x)

    def step(self, sub, carry, ahead):
        f, n = jnp.split(ahead, 2, -1)
        f = lax.logistic(f + sub.recurrent(carry))
        h = ops.blend(f, lax.tanh(n + sub.candidate(f * carry)), carry)
        return h, h
