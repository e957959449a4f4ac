"""What each algorithm of `optim` computes, in NumPy and float64, written from the papers.

Each is said for one array `w` and the list of its gradients, and gives `w` after each step. From outside it takes
dicts of arrays: `lion(weights, grads, rate=1e-2)`, with `weights` by name and `grads` a list of such dicts, gives the
list of the weights after every step. `decay` acts on every leaf that it is given.
"""

from tests.optim.definitions._adaptive import (
    adabelief,
    adafactor,
    adamw,
    ademamix,
    lamb,
    lars,
    lion,
    schedule_free,
    sophia_g,
)
from tests.optim.definitions._around import (
    adaptively_clipped_sgd,
    averages,
    lookahead_sgd,
    sam_sgd,
)
from tests.optim.definitions._matrices import (
    lbfgs_direction,
    muon,
    soap,
)

__all__ = [
    "adabelief",
    "adafactor",
    "adamw",
    "adaptively_clipped_sgd",
    "ademamix",
    "averages",
    "lamb",
    "lars",
    "lbfgs_direction",
    "lion",
    "lookahead_sgd",
    "muon",
    "sam_sgd",
    "schedule_free",
    "soap",
    "sophia_g",
]
