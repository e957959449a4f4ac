"""SGD: stochastic gradient descent, with momentum or without."""

from mlax.core import frozen
from mlax.optim._leafwise import Leafwise
from mlax.optim._numbers import Beta, Rate
from mlax.optim._slot import Slot


@frozen
class SGD(Leafwise):
    """`w - rate * g`; with momentum, `m = momentum * m + g` in place of g; with Nesterov's, `g + momentum * m`.

    Slot, if there is a momentum: momentum. https://proceedings.mlr.press/v28/sutskever13.html
    """

    elementwise = True
    rate: Rate
    momentum: Beta = 0.0
    nesterov: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ValueError("SGD: nesterov needs a momentum; pass momentum=0.9, say.")

    def keeps(self, path, w):
        return {} if self.momentum == 0 else {"momentum": Slot()}

    def step(self, now, g, w, slots):
        if not slots:
            return w - now.rate * g, {}
        m = now.momentum * slots["momentum"] + g
        return w - now.rate * (g + now.momentum * m if self.nesterov else m), {"momentum": m}
