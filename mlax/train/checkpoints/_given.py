"""What a caller gives to checkpoints, checked before anything is done with it."""

import json
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlax.core import signature
from mlax.train.checkpoints._best import Highest, Lowest


def whole(step: Any) -> int:
    """The step as an int."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:  # an array has an index too, but only one of a single int can give it
        number = -1
    if not 0 <= number < 10**18:
        words = "a whole number is wanted; write save(int(state.step), state)"
        raise ValueError(f"save: the step is {_said(step)}, but {words}.")
    return number


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as floats."""
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as failure:
        raise TypeError(f"save: metrics are single numbers by name ({failure}); put anything else in notes.") from None


def as_json(notes: Mapping[str, Any]) -> Any:
    """The notes as JSON gives them back."""
    try:
        return json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as failure:
        raise TypeError(f"save: notes are what JSON can hold ({failure}); save arrays in the tree.") from None


def check_best(best: Any) -> None:
    """Refuse what does not say which step is the best: a name alone leaves open whether high or low is good."""
    if not isinstance(best, Highest | Lowest | None):
        name = best if isinstance(best, str) else "loss"
        wanted = f"best=train.Lowest({name!r}) or best=train.Highest({name!r})"
        raise TypeError(f"Checkpoints: best is {_said(best)}, but is to say what is good; pass {wanted}.")


def _said(given: Any) -> str:
    """What came, in short: a whole state would fill the screen."""
    words = repr(given) if np.isscalar(given) else signature(given)
    return words if len(words) <= 60 else f"a {type(given).__name__}"
