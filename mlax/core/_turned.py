"""Kernels that are turned before a loop, for its way back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from mlax.core._derivatives import with_derivatives
from mlax.core._fence import fenced
from mlax.core._laid import whole_on_cpu

Function = Callable[[Any, Any], Any]  # of (weights, value)


def turned(weights: Any) -> Any:
    """Each matrix among the weights laid out the other way, for `run_turned`; None for what is no matrix.

    Back through a product one multiplies by the kernel turned. XLA on a CPU reads it as it lies, and takes half as
    long again; in a loop, at every step.
    """
    return jax.tree.map(_turned, weights)


def run_turned(function: Function, weights: Any, turned: Any, value: Any) -> Any:
    """`function(weights, value)`, back through which one multiplies by the matrices as they lie in `turned`."""

    def run(weights: Any, turned: Any, value: Any) -> Any:
        return function(weights, value)

    def by_weights(dot: Any, weights: Any, turned: Any, value: Any) -> Any:
        return jax.jvp(lambda weights: function(weights, value), (weights,), (dot,))[1]

    # checkpoint: else JAX would turn them back before the loop; where it multiplies, XLA does not turn them at all
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def by_value(dot: Any, weights: Any, turned: Any, value: Any) -> Any:
        back = jax.tree.map(lambda leaf, other: leaf if other is None else other.T, weights, turned)
        return jax.jvp(lambda value: function(back, value), (value,), (dot,))[1]

    return with_derivatives(run, by_weights, None, by_value)(weights, turned, value)


def _turned(leaf: jax.Array) -> jax.Array | None:
    return fenced(lax.transpose(leaf, (1, 0))) if leaf.ndim == 2 and whole_on_cpu(leaf) else None
