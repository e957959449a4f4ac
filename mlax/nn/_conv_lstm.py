"""ConvLSTMCell: the long short-term memory whose products are convolutions."""

from dataclasses import KW_ONLY

import jax.numpy as jnp
from jax.lax import PrecisionLike

from mlax import ops
from mlax.core import CompositeCell, DType, Initializer, Size, frozen, lecun
from mlax.nn._conv import Conv
from mlax.nn._lstm import ForgetBias
from mlax.ops import Sizes


@frozen
class ConvLSTMCell(CompositeCell):
    """An LSTM whose h and c have spatial axes, and whose gates see windows of x and of h.

    ((h, c), x) to ((h, c), y): x (b, *spatial, channels), the others (b, *spatial, features), in the dtype of x; as
    many spatial axes as x has, padded so that they keep their sizes. Parts: input, a Conv to 4 features for i, f, u
    and o in turn; recurrent, another without a bias. https://arxiv.org/abs/1506.04214, equation 3, without peepholes.
    """

    features: Size
    _: KW_ONLY
    window: Sizes = 3
    bias: bool = True
    kernel_init: Initializer = lecun()
    recurrent_init: Initializer = lecun()
    bias_init: Initializer = ForgetBias()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def parts(self):
        shared = {"precision": self.precision, "accum_dtype": self.accum_dtype, "param_dtype": self.param_dtype}
        wide = 4 * self.features
        return {
            "input": Conv(
                wide, self.window, bias=self.bias, kernel_init=self.kernel_init, bias_init=self.bias_init, **shared
            ),
            "recurrent": Conv(wide, self.window, bias=False, kernel_init=self.recurrent_init, **shared),
        }

    def start(self, x):
        zeros = jnp.zeros((*x.shape[:-1], self.features), x.dtype)
        return zeros, zeros

    def ahead(self, sub, x):
        return sub.input(x)

    def feedback(self, sub, carry):
        return sub.recurrent(carry[0])

    def step(self, sub, carry, ahead):
        c, h = ops.lstm(ahead, carry[1])
        return (h, c), h
