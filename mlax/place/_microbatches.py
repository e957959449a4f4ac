"""A batch in several parts, and the parts as a batch again."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax.core import signature


def split_microbatches(batch: Any, number: int, name: str) -> Any:
    """The batch in `number` parts on a leading axis, each of every number-th example.

    So no example leaves the device that holds it, if a device holds as many as there are parts, or a multiple.
    `name` is what the number is called in the error, if it does not divide the batch.
    """

    def split(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0 or leaf.shape[0] % number:
            raise ValueError(
                f"{name} is {number}, but does not divide the batch: {signature(leaf)}; "
                f"take a batch that is a multiple of {number}."
            )
        return jnp.swapaxes(leaf.reshape(leaf.shape[0] // number, number, *leaf.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


def merge_microbatches(parts: Any) -> Any:
    """The batch of which these are the parts."""

    def join(leaf: jax.Array) -> jax.Array:
        return jnp.swapaxes(leaf, 0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])

    return jax.tree.map(join, parts)


def bubble(stages: int, microbatches: int) -> float:
    """The share of its time that a stage waits, while the pipeline fills and drains."""
    return (stages - 1) / (microbatches + stages - 1)
