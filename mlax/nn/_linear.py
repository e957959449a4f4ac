"""Linear, Bias, Scaler, Embed, MLP and GLU."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any

import jax
from jax.lax import PrecisionLike

from mlax import ops
from mlax._jax import named_key
from mlax.core import Composite, DType, Initializer, Layer, Normal, Ones, Size, Sub, Zeros, frozen, lecun
from mlax.dtypes import cast
from mlax.nn._variables import broadcast_shape
from mlax.ops import glu


@frozen
class Linear(Layer):
    """Multiply the last axis by a learned matrix and add a learned vector.

    (..., d) to (..., features), in the dtype of the input; d is read at `init`.
    Trainables: kernel (d, features); bias (features,) unless `bias=False`.
    """

    features: Size
    _: KW_ONLY
    bias: bool = True
    kernel_init: Initializer = lecun()
    bias_init: Initializer = Zeros()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's own
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        if x.ndim == 0:
            raise ValueError(f"{self}: the input is a scalar but needs a last axis; reshape it to (1,).")
        dtype = self.param_dtype or x.dtype
        kernel = self.kernel_init(named_key(rng, "kernel"), (x.shape[-1], self.features), dtype)
        if not self.bias:
            return {"kernel": kernel}, None
        return {
            "kernel": kernel,
            "bias": self.bias_init(named_key(rng, "bias"), (self.features,), dtype),
        }, None

    def splits(self, number):
        return {"kernel": -1, "bias": -1}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype)
        y = ops.linear(x, **weights, precision=self.precision, accum_dtype=self.accum_dtype)
        return y, non_trainables


@frozen
class Bias(Layer):
    """Add a learned number to each element, one for each place along `axes`; the other axes share it.

    Shape and dtype of the input. Trainables: bias, of the rank of the last of `axes` and all after it.
    """

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)
    bias_init: Initializer = Zeros()
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        bias = self.bias_init(named_key(rng, "bias"), broadcast_shape(self, x, self.axes), self.param_dtype or x.dtype)
        return {"bias": bias}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x + cast(trainables["bias"], x.dtype), non_trainables


@frozen
class Scaler(Layer):
    """Multiply each element by a learned number, one for each place along `axes`; the other axes share it.

    Shape and dtype of the input. Trainables: scale, of the rank of the last of `axes` and all after it.
    """

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)
    scale_init: Initializer = Ones()
    param_dtype: DType = None  # None: the input's own

    def init(self, rng, x):
        scale = self.scale_init(
            named_key(rng, "scale"), broadcast_shape(self, x, self.axes), self.param_dtype or x.dtype
        )
        return {"scale": scale}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return x * cast(trainables["scale"], x.dtype), non_trainables


@frozen
class Embed(Layer):
    """Look up a learned vector for each whole number: (...) integers to (..., width), in the table's dtype.

    Trainables: table (vocabulary, width). A number outside of the vocabulary gives NaN.
    """

    vocabulary: Size
    width: Size
    _: KW_ONLY
    table_init: Initializer = Normal(0.02)
    param_dtype: DType = "float32"  # the input has no floating dtype to follow

    def init(self, rng, x):
        if x.dtype.kind not in "iu":
            raise TypeError(f"{self}: the input is {x.dtype}, but must be whole numbers; cast it to int32.")
        return {
            "table": self.table_init(named_key(rng, "table"), (self.vocabulary, self.width), self.param_dtype)
        }, None

    def splits(self, number):
        return {"table": 0}

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        return ops.embedding(x, trainables["table"]), non_trainables


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
