"""The learning rate at a step, for people to watch."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax.optim import Accumulate, Optimizer, ranges, values_of


def rate(optimizer: Optimizer, step: jax.Array) -> jax.Array | None:
    """That of the outermost optimizer which has one, at one of its own steps; None if none has."""
    if "rate" in ranges(type(optimizer)):
        return jnp.asarray(values_of(optimizer, step, {})["rate"], jnp.float32)
    if isinstance(optimizer, Accumulate):
        step = step // optimizer.every
    found: list[Any] = [rate(inner, step) for inner in optimizer.within()]
    return next((each for each in found if each is not None), None)
