"""UpdateContext: what an update knows besides its arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mlax.optim._hyperparams import hyperparam_ranges, hyperparams_at


@dataclasses.dataclass(frozen=True)
class UpdateContext:
    """The moment of an update, as an optimizer hands it to the ones that it wraps."""

    step: jax.Array  # () int32, the updates made before this one
    given: Mapping[str, Any]  # numbers passed to `update`
    factors: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the rate, by path
    value: Any = None
    evaluate: Callable[[Any], Any] | None = None  # weights by path to the loss and its gradients by path
    total: Callable[[jax.Array], jax.Array] = lambda amount: amount  # a sum over the leaves at hand to that over all
    in_pieces: bool = False  # whether the leaves at hand are not all leaves, or not the whole of them

    def numbers(self, optimizer: Any) -> dict[str, Any]:
        """The numbers of an optimizer at this step."""
        return hyperparams_at(optimizer, self.step, self.given)

    def scaled(self, factors: Mapping[str, Any]) -> "UpdateContext":
        """The same moment with the rates of some leaves multiplied."""
        both = {path: factor * self.factors.get(path, 1.0) for path, factor in factors.items()}
        return dataclasses.replace(self, factors={**self.factors, **both})

    def without(self, optimizer: Any) -> "UpdateContext":
        """The same moment without the numbers given to this optimizer, for one inside of it that has the same."""
        return dataclasses.replace(
            self, given={k: v for k, v in self.given.items() if k not in hyperparam_ranges(type(optimizer))}
        )
