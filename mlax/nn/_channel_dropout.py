"""ChannelDropout: noise that sets whole channels to zero while training."""

from dataclasses import KW_ONLY

from mlax import ops
from mlax.core import Layer, frozen
from mlax.nn._channels import channels
from mlax.nn._dropout import check_rate, drop_key


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
        channels(self, x)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        key = drop_key(self, rng, inference_mode)
        if key is None:
            return x, non_trainables
        return ops.dropout(x, key, self.rate, axes=(0, self.axis)), non_trainables
