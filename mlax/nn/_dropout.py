"""Dropout: noise that sets elements to zero while training."""

from mlax import ops
from mlax.core import Layer, frozen


@frozen
class Dropout(Layer):
    """Set each element to 0 with the probability `rate` and divide the others by `1 - rate`.

    Shape and dtype of the input. The identity in inference mode and at rate 0. https://arxiv.org/abs/1207.0580
    """

    rate: float = 0.5

    def __post_init__(self):
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"Dropout: rate is {self.rate}, but must be a probability, from 0 to 1.")

    def init(self, rng, x):
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        if self.rate == 0.0 or inference_mode:
            return x, non_trainables
        if rng is None:
            raise ValueError(f"{self}: there is no key to drop by; pass rng=, or inference_mode=True.")
        return ops.dropout(x, rng, self.rate), non_trainables
