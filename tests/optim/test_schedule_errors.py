"""Errors of schedules say what is wrong and what is needed."""

import math
import sys

import jax.numpy as jnp
import pytest

from mlax.optim.schedules import (
    ConstantSchedule,
    Cosine,
    Exponential,
    InverseSqrt,
    JoinedSchedules,
    LinearSchedule,
    OneCycle,
    PiecewiseConstant,
    Polynomial,
    ScaledSchedule,
    WarmRestarts,
    Warmup,
    WarmupCosine,
    WarmupStableDecay,
)

LAST = 2**31 - 1

BAD = {
    "no number": (lambda: ConstantSchedule("0.1"), "value is '0.1', but must be a finite"),
    "not finite": (lambda: ConstantSchedule(math.nan), "value is nan, but must be a finite"),
    "infinite": (lambda: LinearSchedule(0.1, math.inf, 5), "end is inf, but must be a finite"),
    "too large for float32": (lambda: Cosine(1e39, 5), "start is 1e\\+39, but must be a finite float32"),
    "a truth": (lambda: ScaledSchedule(ConstantSchedule(1.0), True), "factor is True, but must be a finite"),
    "steps of float": (lambda: LinearSchedule(0.1, 0.0, 1e4), "steps is 10000.0, but must be an integer from 1"),
    "no steps": (lambda: Cosine(0.1, 0), "steps is 0, but must be an integer from 1"),
    "too many steps": (lambda: Cosine(0.1, 2**31), "steps is 2147483648, but must be an integer"),
    "power": (lambda: Polynomial(0.1, 0.0, 5, 0), "power is 0, but must be more than 0"),
    "growth without bound": (lambda: Exponential(0.1, 2.0), "grows without bound; pass end="),
    "no growth": (lambda: Exponential(0.1, 1.0), "factor is 1, which changes nothing; use Constant"),
    "negative factor": (lambda: Exponential(0.1, -0.5), "factor is -0.5, but must be more than 0"),
    "floor above": (lambda: Exponential(0.1, 0.5, end=0.2), "end is 0.2, but it decays from 0.1"),
    "ceiling below": (lambda: Exponential(0.1, 2.0, end=0.05), "end is 0.05, but it grows from 0.1"),
    "staircase": (lambda: Exponential(0.1, 0.5, staircase=1), "staircase is 1, but must be True or False"),
    "no drops": (lambda: PiecewiseConstant(0.1, ()), r"drops is \(\), but must be pairs"),
    "drops unpaired": (lambda: PiecewiseConstant(0.1, (30, 60)), r"drops is \(30, 60\), but must be pairs"),
    "drops unordered": (
        lambda: PiecewiseConstant(0.1, ((60, 0.1), (30, 0.1))),
        r"are at \(60, 30\), but must ascend",
    ),
    "a drop at 0": (
        lambda: PiecewiseConstant(0.1, ((0, 0.1),)),
        r"one of the drops is \(0, 0.1\), but must be a step from 1",
    ),
    "drops that overflow": (lambda: PiecewiseConstant(1e30, ((1, 1e30),)), "which float32 cannot hold; lower a factor"),
    "warmup to the end": (lambda: WarmupCosine(0.1, 10, 10), "warmup is 10, but must be less than total, 10"),
    "decay too long": (lambda: WarmupStableDecay(0.1, 10, 15, 6), "together more than total, 15"),
    "shape": (lambda: WarmupStableDecay(0.1, 1, 9, 2, shape="square"), "shape is 'square', but must be one of linear"),
    "no warmup": (lambda: InverseSqrt(0.1, 0), "warmup is 0, but must be an integer from 1"),
    "all rise": (lambda: OneCycle(0.1, 10, pct_start=1.0), "pct_start is 1.0 of 10 steps, but must be less than all"),
    "no rise": (lambda: OneCycle(0.1, 3), "pct_start is 0.3 of 3 steps, but must be less than all of them and more"),
    "div_factor of 0": (lambda: OneCycle(0.1, 10, div_factor=0.0), "div_factor is 0.0, but must be more than 0"),
    "a div_factor that overflows": (
        lambda: OneCycle(0.1, 10, div_factor=1e-44),
        "float32 cannot hold; raise div_factor or final_div_factor",
    ),
    "a number for a schedule": (lambda: Warmup(0.1, 5), "0.1 is not a schedule"),
    "a class for a schedule": (lambda: ScaledSchedule(Cosine, 2.0), "is not a schedule; pass one"),
    "warmup too long": (lambda: Warmup(Cosine(0.1, LAST), 1), "has 2147483648 steps, but the last step is"),
    "no parts": (lambda: JoinedSchedules(()), r"parts is \(\), but must be pairs"),
    "no schedule in a part": (lambda: JoinedSchedules(((0.1, 5),)), "0.1 is not a schedule"),
    "endless in the middle": (
        lambda: JoinedSchedules(((ConstantSchedule(0.1), None), (ConstantSchedule(0.2), 5))),
        "part 0 has None steps, but must have an integer",
    ),
    "parts too long": (
        lambda: JoinedSchedules(
            ((ConstantSchedule(0.1), LAST), (ConstantSchedule(0.1), 9), (InverseSqrt(1.0, 1), None))
        ),
        "its last part starts at 2147483656",
    ),
    "restarts without end": (lambda: WarmRestarts(InverseSqrt(0.1, 5), 2), "has no end to restart at"),
    "restarts of a constant": (lambda: WarmRestarts(ConstantSchedule(0.1), 2), "has no end to restart at"),
    "restarts too long": (lambda: WarmRestarts(Cosine(0.1, 2**20), 12, stretch=2), "has 4293918720 steps"),
    "restarts too often": (lambda: WarmRestarts(Cosine(0.1, 1), 10**9, stretch=2), "more steps than an int32 counts"),
    "restarts half as long": (
        lambda: WarmRestarts(Cosine(0.1, 8), 2, stretch=0.5),
        "stretch is 0.5, but must be an integer",
    ),
    "restarts too high": (
        lambda: WarmRestarts(Cosine(0.1, 8), 999, factor=10.0),
        "cannot hold after 999 times",
    ),
    "negative values": (lambda: ConstantSchedule(0.1).values(-1), "steps is -1, but must be at least 0"),
    "endless table": (lambda: InverseSqrt(0.1, 5).table(), "has no last step; pass steps="),
    "endless text plot": (lambda: Exponential(0.1, 0.5).plot_text(), "has no last step; pass steps="),
    "endless plot": (lambda: Exponential(0.1, 0.5).plot("never.png"), "has no last step; pass steps="),
    "steps of a table": (lambda: ConstantSchedule(0.1).table(0), "steps is 0, but must be an integer from 1"),
    "rows": (lambda: Cosine(0.1, 5).table(rows=1), "rows is 1, but must be an integer of at least 2"),
    "width": (lambda: Cosine(0.1, 5).plot_text(width=0), "width and height are 0 and 8, but must be integers"),
    "step of float": (lambda: Cosine(0.1, 5)(1.0), "the step is float64, but must be an integer"),
    "step of bool": (lambda: Cosine(0.1, 5)(jnp.zeros(3, bool)), "the step is bool, but must be an integer"),
    "an array": (lambda: ConstantSchedule(jnp.float32(0.1)), "field `value` is an array"),
    "a list": (lambda: PiecewiseConstant(0.1, [(30, 0.1)]), "field `drops` is a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_arguments_are_errors_that_say_what_is_needed(name):
    act, words = BAD[name]
    with pytest.raises((TypeError, ValueError), match=words):
        act()


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install mlax\[demo\]"):
        Cosine(0.1, 5).plot(tmp_path / "schedule.png")
