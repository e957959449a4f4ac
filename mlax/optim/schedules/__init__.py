"""Schedules: values that depend on the step, such as a learning rate with a warm-up."""

from mlax.optim.schedules._base import Schedule
from mlax.optim.schedules._composed import JoinedSchedules, ScaledSchedule, WarmRestarts
from mlax.optim.schedules._curves import (
    ConstantSchedule,
    Cosine,
    Exponential,
    LinearSchedule,
    PiecewiseConstant,
    Polynomial,
)
from mlax.optim.schedules._warmup import InverseSqrt, OneCycle, Warmup, WarmupCosine, WarmupStableDecay

__all__ = [
    "ConstantSchedule",
    "Cosine",
    "Exponential",
    "InverseSqrt",
    "JoinedSchedules",
    "LinearSchedule",
    "OneCycle",
    "PiecewiseConstant",
    "Polynomial",
    "ScaledSchedule",
    "Schedule",
    "WarmRestarts",
    "Warmup",
    "WarmupCosine",
    "WarmupStableDecay",
]
