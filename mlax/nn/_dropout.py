"""Dropout of elements, of channels, of whole examples (stochastic depth), and alpha dropout."""

from dataclasses import KW_ONLY
from typing import Any

import jax

from mlax import ops
from mlax.core import Layer, frozen
from mlax.nn._variables import num_channels
from mlax.ops import alpha_dropout


@frozen
class Dropout(Layer):
    """Set each element to 0 with the probability `rate` and divide the others by `1 - rate`.

    Shape and dtype of the input. The identity in inference mode and at rate 0. https://arxiv.org/abs/1207.0580
    """

    rate: float = 0.5

    def __post_init__(self):
        check_rate(self)

    def init(self, rng, x):
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        key = dropout_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return ops.dropout(x, key, self.rate), non_trainables


def check_rate(layer: Any) -> None:
    """Refuse a `rate` that is no probability."""
    if not 0.0 <= layer.rate <= 1.0:
        raise ValueError(f"{type(layer).__name__}: rate is {layer.rate}, but must be a probability, from 0 to 1.")


def dropout_key(layer: Any, rng: jax.Array | None, inference_mode: bool) -> jax.Array | None:
    """The key to drop by, or None where a layer with a `rate` drops nothing; to have none to drop by is an error."""
    if layer.rate == 0.0 or inference_mode:
        return None
    if rng is None:
        raise ValueError(f"{layer}: there is no key to drop by; pass rng=, or inference_mode=True.")
    return rng


@frozen
class ChannelDropout(Layer):
    """Set each channel of each example to 0 with the probability `rate` and divide the others by `1 - rate`.

    (b, ..., c), with the channels along `axis`; shape and dtype of the input. The identity in inference mode and at
    rate 0. For neighbours that say the same, as in images. https://arxiv.org/abs/1411.4280, section 3.2.
    """

    rate: float = 0.5
    _: KW_ONLY
    axis: int = -1

    def __post_init__(self):
        check_rate(self)

    def init(self, rng, x):
        num_channels(self, x)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        key = dropout_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return ops.dropout(x, key, self.rate, axes=(0, self.axis)), non_trainables


@frozen
class PathDropout(Layer):
    """Set each example to 0 with the probability `rate` and divide the others by `1 - rate`.

    (b, ...), of any rank; shape and dtype of the input. The identity in inference mode and at rate 0. As the last part
    of a residual block it is stochastic depth, https://arxiv.org/abs/1603.09382, with equation 5's factor moved from
    inference to training.
    """

    rate: float = 0.5

    def __post_init__(self):
        check_rate(self)

    def init(self, rng, x):
        if x.ndim == 0:
            raise ValueError(f"{self}: the input is a scalar but needs a batch axis; reshape it to (1,).")
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        key = dropout_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return ops.dropout(x, key, self.rate, axes=(0,)), non_trainables


@frozen
class AlphaDropout(Layer):
    """Set each element to the floor of SELU with the probability `rate`, then scale and shift all of them.

    Inputs of mean 0 and variance 1, which SELU makes, keep both. Shape and dtype of the input. The identity in
    inference mode and at rate 0. https://arxiv.org/abs/1706.02515, section 3.
    """

    rate: float = 0.5

    def __post_init__(self):
        check_rate(self)

    def init(self, rng, x):
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        key = dropout_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return alpha_dropout(x, key, self.rate), non_trainables
