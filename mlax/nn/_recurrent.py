"""Recurrent cells: RNN, GRU, LSTM and their variants."""

from dataclasses import KW_ONLY
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from mlax import ops
from mlax.core import (
    CompositeCell,
    DType,
    Initializer,
    Normal,
    Size,
    Zeros,
    frozen,
    lecun,
    short_repr,
    with_fields,
)
from mlax.nn._conv import Conv
from mlax.nn._linear import Linear, Scaler
from mlax.nn._lstm_pair import is_pair_faster, lstm_pair
from mlax.nn._variables import has_shapes
from mlax.ops import Sizes


@frozen
class RNNCell(CompositeCell):
    """A simple (Elman) RNN cell: `h' = activation(input(x) + recurrent(h))`, and `y = h'`.

    (h, x) to (h, y): h and y (b, features), x (b, d), in the dtype of x.
    Parts: input, a Linear (d, features); recurrent, a Linear (features, features) without a bias.
    Elman 1990, https://doi.org/10.1207/s15516709cog1402_1.

    >>> layer, x = mlax.Recurrent(nn.RNNCell(32)), jnp.ones((8, 20, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 32)
    """

    features: Size  # of the carry
    _: KW_ONLY
    activation: Literal["tanh", "relu"] = "tanh"  # "tanh" or "relu"
    bias: bool = True  # whether to add a bias
    kernel_init: Initializer = lecun()  # of the kernel
    recurrent_init: Initializer = lecun()  # of the kernel of the carry
    bias_init: Initializer = Zeros()  # of the bias
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def __post_init__(self):
        if self.activation not in ("tanh", "relu"):
            raise ValueError(f"RNNCell: activation is {self.activation!r}, but must be 'tanh' or 'relu'.")

    def parts(self):
        return {"input": _input_linear(self, 1), "recurrent": _recurrent_linear(self, 1)}

    def initial_carry(self, x):
        return _zeros(self, x, self.features)

    def ahead(self, sub, x):
        return sub.input(x)

    def feedback(self, sub, carry):
        return sub.recurrent(carry)

    def step(self, sub, carry, ahead):
        h = lax.tanh(ahead) if self.activation == "tanh" else lax.max(ahead, jnp.zeros_like(ahead))
        return h, h


@frozen
class MGUCell(CompositeCell):
    """A minimal gated unit (MGU) cell, with one gate f: `y = h' = (1 - f) h + f n`, with `n = tanh(W x + b + U (f h))`.

    (h, x) to (h, y): h and y (b, features), x (b, d), in the dtype of x. https://arxiv.org/abs/1603.09420
    Parts: input, a Linear (d, 2 features) for f and n; recurrent and candidate, each a Linear (features, features)
    without a bias, for f and for n.

    >>> layer, x = mlax.Recurrent(nn.MGUCell(32)), jnp.ones((8, 20, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 32)
    """

    features: Size  # of the carry
    _: KW_ONLY
    bias: bool = True  # whether to add a bias
    kernel_init: Initializer = lecun()  # of the kernel
    recurrent_init: Initializer = lecun()  # of the kernel of the carry
    bias_init: Initializer = Zeros()  # of the bias
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def parts(self):
        return {
            "input": _input_linear(self, 2),
            "recurrent": _recurrent_linear(self, 1),
            "candidate": _recurrent_linear(self, 1),
        }

    def initial_carry(self, x):
        return _zeros(self, x, self.features)

    def ahead(self, sub, x):
        return sub.input(x)

    def step(self, sub, carry, ahead):
        f, n = jnp.split(ahead, 2, -1)
        f = lax.logistic(f + sub.recurrent(carry))
        h = ops.blend(f, lax.tanh(n + sub.candidate(f * carry)), carry)
        return h, h


@frozen
class GRUCell(CompositeCell):
    """A GRU cell, the gated recurrent unit: `y = h' = z h + (1 - z) n`, with update gate z, reset gate r and candidate
    n.

    (h, x) to (h, y): h and y (b, features), x (b, d), in the dtype of x. `reset` says where r acts:
    - "after" the product, `n = tanh(W x + b + r (U h + c))`, as in cuDNN and PyTorch;
    - "before" it, `n = tanh(W x + b + U (r h))`, equation 8 of https://arxiv.org/abs/1406.1078.
    Parts: input, a Linear (d, 3 features) for r, z and n. "after": recurrent, a Linear (features, 3 features).
    "before": recurrent, a Linear (features, 2 features) for r and z, and candidate, (features, features), no biases.

    >>> layer, x = mlax.Recurrent(nn.GRUCell(32)), jnp.ones((8, 20, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 32)
    """

    features: Size  # of the carry
    _: KW_ONLY
    reset: Literal["after", "before"] = "after"  # the gate is applied after or before the product
    bias: bool = True  # whether to add a bias
    kernel_init: Initializer = lecun()  # of the kernel
    recurrent_init: Initializer = lecun()  # of the kernel of the carry
    bias_init: Initializer = Zeros()  # of the bias
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def __post_init__(self):
        if self.reset not in ("after", "before"):
            raise ValueError(f"GRUCell: reset is {self.reset!r}, but must be 'after' or 'before' (the product).")

    def parts(self):
        if self.reset == "after":
            return {"input": _input_linear(self, 3), "recurrent": _recurrent_linear(self, 3, bias=self.bias)}
        return {
            "input": _input_linear(self, 3),
            "recurrent": _recurrent_linear(self, 2),
            "candidate": _recurrent_linear(self, 1),
        }

    def initial_carry(self, x):
        return _zeros(self, x, self.features)

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


@frozen
class ForgetBias(Initializer):
    """A forget gate bias: `value` for the forget gate, the second of four, and zero for the others, so that cells
    remember from the start.

    https://proceedings.mlr.press/v37/jozefowicz15.html

    >>> cell = nn.LSTMCell(32, bias_init=nn.ForgetBias(2.0))
    """

    value: float = 1.0  # of the bias of the forget gate

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        gate = shape[-1] // 4
        return jnp.zeros(shape, dtype).at[..., gate : 2 * gate].set(self.value)


@frozen
class LSTMCell(CompositeCell):
    """An LSTM cell, the long short-term memory: `c' = f c + i u`, and `y = h' = o tanh(c')`, with cell state c and
    gates i, f, o.

    ((h, c), x) to ((h, c), y): c (b, features), h and y (b, features) or, with a `projection`, (b, projection),
    x (b, d), in the dtype of x. The gates i, f and o are sigmoids and u a tanh of `input(x) + recurrent(h)`.
    Parts: input, a Linear (d, 4 features) for i, f, u and o; recurrent, a Linear (h's width, 4 features) without a
    bias, unless `recurrent_bias`. https://doi.org/10.1162/neco.1997.9.8.1735, 10.1162/089976600300015015.
    - `peephole`: i and f also depend on c, and o on c', by parts peep_i, peep_f and peep_o, each a Scaler (features,).
      https://www.jmlr.org/papers/v3/gers02a.html
    - `projection`: h' is multiplied by the part project, a Linear (features, projection) without a bias.
      https://arxiv.org/abs/1402.1128

    >>> layer, x = mlax.Recurrent(nn.LSTMCell(32)), jnp.ones((8, 20, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 32)
    """

    features: Size  # of the cell state
    _: KW_ONLY
    peephole: bool = False  # whether the gates depend on the cell state
    projection: int | None = None  # of the output to so many features; None: no projection
    bias: bool = True  # whether to add a bias
    recurrent_bias: bool = False  # whether to add a second one, initially zero, as PyTorch does
    kernel_init: Initializer = lecun()  # of the kernel
    recurrent_init: Initializer = lecun()  # of the kernel of the carry
    bias_init: Initializer = ForgetBias()  # of the bias
    peephole_init: Initializer = Normal(0.1)  # of the peepholes
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def __post_init__(self):
        if self.projection is not None and not 0 < self.projection <= self.features:
            raise ValueError(
                f"LSTMCell: projection is {self.projection}, but must be from 1 to features, {self.features}; "
                "for a wider output put a Linear after the Recurrent."
            )

    def parts(self):
        recurrent = with_fields(_recurrent_linear(self, 4), bias=self.recurrent_bias)
        parts = {"input": _input_linear(self, 4), "recurrent": recurrent}
        if self.peephole:
            peep = Scaler(scale_init=self.peephole_init, param_dtype=self.param_dtype)
            parts |= {"peep_i": peep, "peep_f": peep, "peep_o": peep}
        if self.projection is not None:
            parts["project"] = Linear(self.projection, bias=False, kernel_init=self.kernel_init, **_shared_fields(self))
        return parts

    def initial_carry(self, x):
        return _zeros(self, x, self.projection or self.features), _zeros(self, x, self.features)

    def ahead(self, sub, x):
        return sub.input(x)

    def feedback(self, sub, carry):
        return sub.recurrent(carry[0])

    def scan_with_next(self, x, trainables, following, next_trainables):
        if type(self) is not LSTMCell or type(following) is not LSTMCell or x.ndim != 3:
            return None
        cells = {(cell.features, cell.precision, *cell._variations()) for cell in (self, following)}
        if cells != {(self.features, self.precision, False, None, None, ())}:
            return None
        fits = self._fits(x, x.shape[-1], trainables) and following._fits(x, self.features, next_trainables)
        if not fits or not is_pair_faster(x, self.features, (trainables, next_trainables)):
            return None
        return lstm_pair(x, trainables, next_trainables, precision=self.precision)

    def _variations(self) -> tuple[Any, ...]:
        return self.peephole, self.projection, self.accum_dtype, self.edits

    def _fits(self, x: Any, width: int, trainables: Any) -> bool:
        """Whether these are the variables for inputs of this width, in the dtype of x."""
        gates = 4 * self.features
        wanted: dict[str, Any] = {"input": {"kernel": (width, gates)}, "recurrent": {"kernel": (self.features, gates)}}
        if self.bias:
            wanted["input"]["bias"] = (gates,)
        if self.recurrent_bias:
            wanted["recurrent"]["bias"] = (gates,)
        return has_shapes(trainables, wanted, x.dtype)

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


@frozen
class ConvLSTMCell(CompositeCell):
    """A convolutional LSTM cell: an LSTM with convolutions in place of products, so h and c have spatial axes.

    ((h, c), x) to ((h, c), y): x (b, *spatial, channels), the others (b, *spatial, features), in the dtype of x, with
    as many spatial axes as x has, padded so that they keep their sizes. Parts: input, a Conv to 4 features for i, f, u
    and o; recurrent, a Conv without a bias. https://arxiv.org/abs/1506.04214, equation 3, without peepholes.

    >>> layer, x = mlax.Recurrent(nn.ConvLSTMCell(16)), jnp.ones((8, 5, 28, 28, 1))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 5, 28, 28, 16)
    """

    features: Size  # the channels of the carry
    _: KW_ONLY
    window: Sizes = 3  # the size of a window, along all spatial axes or each
    bias: bool = True  # whether to add a bias
    kernel_init: Initializer = lecun()  # of the kernel
    recurrent_init: Initializer = lecun()  # of the kernel of the carry
    bias_init: Initializer = ForgetBias()  # of the bias
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def parts(self):
        shared, features = _shared_fields(self), 4 * self.features
        return {
            "input": Conv(
                features, self.window, bias=self.bias, kernel_init=self.kernel_init, bias_init=self.bias_init, **shared
            ),
            "recurrent": Conv(features, self.window, bias=False, kernel_init=self.recurrent_init, **shared),
        }

    def initial_carry(self, x):
        zeros = _zeros(self, x, self.features)
        return zeros, zeros

    def ahead(self, sub, x):
        return sub.input(x)

    def feedback(self, sub, carry):
        return sub.recurrent(carry[0])

    def step(self, sub, carry, ahead):
        c, h = ops.lstm(ahead, carry[1])
        return (h, c), h


def _input_linear(cell: Any, gates: int) -> Linear:
    """The Linear from the input to the gates of a cell."""
    return Linear(
        gates * cell.features,
        bias=cell.bias,
        kernel_init=cell.kernel_init,
        bias_init=cell.bias_init,
        **_shared_fields(cell),
    )


def _recurrent_linear(cell: Any, gates: int, *, bias: bool = False) -> Linear:
    """The Linear from the carry to the gates of a cell."""
    bias_init = cell.bias_init if bias else Zeros()
    return Linear(
        gates * cell.features,
        bias=bias,
        kernel_init=cell.recurrent_init,
        bias_init=bias_init,
        **_shared_fields(cell),
    )


def _shared_fields(cell: Any) -> dict[str, Any]:
    return {"precision": cell.precision, "accum_dtype": cell.accum_dtype, "param_dtype": cell.param_dtype}


def _zeros(cell: Any, x: Any, width: int) -> Any:
    if x.ndim < 2:
        raise ValueError(
            f"{short_repr(cell)}: a step's input has the shape {x.shape}, but must be (b, ..., d); a sequence of "
            "numbers (b, t) needs an axis of features: x[..., None]."
        )
    return jnp.zeros((*x.shape[:-1], width), x.dtype)
