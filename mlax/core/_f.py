"""F: a plain function as a layer."""

import inspect
from collections.abc import Callable
from typing import Any

from mlax.core._frozen import frozen
from mlax.core._layer import Layer
from mlax.core._notes import brief


@frozen
class F(Layer):
    """Apply a function of the input: `F(jax.nn.relu)`.

    A function with a parameter named `rng` or `inference_mode` is given that too, by name. Functions are equal
    when they are the same object: name a function rather than write a lambda anew in each description.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if isinstance(self.function, Layer):
            raise TypeError(f"F: {self.function} is a layer already; use it as it is.")
        if not callable(self.function):
            raise TypeError(f"F: {self.function!r} is not a function; F takes a function of the input.")

    def init(self, rng, x):
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        offered = {"rng": rng, "inference_mode": inference_mode}
        given = {name: value for name, value in offered.items() if name in _parameters(self.function)}
        if rng is None and "rng" in given and "inference_mode" not in given:
            raise ValueError(f"{brief(self)}: the function takes a key and there is none; pass rng= to fwd.")
        return self.function(x, **given), non_trainables


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return set()
