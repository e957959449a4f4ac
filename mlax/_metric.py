"""Metric: a number that is computed from sums over all examples, such as F1, and is not the mean of one per example."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Self, dataclass_transform

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import at_least_float32
from mlax.core import Documented, signature


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Metric(metaclass=Documented):
    """A metric that is not a mean over examples, such as F1: it is computed from weighted sums over all of them.

    An objective returns it beside the loss: `{"loss": loss, "f1": train.F1(predictions, labels, classes=10)}`. The sums
    are taken over microbatches, devices and all batches of an evaluation, weighted by `batch["mask"]`, so padding does
    not count, and the value is computed once, from the totals.

    A subclass is a frozen dataclass and a pytree without further decorators. Positional fields are arrays, and the
    first of them has one value per example, (b,) or (b, t); keyword-only fields are hashable options. It defines two
    methods, `contributions` and `compute`:

        class Variance(train.Metric):
            values: jax.Array  # (b,)

            def contributions(self):
                return {"n": jnp.ones_like(self.values), "sum": self.values, "squares": self.values**2}

            def compute(self, n, sum, squares):
                return squares / n - (sum / n) ** 2
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, repr=False)(cls)
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        arrays = [field.name for field in fields if not field.kw_only]
        options = [field.name for field in fields if field.kw_only]
        jax.tree_util.register_dataclass(cls, arrays, options)

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore
        return f"{type(self).__name__}({', '.join(f'{name}={signature(value)}' for name, value in values.items())})"

    def contributions(self) -> Mapping[str, jax.Array]:
        """What each example adds to each sum, by name: the axes of the examples first, then those of the sum."""
        raise TypeError(f"{type(self).__name__}: define contributions, or override reduce.")

    @abc.abstractmethod
    def compute(self, **sums: Any) -> Any:
        """The value from the sums by name: a scalar, a dict of scalars, or an array, which is not logged.

        Only options can be read from `self`. Sums are arrays of NumPy, in float64, at the end of an evaluation, and of
        JAX otherwise, so operators and `jax.numpy` serve both.
        """

    def reduce(self, weights: jax.Array) -> dict[str, jax.Array]:
        """The weighted sums by name; `weights` has the shape of the examples, in float32.

        Override it instead of `contributions` where these would be large, as for a histogram.
        """
        return {name: _weighted_sum(self, name, value, weights) for name, value in self.contributions().items()}

    def sum(self, mask: jax.Array | None = None) -> "MetricSums":
        """The sums over a batch whose examples, (b,) or (b, t), weigh what `mask` says; without one, 1 each."""
        metric = jax.tree.map(lax.stop_gradient, self)
        leaves, structure = jax.tree.flatten(self)
        return MetricSums(structure.unflatten([None] * len(leaves)), metric.reduce(_weights(metric, leaves[0], mask)))


@jax.tree_util.register_pytree_node_class
class MetricSums(metaclass=Documented):
    """The sums of a metric over examples, a small pytree: `a + b` is that of both, `compute()` the metric of them."""

    def __init__(self, metric: Metric, sums: Mapping[str, Any]):
        self.metric = metric  # its options, without arrays
        self.sums = dict(sums)

    def compute(self) -> Any:
        """The value of the metric."""
        return self.metric.compute(**self.sums)

    def __add__(self, other: Any) -> Self:
        if not isinstance(other, MetricSums) or self.metric != other.metric:
            raise TypeError(f"the sums of {_name(self)} cannot be added to {_name(other)}; add sums of equal metrics.")
        return jax.tree.map(lambda a, b: a + b, self, other)

    def __radd__(self, other: Any) -> Self:
        return self if other == 0 else self + other  # `sum` starts at 0

    def __repr__(self) -> str:
        return f"MetricSums({_name(self)}, {self.sums})"

    def tree_flatten(self) -> tuple[tuple[dict[str, Any]], Metric]:
        """For JAX: the sums, and the options as static data."""
        return (self.sums,), self.metric

    @classmethod
    def tree_unflatten(cls, metric: Metric, leaves: tuple[Any]) -> Self:
        """For JAX: the inverse of `tree_flatten`."""
        made = object.__new__(cls)  # whose sums may be anything, as in `jax.tree.map`
        made.metric, made.sums = metric, leaves[0]
        return made


def compute_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, with the value of a metric for its sums; for a dict, "name/key" for each of its keys."""
    computed: dict[str, Any] = {}
    for name, value in values.items():
        result = value.compute() if isinstance(value, MetricSums) else value
        computed |= (
            {f"{name}/{key}": each for key, each in result.items()} if isinstance(result, dict) else {name: result}
        )
    return computed


def scalar_metrics(values: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The values as `compute_metrics` returns them, without those that are not scalars: only scalars are logged."""
    return {name: jnp.asarray(value) for name, value in compute_metrics(values).items() if jnp.ndim(value) == 0}


def _weights(metric: Metric, values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The weight of each example, with the shape of `values`, the metric's first field."""
    if mask is None:
        return jnp.ones(values.shape, jnp.float32)
    if values.shape[: mask.ndim] != mask.shape:
        raise ValueError(
            f"{type(metric).__name__}: the mask is {signature(mask)}, but the examples are {signature(values)}; the "
            "axes of the mask must be the first axes of the examples."
        )
    weights = mask.astype(jnp.float32).reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return jnp.broadcast_to(weights, values.shape)


def _weighted_sum(metric: Metric, name: str, value: jax.Array, weights: jax.Array) -> jax.Array:
    if value.shape[: weights.ndim] != weights.shape:
        raise ValueError(
            f"{type(metric).__name__}: the contributions {name!r} are {signature(value)}, but their first axes must be "
            f"those of the examples, {weights.shape}."
        )
    value = value.astype(at_least_float32(value.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else jnp.float32)
    each = weights.astype(value.dtype).reshape(weights.shape + (1,) * (value.ndim - weights.ndim))
    return jnp.sum(jnp.where(each != 0, value, 0) * each, tuple(range(weights.ndim)))


def _name(sums: Any) -> str:
    return repr(sums.metric) if isinstance(sums, MetricSums) else signature(sums)
