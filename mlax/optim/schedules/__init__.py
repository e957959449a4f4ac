"""Schedules: numbers that change with the step, such as a learning rate with a warmup."""

from mlax.optim.schedules._constant import Constant
from mlax.optim.schedules._cosine import Cosine
from mlax.optim.schedules._exponential import Exponential
from mlax.optim.schedules._inverse_root import InverseRoot
from mlax.optim.schedules._joined import Joined
from mlax.optim.schedules._one_cycle import OneCycle
from mlax.optim.schedules._polynomial import Linear, Polynomial
from mlax.optim.schedules._restarts import Restarts
from mlax.optim.schedules._scaled import Scaled
from mlax.optim.schedules._schedule import Schedule
from mlax.optim.schedules._steps import Steps
from mlax.optim.schedules._warmup import Warmup
from mlax.optim.schedules._warmup_cosine import WarmupCosine
from mlax.optim.schedules._warmup_stable_decay import WarmupStableDecay

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "InverseRoot",
    "Joined",
    "Linear",
    "OneCycle",
    "Polynomial",
    "Restarts",
    "Scaled",
    "Schedule",
    "Steps",
    "Warmup",
    "WarmupCosine",
    "WarmupStableDecay",
]
