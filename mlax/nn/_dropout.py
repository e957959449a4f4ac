"""Dropout: noise that sets elements to zero while training."""

from typing import Any

import jax

from mlax import ops
from mlax.core import Layer, frozen


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
        key = drop_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return ops.dropout(x, key, self.rate), non_trainables


def check_rate(layer: Any) -> None:
    """Refuse a `rate` that is no probability."""
    if not 0.0 <= layer.rate <= 1.0:
        raise ValueError(f"{type(layer).__name__}: rate is {layer.rate}, but must be a probability, from 0 to 1.")


def drop_key(layer: Any, rng: jax.Array | None, inference_mode: bool) -> jax.Array | None:
    """The key to drop by, or None where a layer with a `rate` drops nothing; to have none to drop by is an error."""
    if layer.rate == 0.0 or inference_mode:
        return None
    if rng is None:
        raise ValueError(f"{layer}: there is no key to drop by; pass rng=, or inference_mode=True.")
    return rng
