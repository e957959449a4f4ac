"""AlphaDropout: the dropout that belongs to SELU."""

from mlax.core import Layer, frozen
from mlax.nn._dropout import check_rate, drop_key
from mlax.ops import alpha_dropout


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
        key = drop_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return alpha_dropout(x, key, self.rate), non_trainables
