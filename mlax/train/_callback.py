"""The callback of `fit`: a function of the user that sees the state and may stop the run, in all processes alike."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mlax.train._state import TrainState
from mlax.train.checkpoints._multiprocess import gather_texts

Each = Callable[[int, TrainState, dict[str, float], dict[str, float]], bool | str | None]

FAILED = "\x00failed"  # no reason to stop starts with a zero
MAX_REASON = 400  # characters


class Callback:
    """The function passed as `each`, and every how many steps it is called."""

    def __init__(self, function: Each, every: int):
        self.function, self.every = function, every

    def is_due(self, before: int, now: int) -> bool:
        """Whether a multiple of `every` is among the steps of a call, from `before` to `now`."""
        return now // self.every > before // self.every

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, float], scores: Mapping[str, float]) -> str:
        """Call the function; returns why to stop, or an empty string: the same in all processes.

        If it raises in one process, it does in all of them, since none can continue, or save, alone.
        """
        outcome, error = "", None
        try:
            outcome = _read_answer(self.function(step, state, dict(metrics), dict(scores)))
        except (Exception, SystemExit) as raised:
            outcome, error = FAILED, raised
        outcomes = gather_texts(outcome, jax.process_count())
        if FAILED in outcomes:
            raise error or RuntimeError(
                f"each: process {outcomes.index(FAILED)} failed at step {step}; see its output."
            )
        return next(filter(None, outcomes), "")


def _read_answer(answer: Any) -> str:
    if answer is None or isinstance(answer, bool | np.bool_):
        return "each returned True" if answer else ""
    if isinstance(answer, str):
        return answer[:MAX_REASON].replace("\x00", "")
    raise TypeError(
        f"fit: each returned a {type(answer).__name__}, but must return True, or the reason as a str, to stop, or None "
        "or False to continue; of an array, return bool(...)."
    )


def check_callback(function: Any) -> None:
    """Refuse what cannot be called as each(step, state, metrics, scores)."""
    if function is None:
        return
    if not callable(function):
        raise TypeError(
            f"fit: each is a {type(function).__name__}, but must be a function each(step, state, metrics, scores); one "
            "function may call several."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    try:
        signature.bind(0, None, {}, {})
    except TypeError:
        raise TypeError(
            f"fit: each is called as each(step, state, metrics, scores), but takes {signature}; add the arguments that "
            "are missing."
        ) from None
