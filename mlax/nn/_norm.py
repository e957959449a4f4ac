"""BatchNorm, LayerNorm, RMSNorm, GroupNorm, InstanceNorm and LocalResponseNorm."""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from mlax import ops
from mlax._jax import is_static, named_key
from mlax.core import DType, Initializer, Layer, Ones, Tree, Zeros, frozen
from mlax.dtypes import cast
from mlax.nn._variables import broadcast_shape, check_state_dtype, num_channels


@frozen
class BatchNorm(Layer):
    """Batch normalization: normalize each channel over all other axes, then scale and shift by learned vectors.

    (b, ..., c), with the channels along `axis`; shape and dtype of the input. Inference uses running statistics,
    and `frozen=True` uses them in training too. https://arxiv.org/abs/1502.03167, algorithms 1 and 2. The `activation`
    is applied to the result; of a pair (x, residual), to the result plus the residual. On a GPU that saves memory
    traffic in the backward pass.

    Trainables: scale and shift (c,), unless `scale=False` or `shift=False`. Non-trainables: mean and var (c,), in
    `accum_dtype`; each training step moves them towards the batch's (its unbiased variance) by the fraction
    `momentum`, which is PyTorch's convention and 1 minus that of Keras and Flax. `corrected=True` removes the bias
    towards the initial zeros and ones; `momentum=None` takes the plain average over all steps. Both count the steps in
    count, an int32, and compute that fraction from it in float32, or in float64 under x64, in every dtype.

    Under `jit`, the statistics of a batch that is sharded over devices are those of the whole batch. Under
    `shard_map`, pass the mesh axis as `axis_name`, or each device uses its own.

    >>> layer, x = nn.BatchNorm(), jnp.ones((8, 28, 28, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> y, non_trainables = layer.fwd(x, trainables, non_trainables)
    >>> y.shape, non_trainables["mean"].shape
    ((8, 28, 28, 16), (16,))
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axis: int = -1  # of the channels
    momentum: float | None = 0.1  # how far a step moves the running statistics; None: their plain average
    eps: float = 1e-5  # added to the variance
    scale: bool = True  # whether to multiply by a learned scale
    shift: bool = True  # whether to add a learned shift
    frozen: bool = False  # whether training uses the running statistics, too
    corrected: bool = False  # whether to remove the bias towards the initial values
    axis_name: str | tuple[str, ...] | None = None  # of a shard_map or vmap to take statistics over
    activation: Callable[[Any], Any] | None = None  # of each element of the result, such as jax.nn.relu
    scale_init: Initializer = Ones()  # of the scale
    shift_init: Initializer = Zeros()  # of the shift
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def __post_init__(self):
        if self.momentum is None:
            if self.corrected:
                raise ValueError(
                    "BatchNorm: momentum is None, a plain average without bias, but corrected is True; leave one out."
                )
        elif not 0.0 < self.momentum <= 1.0:
            raise ValueError(
                f"BatchNorm: momentum is {self.momentum}, but must be above 0 and at most 1: the weight of the new "
                "batch, or None for the average over all batches. To keep the running statistics as they are, pass "
                "frozen=True."
            )

    def init(self, rng, x):
        x, _ = _split_residual(self, x)
        shape, dtype = (num_channels(self, x),), self.accum_dtype or x.dtype
        state = {"mean": jnp.zeros(shape, dtype), "var": jnp.ones(shape, dtype)}
        if self._counts_steps:
            state["count"] = jnp.zeros((), jnp.int32)
        return _init_scale_and_shift(self, rng, shape, x), state

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        state: Any = non_trainables
        x, residual = _split_residual(self, x)
        check_state_dtype(self, state, self.accum_dtype or x.dtype)
        weights = cast(trainables, x.dtype) or {}
        options = {"axis": self.axis, "eps": self.eps, "residual": residual, "activation": self.activation}
        if self.frozen or inference_mode or x.size == 0:
            return ops.batch_norm(x, state["mean"], state["var"], **weights, **options), state
        names, dtype = self.axis_name, self.accum_dtype
        try:
            y, mean, var, count = ops.normalize_batch(x, **weights, **options, axis_name=names, accum_dtype=dtype)
        except NameError as error:
            raise NameError(
                f"{self}: there is no axis of that name here; call fwd under a shard_map or vmap with that axis, or "
                "leave axis_name out: under jit a sharded batch gives the statistics of the whole batch."
            ) from error
        return y, self._update_statistics(state, *lax.stop_gradient((mean, var)), count)

    @property
    def _counts_steps(self) -> bool:
        return self.corrected or self.momentum is None

    def _update_statistics(self, state, mean, var, count):
        """The new running statistics, by those of a batch over `count` elements, which may be symbolic."""
        weight, new = self.momentum, {}
        if self._counts_steps:
            new["count"] = state["count"] + 1
            steps = lax.full_like(1.0, new["count"])  # weakly typed, so that it is not rounded to a narrow dtype
            weight = 1.0 / steps if weight is None else weight / (1.0 - (1.0 - weight) ** steps)
        new["mean"] = state["mean"] + weight * (mean - state["mean"])
        new["var"] = state["var"] + weight * (var * _unbiased_factor(count, var.dtype) - state["var"])
        return new


@frozen
class LayerNorm(Layer):
    """Layer normalization: subtract the mean over `axes`, divide by the standard deviation, then scale and shift.

    Shape and dtype of the input. Trainables: scale and shift, of the input's sizes along `axes`, unless
    `scale=False` or `shift=False`. Of a pair (x, bias), it returns the pair of x + bias, for a residual connection,
    and the norm of x: see `ops.residual_layer_norm`. https://arxiv.org/abs/1607.06450, equation 4.

    >>> layer, x = nn.LayerNorm(), jnp.ones((8, 20, 64))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 64)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)  # to normalize
    eps: float = 1e-5  # added to the variance
    scale: bool = True  # whether to multiply by a learned scale
    shift: bool = True  # whether to add a learned shift
    scale_init: Initializer = Ones()  # of the scale
    shift_init: Initializer = Zeros()  # of the shift
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        x, *_ = _split_bias(x)
        return _init_scale_and_shift(self, rng, broadcast_shape(self, x, self.axes), x), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, *bias = _split_bias(x)
        weights = cast(trainables, x.dtype) or {}
        options: Any = {"axes": self.axes, "eps": self.eps, "accum_dtype": self.accum_dtype}
        if not bias:
            return ops.layer_norm(x, **weights, **options), non_trainables
        return ops.residual_layer_norm(x, **weights, bias=cast(bias[0], x.dtype), **options), non_trainables


@frozen
class RMSNorm(Layer):
    """RMS normalization: divide by the root of the mean square over `axes`, then scale by a learned array.

    Shape and dtype of the input. Trainables: scale, of the input's sizes along `axes`, unless `scale=False`. Gemma's
    weights are distances from 1: `RMSNorm(scale_offset=1.0, scale_init=Zeros())`. Of a pair (x, bias), it returns the
    pair of x + bias and the norm of x: see `ops.residual_rms_norm`. https://arxiv.org/abs/1910.07467, equation 4.

    >>> layer, x = nn.RMSNorm(), jnp.ones((8, 20, 64))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 64)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axes: tuple[int, ...] = (-1,)  # to normalize
    eps: float = 1e-6  # added to the mean square
    scale: bool = True  # whether to multiply by a learned scale
    scale_offset: float = 0.0  # added to the learned scale
    scale_init: Initializer = Ones()  # of the scale
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        x, *_ = _split_bias(x)
        ops.check_floating(f"{self}", x)
        shape = broadcast_shape(self, x, self.axes)
        if not self.scale:
            return None, None
        return {"scale": self.scale_init(named_key(rng, "scale"), shape, self.param_dtype or x.dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, *bias = _split_bias(x)
        weights = cast(trainables, x.dtype) or {}
        options: Any = {"axes": self.axes, "eps": self.eps, "scale_offset": self.scale_offset}
        options["accum_dtype"] = self.accum_dtype
        if not bias:
            return ops.rms_norm(x, **weights, **options), non_trainables
        return ops.residual_rms_norm(x, **weights, bias=cast(bias[0], x.dtype), **options), non_trainables


@frozen
class GroupNorm(Layer):
    """Group normalization: normalize each example over `groups` of contiguous channels, then scale and shift.

    (b, ..., c), of any rank, with the channels along `axis`; shape and dtype of the input. Trainables: scale and
    shift (c,), unless `scale=False` or `shift=False`. https://arxiv.org/abs/1803.08494, equation 7.

    >>> layer, x = nn.GroupNorm(4), jnp.ones((8, 28, 28, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 28, 28, 16)
    """

    has_statistics: ClassVar[bool] = True

    groups: int  # of channels
    _: KW_ONLY
    axis: int = -1  # of the channels
    eps: float = 1e-5  # added to the variance
    scale: bool = True  # whether to multiply by a learned scale
    shift: bool = True  # whether to add a learned shift
    scale_init: Initializer = Ones()  # of the scale
    shift_init: Initializer = Zeros()  # of the shift
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def __post_init__(self):
        if self.groups < 1:
            raise ValueError(f"GroupNorm: groups is {self.groups}, but must be at least 1.")

    def init(self, rng, x):
        size = num_channels(self, x)
        if size % self.groups:
            raise ValueError(
                f"{self}: the {size} channels of the input {x.shape} do not divide into {self.groups} groups; "
                f"pass a divisor of {size}."
            )
        return _init_scale_and_shift(self, rng, (size,), x), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype) or {}
        y = ops.group_norm(x, **weights, groups=self.groups, axis=self.axis, eps=self.eps, accum_dtype=self.accum_dtype)
        return y, non_trainables


@frozen
class InstanceNorm(Layer):
    """Instance normalization: normalize each channel of each example over all other axes, then scale and shift.

    (b, ..., c), of rank 3 or more, with the channels along `axis`; shape and dtype of the input. Trainables: scale
    and shift (c,), unless `scale=False` or `shift=False`. https://arxiv.org/abs/1607.08022, equation 2.

    >>> layer, x = nn.InstanceNorm(), jnp.ones((8, 28, 28, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 28, 28, 16)
    """

    has_statistics: ClassVar[bool] = True

    _: KW_ONLY
    axis: int = -1  # of the channels
    eps: float = 1e-5  # added to the variance
    scale: bool = True  # whether to multiply by a learned scale
    shift: bool = True  # whether to add a learned shift
    scale_init: Initializer = Ones()  # of the scale
    shift_init: Initializer = Zeros()  # of the shift
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        size = num_channels(self, x)
        if x.ndim < 3:
            raise ValueError(
                f"{self}: the input has the shape {x.shape}, which leaves no axis to take statistics over; "
                "it needs a batch axis, a channel axis and at least one more. Use LayerNorm over (-1,) otherwise."
            )
        return _init_scale_and_shift(self, rng, (size,), x), None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype) or {}
        groups = x.shape[self.axis]
        y = ops.group_norm(x, **weights, groups=groups, axis=self.axis, eps=self.eps, accum_dtype=self.accum_dtype)
        return y, non_trainables


@frozen
class LocalResponseNorm(Layer):
    """Local response normalization: `x / (k + alpha * mean(x * x)) ** beta` over `size` neighboring channels.

    (b, ..., c), with the channels along `axis`; shape and dtype of the input. No variables. Channels beyond the first
    and the last count as 0, and the mean is PyTorch's, where the paper has a sum.
    https://papers.nips.cc/paper/4824, section 3.3.

    >>> nn.LocalResponseNorm(5).fwd(jnp.ones((8, 28, 28, 16)), None)[0].shape
    (8, 28, 28, 16)
    """

    has_statistics: ClassVar[bool] = True

    size: int  # of a window of channels
    _: KW_ONLY
    alpha: float = 1e-4  # of the mean square
    beta: float = 0.75  # the power
    k: float = 1.0  # added to the mean square
    axis: int = -1  # of the channels
    accum_dtype: DType = None  # None: the input's

    def __post_init__(self):
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"LocalResponseNorm: size is {self.size!r}, but must be an integer of at least 1.")
        if self.alpha < 0 or self.k <= 0:
            raise ValueError(
                f"LocalResponseNorm: alpha is {self.alpha} and k {self.k}, but alpha must not be negative and k must "
                "be positive, so that nothing is divided by 0."
            )

    def init(self, rng, x):
        ops.check_floating(f"{self}", x)
        num_channels(self, x)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        options = {name: getattr(self, name) for name in ("alpha", "beta", "k", "axis", "accum_dtype")}
        return ops.local_response_norm(x, self.size, **options), non_trainables


def _split_residual(layer: Any, x: Any) -> tuple[Any, Any]:
    """`x` and None, or the pair `x` of an input and a residual."""
    if not isinstance(x, tuple):
        return x, None
    x, residual = x
    if residual.shape != x.shape:
        raise ValueError(f"{layer}: the residual is {residual.shape}, but must have the shape of the input, {x.shape}.")
    return x, residual


def _split_bias(x: Any) -> tuple[Any, ...]:
    """The input (x,), or (x, bias), with a vector or None, where it is a pair."""
    is_pair = isinstance(x, tuple) and len(x) == 2 and (x[1] is None or x[1].ndim == 1 < x[0].ndim)
    return x if is_pair else (x,)


def _init_scale_and_shift(layer: Any, rng: jax.Array, shape: tuple[int, ...], x: Any) -> Tree:
    """The scale and shift that the layer has; None if it has neither."""
    ops.check_floating(f"{layer}", x)
    trainables, dtype = {}, layer.param_dtype or x.dtype
    if layer.scale:
        trainables["scale"] = layer.scale_init(named_key(rng, "scale"), shape, dtype)
    if layer.shift:
        trainables["shift"] = layer.shift_init(named_key(rng, "shift"), shape, dtype)
    return trainables or None


def _unbiased_factor(count: Any, dtype: Any) -> Any:
    """The unbiased variance over the biased one, of `count` elements."""
    if is_static(count):
        return count / max(count - 1, 1)
    count = jnp.asarray(count)
    return (count / jnp.maximum(count - 1, 1)).astype(dtype)
