"""Average: a moving average of the weights, to evaluate with."""

import jax.numpy as jnp

from mlax._jax import cast_scalar, widest_dtype
from mlax.core import DType, frozen
from mlax.optim._around import Around
from mlax.optim._moving_average import average
from mlax.optim._numbers import Beta
from mlax.optim._optimizer import Advanced
from mlax.optim._slot import Slot


@frozen
class Average(Around):
    """`averaged` gives the mean of the weights after each step: exponential, by `decay`, or with `decay=None` of all.

    It begins with the step `start`; before, it is the weights themselves. What came before its beginning leaves no
    trace: the exponential one is corrected as Adam's are. Slot: average, in `dtype`. https://doi.org/10.1137/0330046
    """

    elementwise = True
    decay: Beta | None = 0.999
    start: int = 0
    dtype: DType = None  # None: that of the weights, or float32 if that is narrower

    def adds(self, path, w):
        return {"average": Slot(dtype=self.dtype, copies=True, wide=True)}

    def advance(self, now, grads, weights, slots):
        new, after = self.optimizer.advance(now, grads, weights, slots)
        seen = jnp.maximum(now.step - self.start, 0).astype(widest_dtype(g.dtype for g in grads.values()))
        keep = seen / (seen + 1)
        if self.decay is not None:
            decay = cast_scalar(now.numbers(self)["decay"], seen)
            keep = decay * jnp.expm1(seen * jnp.log(decay)) / jnp.expm1((seen + 1) * jnp.log(decay))
        means = {path: average(slots["average"][path], w, keep.astype(w.dtype)) for path, w in new.items()}
        return Advanced(new, {**after, "average": means})

    def shows(self, path, w, slots, step):
        return slots["average"]
