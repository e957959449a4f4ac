"""SAM: gradients from where the loss is worst nearby."""

from mlax._jax import cast_scalar, global_norm
from mlax.core import frozen
from mlax.optim._around import Around
from mlax.optim._numbers import Amount


@frozen
class SAM(Around):
    """The optimizer sees the gradient at `w + radius * g / |g|`, the highest point of the neighbourhood, in place of g.

    `update` needs the loss: `update(grads, state, trainables, loss=function of the trainables)`. It costs one more
    gradient. Algorithm 1 of https://arxiv.org/abs/2010.01412
    """

    radius: Amount = 0.05

    def advance(self, now, grads, weights, slots):
        if now.evaluate is None:
            raise TypeError("SAM: update needs the loss, to differentiate it elsewhere: update(..., loss=loss).")
        size = global_norm(grads)
        way = cast_scalar(now.numbers(self)["radius"], size) / (size + 1e-12)
        _, worst = now.evaluate({path: weights[path] + way.astype(g.dtype) * g for path, g in grads.items()})
        return self.optimizer.advance(now, {path: worst[path] for path in grads}, weights, slots)
