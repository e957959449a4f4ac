"""Mamba: a selective state-space layer."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mlax import ops
from mlax._jax import named_key
from mlax.core import Composite, DType, Initializer, Layer, Ones, Sub, Uniform, Zeros, frozen, short_repr
from mlax.dtypes import cast
from mlax.nn._linear import Linear


@frozen
class Mamba(Composite):
    """Mamba, a state-space model: a gated linear recurrence over time whose coefficients depend on the input.

    (b, t, d) to (b, t, width), in the dtype of the input; causal. With c = expansion * width: a projection to c
    channels and c gates, a causal depthwise convolution over `window` time steps, silu, the selective scan with
    `states` states per channel, the gate, and a projection to `width`. https://arxiv.org/abs/2312.00752, figure 3,
    algorithm 2.

    Parts: expand, filter, select, step, scan, contract. `rank` is that of the projection to the step sizes, a 16th of
    the width by default. `chunk` time steps are scanned in parallel: a larger chunk takes more memory.

    With `decode=True` each call continues where the one before it ended: the states of the convolution and of the scan
    are in non_trainables, (b, window - 1, c) and (b, c, states), so that a prompt followed by one token per call gives
    the same as all at once.

    >>> layer, x = nn.Mamba(64), jnp.ones((8, 20, 64))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 64)
    """

    width: int  # of the output
    _: KW_ONLY
    states: int = 16  # of each channel
    expansion: int = 2  # hidden channels for each of the width
    window: int = 4  # of the causal convolution
    rank: int | None = None  # of the step sizes; None: a 16th of the width
    chunk: int = 32  # time steps that are scanned in parallel
    decode: bool = False  # whether to keep the state between calls
    accum_dtype: DType = None  # of the scan and its state; None: the input's

    def __post_init__(self):
        for name in ("width", "states", "expansion", "window", "chunk"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"Mamba: {name} is {getattr(self, name)!r}, but must be an integer of at least 1.")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"Mamba: rank is {self.rank}, but must be at least 1, or None for a 16th of the width.")

    def parts(self) -> Mapping[str, Layer]:
        channels, rank = self.expansion * self.width, self._rank()
        return {
            "expand": Linear(2 * channels, bias=False),
            "filter": CausalFilter(self.window, decode=self.decode),
            "select": Linear(rank + 2 * self.states, bias=False),
            "step": Linear(channels, kernel_init=Uniform(rank**-0.5), bias_init=StepSizes()),
            "scan": SelectiveScan(chunk=self.chunk, decode=self.decode, accum_dtype=self.accum_dtype),
            "contract": Linear(self.width, bias=False),
        }

    def wire(self, sub: Sub, x: Any) -> Any:
        if x.ndim != 3:
            raise ValueError(f"{short_repr(self)}: the input has the shape {x.shape}, but must be (b, t, d).")
        rank = self._rank()
        x, gate = jnp.split(sub.expand(x), 2, axis=-1)  # each (b, t, c)
        x = jax.nn.silu(sub.filter(x))
        step, write, read = jnp.split(sub.select(x), (rank, rank + self.states), axis=-1)
        step = jax.nn.softplus(sub.step(step))  # (b, t, c)
        y = sub.scan({"x": x, "step": step, "write": write, "read": read})
        return sub.contract(y * jax.nn.silu(gate))

    def _rank(self) -> int:
        return self.rank or -(-self.width // 16)


@frozen
class CausalFilter(Layer):
    """Convolve each channel over the current and the `window - 1` previous time steps: (b, t, c) to the same.

    Trainables: kernel (window, c), the current time step last, and bias (c,). With `decode`, non-trainables: window,
    the previous inputs (b, window - 1, c), initially zero.
    """

    window: int
    _: KW_ONLY
    decode: bool = False
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        (b, _, c), dtype = x.shape, self.param_dtype or x.dtype
        kernel = Uniform(self.window**-0.5)(named_key(rng, "kernel"), (self.window, c), dtype)
        state = {"window": jnp.zeros((b, self.window - 1, c), x.dtype)} if self.decode else None
        return {"kernel": kernel, "bias": Zeros()(named_key(rng, "bias"), (c,), dtype)}, state

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x.dtype)
        if non_trainables is None:
            return ops.causal_filter(x, **weights)[0], None
        before = non_trainables["window"]
        y, after = ops.causal_filter(x, **weights, before=cast(before, x.dtype))
        return y, {"window": cast(after, before.dtype)}


@frozen
class SelectiveScan(Layer):
    """Run the recurrence of `ops.selective_scan` over a dict of x and step (b, t, c), write and read (b, t, n).

    (b, t, c) out. Trainables: log_rate (c, n), the logarithms of the negated rates, initially log 1 to log n
    (S4D-real), and skip (c,). With `decode`, non-trainables: state (b, c, n), in `accum_dtype`, initially zero.
    """

    has_statistics: ClassVar[bool] = True  # the state is a long sum

    _: KW_ONLY
    chunk: int = 32
    decode: bool = False
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        (b, _, c), n, dtype = x["x"].shape, x["write"].shape[-1], self.param_dtype or x["x"].dtype
        # by NumPy, since XLA's logarithm of a constant may differ by a bit from that of an array
        log_rate = jnp.asarray(np.broadcast_to(np.log(np.arange(1, n + 1)), (c, n)).astype(jnp.dtype(dtype)))
        state = {"state": jnp.zeros((b, c, n), self.accum_dtype or x["x"].dtype)} if self.decode else None
        return {"log_rate": log_rate, "skip": Ones()(named_key(rng, "skip"), (c,), dtype)}, state

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        weights = cast(trainables, x["x"].dtype)
        options = {"chunk": self.chunk, "accum_dtype": self.accum_dtype}
        if non_trainables is None:
            return ops.selective_scan(**x, **weights, **options)[0], None
        before = non_trainables["state"]
        y, after = ops.selective_scan(**x, **weights, state=cast(before, self.accum_dtype or x["x"].dtype), **options)
        return y, {"state": cast(after, before.dtype)}


@frozen
class StepSizes(Initializer):
    """Biases whose softplus, the initial step size, is log-uniform from `low` to `high`.

    https://arxiv.org/abs/2312.00752, section 3.6.
    """

    low: float = 1e-3
    high: float = 1e-1

    def __call__(self, rng, shape, dtype, *, in_axis=-2, out_axis=-1):
        uniform = Uniform(0.5)(rng, shape, dtype) + 0.5
        size = self.low * (self.high / self.low) ** uniform
        return size + jnp.log(-jnp.expm1(-size))  # the inverse of softplus
