"""Linear, Bias, Scaler, PReLU, MLP and GLU."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any

import jax
from jax.lax import PrecisionLike

from mlax import _gpu, ops
from mlax._jax import expand_last, named_key
from mlax.core import Composite, Constant, DType, Initializer, Layer, Ones, Size, Sub, Zeros, frozen, lecun, with_fields
from mlax.dtypes import cast
from mlax.nn._variables import broadcast_shape, has_shapes


@frozen
class Linear(Layer):
    """A linear (dense) layer over the last axis: `activation(x @ kernel + bias)`.

    (..., d) to (..., features), in the dtype of the input; d is read at `init`.
    Trainables: kernel (d, features); bias (features,) unless `bias=False`.

    >>> layer, x = nn.Linear(32), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> y, non_trainables = layer.fwd(x, trainables, non_trainables)
    >>> y.shape, trainables["kernel"].shape
    ((8, 32), (16, 32))
    """

    features: Size  # the size of the last axis of the output
    _: KW_ONLY
    bias: bool = True  # whether to add a bias
    kernel_init: Initializer = lecun()  # of the kernel
    bias_init: Initializer = Zeros()  # of the bias
    activation: Callable[[jax.Array], jax.Array] | None = None  # after the bias, such as ops.gelu
    precision: PrecisionLike = None  # of the products, as in jax.lax
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        if x.ndim == 0:
            raise ValueError(f"{self}: the input is a scalar but needs a last axis; reshape it to (1,).")
        dtype = self.param_dtype or x.dtype
        kernel = self.kernel_init(named_key(rng, "kernel"), (x.shape[-1], self.features), dtype)
        if not self.bias:
            return {"kernel": kernel}, None
        return {"kernel": kernel, "bias": self.bias_init(named_key(rng, "bias"), (self.features,), dtype)}, None

    def tensor_parallel_axes(self, number):
        return {"kernel": -1, "bias": -1}

    def fwd_with_next(self, x, trainables, following, next_trainables):
        if type(self) is not Linear or type(following) is not Linear:  # a subclass may compute anything
            return None
        activation = self.activation
        if activation is None or activation not in (ops.gelu, ops.exact_gelu) or following.activation is not None:
            return None
        if not self.bias or not isinstance(x, jax.Array) or x.ndim == 0:
            return None
        if any((each.precision, each.accum_dtype) != (None, None) for each in (self, following)):
            return None
        own, other = self._shapes(x.shape[-1]), following._shapes(self.features)
        if not has_shapes(trainables, own, x.dtype) or not has_shapes(next_trainables, other, x.dtype):
            return None  # the layers by themselves compute it, or say what does not fit
        down = next_trainables["kernel"]
        if not _gpu.prefers_mlp_kernels(x, trainables["kernel"], down):
            return None
        y = ops.gelu_mlp(x, **trainables, down=down, activation=activation)
        return y + expand_last(next_trainables["bias"], y) if following.bias else y

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Of the trainables, for inputs of this width."""
        kernel = {"kernel": (width, self.features)}
        return {**kernel, "bias": (self.features,)} if self.bias else kernel

    def split_bias(self, x, trainables, inference_mode):
        if type(self) is not Linear or self.activation is not None or not self.bias or not _gpu.prefers_kernels(x):
            return None
        return with_fields(self, bias=False), {"kernel": trainables["kernel"]}, trainables["bias"]

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype)
        numerics = {"precision": self.precision, "accum_dtype": self.accum_dtype}
        return ops.linear(x, **weights, activation=self.activation, **numerics), non_trainables


@frozen
class Bias(Layer):
    """A learned bias: add an array with the input's sizes along `axes`, broadcast along the others.

    Shape and dtype of the input. Trainables: bias, whose first axis is the first of `axes`.

    >>> layer, x = nn.Bias(), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 16)
    """

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)  # of the input that the bias has
    bias_init: Initializer = Zeros()  # of the bias
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        shape = broadcast_shape(self, x, self.axes)
        return {"bias": self.bias_init(named_key(rng, "bias"), shape, self.param_dtype or x.dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x + expand_last(cast(trainables["bias"], x.dtype), x), non_trainables


@frozen
class Scaler(Layer):
    """A learned scale: multiply by an array with the input's sizes along `axes`, broadcast along the others.

    Shape and dtype of the input. Trainables: scale, whose first axis is the first of `axes`.

    >>> layer, x = nn.Scaler(), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 16)
    """

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)  # of the input that the scale has
    scale_init: Initializer = Ones()  # of the scale
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        shape = broadcast_shape(self, x, self.axes)
        return {"scale": self.scale_init(named_key(rng, "scale"), shape, self.param_dtype or x.dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x * expand_last(cast(trainables["scale"], x.dtype), x), non_trainables


@frozen
class PReLU(Layer):
    """The parametric ReLU: `x` where it is positive, and a learned slope times `x` elsewhere.

    Shape and dtype of the input. Trainables: slope, one number (), or an array with the input's sizes along `axes`,
    such as one for each channel with `axes=(-1,)`. https://arxiv.org/abs/1502.01852, equation 1.

    >>> layer, x = nn.PReLU(axes=(-1,)), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 16)
    """

    _: KW_ONLY
    axes: tuple[int, ...] = ()  # of the input that the slope has; (): one number
    slope_init: Initializer = Constant(0.25)  # of the slope
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        shape = broadcast_shape(self, x, self.axes) if self.axes else ()
        return {"slope": self.slope_init(named_key(rng, "slope"), shape, self.param_dtype or x.dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.prelu(x, cast(trainables["slope"], x.dtype)), non_trainables


@frozen
class MLP(Composite):
    """A multilayer perceptron: one Linear for each of `widths`, with `activation` between them and none after the last.

    (..., d) to (..., widths[-1]), in the dtype of the input. Parts: linear_0, linear_1 and so on, each a Linear; set
    their other fields by surgery, as in `mlax.override(mlp, nn.Linear, kernel_init=mlax.he())`.

    >>> layer, x = nn.MLP((64, 10)), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 10)
    """

    widths: tuple[int, ...]  # the features of each layer
    _: KW_ONLY
    activation: Callable[[jax.Array], jax.Array] = ops.gelu  # between the layers
    bias: bool = True  # whether to add a bias

    def __post_init__(self):
        if not isinstance(self.widths, tuple) or not self.widths or not all(isinstance(w, int) for w in self.widths):
            raise TypeError(f"MLP: widths is {self.widths!r}, but must be a tuple of integers, one for each Linear.")
        if min(self.widths) < 1:
            raise ValueError(f"MLP: widths is {self.widths!r}, but each must be at least 1.")
        _check_activation(self, "ops.gelu")

    def parts(self) -> Mapping[str, Layer]:
        return {f"linear_{number}": Linear(width, bias=self.bias) for number, width in enumerate(self.widths)}

    def wire(self, sub: Sub, x: Any) -> Any:
        for number, part in enumerate(sub):
            x = part(x if number == 0 else ops.activate(x, None, self.activation))
        return x


@frozen
class GLU(Composite):
    """A gated linear unit: a Linear of the input times the activation of another, the gate.

    (..., d) to (..., features), in the dtype of the input. Parts: gate and value, each a Linear. By activation this is
    GLU (`jax.nn.sigmoid`), SwiGLU (`jax.nn.silu`), GeGLU (`jax.nn.gelu`), ReGLU (`jax.nn.relu`) or the bilinear layer
    (`jax.nn.identity`); the feed-forward layer of a transformer is `Series(GLU(hidden), Linear(width, bias=False))`.
    https://arxiv.org/abs/2002.05202, equations 4 and 5.

    It computes two products: one product for both was not measurably faster, and its kernel could not be sharded, or
    its gradient orthogonalized, without splitting it again.

    >>> layer, x = nn.GLU(32, activation=jax.nn.silu), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 32)
    """

    features: Size  # the size of the last axis of the output
    _: KW_ONLY
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu  # of the gate
    bias: bool = False  # whether to add a bias

    def __post_init__(self):
        _check_activation(self, "jax.nn.silu")

    def parts(self) -> Mapping[str, Layer]:
        return {"gate": Linear(self.features, bias=self.bias), "value": Linear(self.features, bias=self.bias)}

    def wire(self, sub: Sub, x: Any) -> Any:
        return ops.glu(sub.gate(x), sub.value(x), self.activation)


def _check_activation(layer: Any, example: str) -> None:
    if isinstance(layer.activation, Layer) or not callable(layer.activation):
        name = type(layer).__name__
        raise TypeError(f"{name}: activation is {layer.activation!r}, but must be a function, such as {example}.")
