"""LSTMCell: the long short-term memory."""

from dataclasses import KW_ONLY

import jax.numpy as jnp
from jax.lax import PrecisionLike

from mlax import ops
from mlax.core import CompositeCell, DType, Initializer, Normal, Size, frozen, lecun
from mlax.nn._linear import Linear
from mlax.nn._scaler import Scaler


@frozen
class ForgetBias(Initializer):
    """`value` for the forget gate, the second of four, and zero for the others: memories last from the start.

    https://proceedings.mlr.press/v37/jozefowicz15.html
    """

    value: float = 1.0

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        gate = shape[-1] // 4
        return jnp.zeros(shape, dtype).at[..., gate : 2 * gate].set(self.value)


@frozen
class LSTMCell(CompositeCell):
    """Gates decide what a memory c keeps, takes in and shows: `c' = f c + i u`, and `y = h' = o tanh(c')`.

    ((h, c), x) to ((h, c), y): c (b, features), h and y (b, features) or, with a `projection`, (b, projection),
    x (b, d), in the dtype of x. The gates i, f and o are sigmoids and u a tanh of `input(x) + recurrent(h)`.
    Parts: input, a Linear (d, 4 features) for i, f, u, o in turn; recurrent, one of (h's width, 4 features) without
    a bias. https://doi.org/10.1162/neco.1997.9.8.1735, https://doi.org/10.1162/089976600300015015.
    - `peephole`: i and f see c, and o sees c', by parts peep_i, peep_f and peep_o, each a Scaler (features,).
      https://www.jmlr.org/papers/v3/gers02a.html
    - `projection`: h' is multiplied by the part project, a Linear (features, projection) without a bias.
      https://arxiv.org/abs/1402.1128
    """

    features: Size
    _: KW_ONLY
    peephole: bool = False
    projection: int | None = None
    bias: bool = True
    kernel_init: Initializer = lecun()
    recurrent_init: Initializer = lecun()
    bias_init: Initializer = ForgetBias()
    peephole_init: Initializer = Normal(0.1)
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def __post_init__(self):
        if self.projection is not None and not 0 < self.projection <= self.features:
            raise ValueError(
                f"{self}: projection is {self.projection}, but must be from 1 to features, {self.features}; "
                "for a wider output put a Linear after the Recurrent."
            )

    def parts(self):
        shared = {"precision": self.precision, "accum_dtype": self.accum_dtype, "param_dtype": self.param_dtype}
        parts = {
            "input": Linear(
                4 * self.features, bias=self.bias, kernel_init=self.kernel_init, bias_init=self.bias_init, **shared
            ),
            "recurrent": Linear(4 * self.features, bias=False, kernel_init=self.recurrent_init, **shared),
        }
        if self.peephole:
            peep = Scaler(scale_init=self.peephole_init, param_dtype=self.param_dtype)
            parts |= {"peep_i": peep, "peep_f": peep, "peep_o": peep}
        if self.projection is not None:
            parts["project"] = Linear(self.projection, bias=False, kernel_init=self.kernel_init, **shared)
        return parts

    def start(self, x):
        def zeros(width):
            return jnp.zeros((*x.shape[:-1], width), x.dtype)

        return zeros(self.projection or self.features), zeros(self.features)

    def ahead(self, sub, x):
        return sub.input(x)

    def feedback(self, sub, carry):
        return sub.recurrent(carry[0])

    def step(self, sub, carry, ahead):
        c = carry[1]
        if self.peephole:
            i, f, u, o = jnp.split(ahead, 4, -1)
            c = ops.lstm_memory(i + sub.peep_i(c), f + sub.peep_f(c), u, c)
            h = ops.lstm_output(o + sub.peep_o(c), c)
        else:
            c, h = ops.lstm(ahead, c)
        if self.projection is not None:
            h = sub.project(h)
        return (h, c), h
