"""What each algorithm of `optim` computes, in NumPy and float64, written from the papers.

Each is written for one array `w` and the list of its gradients, and yields `w` after each step. Callers pass dicts of
arrays: `lion(weights, grads, rate=1e-2)`, with `weights` by name and `grads` a list of such dicts, returns the list of
the weights after every step. `decay` acts on every leaf.
"""

from tests.optim.definitions._adaptive import (
    adabelief,
    adafactor,
    adamw,
    adan,
    ademamix,
    lamb,
    lars,
    lion,
    schedule_free,
    sophia_g,
    yogi,
)
from tests.optim.definitions._matrices import (
    galore,
    lbfgs_direction,
    muon,
    soap,
)
from tests.optim.definitions._wrappers import (
    adaptively_clipped_sgd,
    averages,
    lookahead_sgd,
    sam_sgd,
)

__all__ = [
    "adabelief",
    "adafactor",
    "adamw",
    "adan",
    "adaptively_clipped_sgd",
    "ademamix",
    "averages",
    "galore",
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
    "yogi",
]
