"""MoE: a mixture of experts, of which each token is routed to a few."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.lax import PrecisionLike

from mlax import ops
from mlax._jax import named_key
from mlax.core import Composite, DType, Initializer, Layer, Map, Size, Sub, check_layer, frozen, lecun, short_repr
from mlax.dtypes import cast


@frozen
class MoE(Composite):
    """A mixture of experts (MoE): each token goes to the `k` experts that a router chooses; their outputs are summed by
    gates.

    (b, ..., d) to ((b, ..., f), {"balance": (b,), "z": (b,)}): the output, and the router's two losses, to be added to
    the training loss with small factors such as 0.01 and 0.001. The tokens of one row of the batch, over all axes
    between the first and the last, are routed together; to route all rows together, make them one.
    The output has the dtype of the input, the losses have `accum_dtype`.

    `expert` is any layer from (b, n, d) to (b, n, f). Parts: router, with kernel (d, experts), and experts, the
    variables of `expert` with a leading axis of `experts`, under the name "stacked".

    An expert takes at most `capacity_factor` times an equal share of the tokens, rounded up, in the order of the
    tokens. A token gets 0 from an expert that is full, so use a residual connection around the layer. With
    `capacity_factor=None` no token is dropped, and each expert computes all tokens, which costs `experts / k` times as
    much. Switch Transformer: https://arxiv.org/abs/2101.03961, section 2.

    `noise` multiplies the router's input, while training, by uniform samples from 1 - noise to 1 + noise.

    >>> layer, x = nn.MoE(nn.MLP((128, 64)), experts=8, k=2), jnp.ones((8, 20, 64))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> (y, losses), non_trainables = layer.fwd(x, trainables, non_trainables)
    >>> y.shape
    (8, 20, 64)
    """

    has_statistics: ClassVar[bool] = True  # the router's softmax

    expert: Layer  # the layer that each expert is
    experts: Size  # how many
    _: KW_ONLY
    k: Size = 2  # experts of each token
    capacity_factor: float | None = 1.25  # the most tokens of an expert over its equal share; None: all
    renormalize: bool = True  # divide the gates of a token by their sum, where k > 1
    noise: float = 0.0  # of the router's scores, in training
    precision: PrecisionLike = None  # of the router
    accum_dtype: DType = None  # of the router; None: the input's

    def __post_init__(self):
        check_layer("MoE", "expert", self.expert)
        if not 1 <= self.k <= self.experts:
            raise ValueError(f"MoE: k is {self.k}, but must be from 1 to the number of experts, {self.experts}.")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(
                f"MoE: capacity_factor is {self.capacity_factor}, but must be above 0, or None for no limit."
            )
        if not 0.0 <= self.noise < 1.0:
            raise ValueError(f"MoE: noise is {self.noise}, but must be at least 0 and below 1.")

    def parts(self) -> Mapping[str, Layer]:
        router = Router(self.experts, noise=self.noise, precision=self.precision, accum_dtype=self.accum_dtype)
        return {"router": router, "experts": Map(self.expert, axis=1, variables=0)}

    def wire(self, sub: Sub, x: Any) -> Any:
        if x.ndim < 3:
            raise ValueError(
                f"{short_repr(self)}: the input has the shape {x.shape}, but must be (b, ..., d), with tokens to "
                "route between the first axis and the last; x[None] routes all rows together."
            )
        b, t, d = x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]
        tokens = x.reshape(b, t, d)
        routes = ops.route(sub.router(tokens), self.k, renormalize=self.renormalize)
        if self.capacity_factor is None:
            size = t
            slot = routes.expert * t + jnp.arange(t, dtype=jnp.int32)[None, :, None]
            expert_in = jnp.broadcast_to(tokens[:, None], (b, self.experts, t, d))
        else:
            size = ops.expert_capacity(t, self.experts, self.k, self.capacity_factor)
            slot = ops.expert_slots(routes.expert, self.experts, size)
            expert_in = ops.dispatch(tokens, slot, self.experts * size).reshape(b, self.experts, size, d)
        expert_out = sub.experts(expert_in)  # (b, experts, size, f)
        if expert_out.shape[:-1] != expert_in.shape[:-1]:
            raise ValueError(
                f"{short_repr(self)}: the experts map {expert_in.shape} to {expert_out.shape}, where the second axis "
                "is the experts; they may change only the last axis."
            )
        expert_out = expert_out.reshape(b, self.experts * size, expert_out.shape[-1])
        y = ops.combine(expert_out, slot, cast(routes.gate, x.dtype))
        return y.reshape(*x.shape[:-1], y.shape[-1]), {"balance": routes.balance, "z": routes.z}


@frozen
class Router(Layer):
    """Compute the logits of each token for the experts: (b, t, d) to (b, t, experts), in `accum_dtype`.

    Trainables: kernel (d, experts).
    """

    experts: Size
    _: KW_ONLY
    noise: float = 0.0
    kernel_init: Initializer = lecun()
    precision: PrecisionLike = None
    accum_dtype: DType = None  # None: the input's
    param_dtype: DType = None  # None: the input's

    def init(self, rng, x):
        shape, dtype = (x.shape[-1], self.experts), self.param_dtype or x.dtype
        return {"kernel": self.kernel_init(named_key(rng, "kernel"), shape, dtype)}, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x = cast(x, self.accum_dtype)
        if self.noise and not inference_mode:
            if rng is None:
                raise ValueError(f"{short_repr(self)}: noise needs a key; pass rng=, or inference_mode=True.")
            x = ops.jitter(x, rng, self.noise)
        return ops.linear(x, cast(trainables["kernel"], x.dtype), precision=self.precision), non_trainables
