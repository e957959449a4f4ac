"""One case for each schedule and each of its branches: how to build it, and its values."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

from mlax.optim import schedules
from mlax.optim.schedules import (
    ConstantSchedule,
    Cosine,
    Cyclic,
    Exponential,
    FunctionSchedule,
    InverseSqrt,
    JoinedSchedules,
    LinearSchedule,
    OneCycle,
    PiecewiseConstant,
    PiecewiseLinear,
    Polynomial,
    ScaledSchedule,
    WarmRestarts,
    Warmup,
    WarmupCosine,
    WarmupStableDecay,
)


class Case(NamedTuple):
    make: Callable[[], schedules.Schedule]
    length: int | None
    exact: dict[int, float]  # values at the start, the peak and the end
    reference: Callable[[Any], Any]  # Optax, or the formula in float64
    plotted: bool = False  # by `make test`; Matplotlib takes a second for each


def stable_decay(weight):
    def value(step):
        rise = np.minimum(step / 20, 1.0)
        return np.where(step < 70, 3e-4 * rise, 1e-5 + (3e-4 - 1e-5) * weight(np.clip((step - 70) / 30, 0, 1)))

    return value


def joined(step):
    parts = [optax.linear_schedule(0.0, 1.0, 10), optax.constant_schedule(0.5), optax.cosine_decay_schedule(0.5, 40)]
    return optax.join_schedules(parts, [10, 30])(step)


def sgdr(step):
    turns = [
        {"init_value": high, "peak_value": high, "decay_steps": steps, "warmup_steps": 0}
        for steps, high in [(10, 0.5), (20, 0.4), (40, 0.32)]
    ]
    return optax.sgdr_schedule(turns)(step)


def again(step):
    time = np.minimum(step // 25, 3)
    return 0.5**time * (1 - np.minimum(step - 25 * time, 25) / 25)


def triangles(step):
    cycle, elapsed = np.divmod(step, 30)
    return 0.1 + 0.4 * 0.5**cycle * np.where(elapsed <= 10, elapsed / 10, (30 - elapsed) / 20)


def hyperbola(step):
    return 0.1 / (step + 1)


CASES = {
    "constant": Case(lambda: ConstantSchedule(0.1), 0, {0: 0.1, 7: 0.1}, optax.constant_schedule(0.1)),
    "linear": Case(lambda: LinearSchedule(0.3, 0.1, 49), 49, {0: 0.3, 49: 0.1}, optax.linear_schedule(0.3, 0.1, 49)),
    "polynomial": Case(
        lambda: Polynomial(0.3, 0.01, 49), 49, {0: 0.3, 49: 0.01}, optax.polynomial_schedule(0.3, 0.01, 2.0, 49)
    ),
    "polynomial by a fraction": Case(
        lambda: Polynomial(0.0, 0.7, 60, 0.5), 60, {0: 0.0, 60: 0.7}, optax.polynomial_schedule(0.0, 0.7, 0.5, 60)
    ),
    "cosine": Case(lambda: Cosine(0.3, 49), 49, {0: 0.3, 49: 0.0}, optax.cosine_decay_schedule(0.3, 49)),
    "cosine to": Case(
        lambda: Cosine(0.3, 49, end=0.03), 49, {0: 0.3, 49: 0.03}, optax.cosine_decay_schedule(0.3, 49, 0.1)
    ),
    "exponential": Case(
        lambda: Exponential(0.3, 0.9, every=7), None, {0: 0.3}, optax.exponential_decay(0.3, 7, 0.9, staircase=False)
    ),
    "exponential staircase": Case(
        lambda: Exponential(0.3, 0.5, every=10, staircase=True, end=0.05),
        30,
        {0: 0.3, 9: 0.3, 30: 0.05},
        optax.exponential_decay(0.3, 10, 0.5, staircase=True, end_value=0.05),
    ),
    "exponential growth": Case(
        lambda: Exponential(0.1, 1.1, end=2.0),
        32,
        {0: 0.1, 32: 2.0},
        optax.exponential_decay(0.1, 1, 1.1, end_value=2.0),
    ),
    "steps": Case(
        lambda: PiecewiseConstant(0.1, ((30, 0.1), (60, 0.5))),
        60,
        {0: 0.1, 29: 0.1, 30: 0.1 * 0.1, 59: 0.1 * 0.1, 60: 0.1 * 0.1 * 0.5},
        optax.piecewise_constant_schedule(0.1, {30: 0.1, 60: 0.5}),
    ),
    "straight lines": Case(
        lambda: PiecewiseLinear(((10, 0.1), (30, 0.3), (90, 0.0))),
        90,
        {0: 0.1, 10: 0.1, 30: 0.3, 90: 0.0},
        lambda step: np.interp(step, [10, 30, 90], [0.1, 0.3, 0.0]),
    ),
    "cyclic": Case(lambda: Cyclic(0.1, 0.5, 10, 20, factor=0.5), None, {0: 0.1, 30: 0.1}, triangles),
    "cyclic of one height": Case(
        lambda: Cyclic(0.0, 1.0, 7), None, {0: 0.0, 7: 1.0, 14: 0.0}, lambda step: 1 - abs(step % 14 - 7) / 7
    ),
    "function": Case(lambda: FunctionSchedule(hyperbola), None, {0: 0.1}, hyperbola),
    "warmup cosine": Case(
        lambda: WarmupCosine(3e-4, warmup=10, total=100, start=1e-5, end=2e-5),
        100,
        {0: 1e-5, 10: 3e-4, 100: 2e-5},
        optax.warmup_cosine_decay_schedule(1e-5, 3e-4, 10, 100, 2e-5),
    ),
    "no warmup cosine": Case(
        lambda: WarmupCosine(3e-4, 0, 50), 50, {0: 3e-4, 50: 0.0}, optax.cosine_decay_schedule(3e-4, 50)
    ),
    "stable linear": Case(
        lambda: WarmupStableDecay(3e-4, 20, 100, 30, end=1e-5),
        100,
        {0: 0.0, 20: 3e-4, 70: 3e-4, 100: 1e-5},
        stable_decay(lambda gone: 1 - gone),
    ),
    "stable cosine": Case(
        lambda: WarmupStableDecay(3e-4, 20, 100, 30, end=1e-5, shape="cosine"),
        100,
        {0: 0.0, 20: 3e-4, 70: 3e-4, 100: 1e-5},
        stable_decay(lambda gone: (1 + np.cos(np.pi * gone)) / 2),
    ),
    "stable root": Case(
        lambda: WarmupStableDecay(3e-4, 20, 100, 30, end=1e-5, shape="root"),
        100,
        {0: 0.0, 20: 3e-4, 70: 3e-4, 100: 1e-5},
        stable_decay(lambda gone: 1 - np.sqrt(gone)),
    ),
    "inverse root": Case(
        lambda: InverseSqrt(1e-3, 30),
        None,
        {0: 0.0, 30: 1e-3},
        lambda step: 1e-3 * math.sqrt(30) * np.minimum(np.maximum(step, 1.0) ** -0.5, step * 30**-1.5),
    ),
    "one cycle": Case(
        lambda: OneCycle(0.5, 40, pct_start=0.25, div_factor=10.0, final_div_factor=100.0),
        39,
        {0: 0.05, 9: 0.5, 39: 0.0005},
        lambda step: np.where(
            step <= 9,
            0.5 - 0.45 * (1 + np.cos(np.pi * np.minimum(step, 9) / 9)) / 2,
            0.0005 + 0.4995 * (1 + np.cos(np.pi * (np.clip(step, 9, 39) - 9) / 30)) / 2,
        ),
        plotted=True,
    ),
    "warmup": Case(
        lambda: Warmup(Exponential(0.3, 0.9, every=7), 10, start=0.1),
        None,
        {0: 0.1, 10: 0.3},
        optax.warmup_exponential_decay_schedule(0.1, 0.3, 10, 7, 0.9),
    ),
    "joined": Case(
        lambda: JoinedSchedules(
            ((LinearSchedule(0.0, 1.0, 10), 10), (ConstantSchedule(0.5), 20), (Cosine(0.5, 40), None))
        ),
        70,
        {0: 0.0, 10: 0.5, 30: 0.5, 70: 0.0},
        joined,
    ),
    "joined and cut off": Case(
        lambda: JoinedSchedules(((ConstantSchedule(0.3), 30), (Exponential(0.5, 0.5, every=10), 20))),
        50,
        {0: 0.3, 29: 0.3, 30: 0.5},
        lambda step: np.where(step < 30, 0.3, 0.5 * 0.5 ** ((np.minimum(step, 50) - 30) / 10)),
    ),
    "scaled": Case(
        lambda: ScaledSchedule(Cosine(0.3, 49), -2.0),
        49,
        {0: -0.6, 49: 0.0},
        lambda step: -2.0 * CASES["cosine"].reference(step),
    ),
    "restarts": Case(
        lambda: WarmRestarts(Cosine(0.5, 10), 3, stretch=2, factor=0.8), 70, {0: 0.5, 10: 0.4, 70: 0.0}, sgdr
    ),
    "even restarts": Case(
        lambda: WarmRestarts(LinearSchedule(1.0, 0.0, 25), 4, factor=0.5),
        100,
        {0: 1.0, 25: 0.5, 75: 0.125, 100: 0.0},
        again,
    ),
}
