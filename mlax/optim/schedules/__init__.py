"""Schedules: values that depend on the step, such as a learning rate with a warm-up."""

from mlax.optim.schedules._base import Schedule
from mlax.optim.schedules._composed import JoinedSchedules, ScaledSchedule, WarmRestarts
from mlax.optim.schedules._curves import (
    ConstantSchedule,
    Cosine,
    Cyclic,
    Exponential,
    FunctionSchedule,
    LinearSchedule,
    PiecewiseConstant,
    PiecewiseLinear,
    Polynomial,
)
from mlax.optim.schedules._warmup import InverseSqrt, OneCycle, Warmup, WarmupCosine, WarmupStableDecay

__all__ = [
    "ConstantSchedule",
    "Cosine",
    "Cyclic",
    "Exponential",
    "FunctionSchedule",
    "InverseSqrt",
    "JoinedSchedules",
    "LinearSchedule",
    "OneCycle",
    "PiecewiseConstant",
    "PiecewiseLinear",
    "Polynomial",
    "ScaledSchedule",
    "Schedule",
    "WarmRestarts",
    "Warmup",
    "WarmupCosine",
    "WarmupStableDecay",
]
