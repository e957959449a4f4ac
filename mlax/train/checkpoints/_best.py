"""Highest, Lowest: which of the steps is the best, by one of its metrics."""

import math
from collections.abc import Mapping

from mlax.core import frozen


@frozen
class Highest:
    """The step whose metric is the highest; of equals the later one. Where it is missing or NaN, a step is not best."""

    metric: str

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best of some steps, given their metrics."""
        return _best(metrics, self.metric, 1.0)


@frozen
class Lowest:
    """The step whose metric is the lowest; of equals the later one. Where it is missing or NaN, a step is not best."""

    metric: str

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best of some steps, given their metrics."""
        return _best(metrics, self.metric, -1.0)


def _best(metrics: Mapping[int, Mapping[str, float]], name: str, sign: float) -> int | None:
    values = {step: sign * found[name] for step, found in metrics.items() if not math.isnan(found.get(name, math.nan))}
    return max(values, key=lambda step: (values[step], step), default=None)
