"""PathDropout: noise that sets whole examples to zero while training, so that their path through a block is cut."""

from mlax import ops
from mlax.core import Layer, frozen
from mlax.nn._dropout import check_rate, drop_key


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
        key = drop_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return ops.dropout(x, key, self.rate, axes=(0,)), non_trainables
