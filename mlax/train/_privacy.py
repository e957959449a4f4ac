"""Differentially private gradients: clipped for each example, summed, and noised (DP-SGD)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from mlax._jax import at_least_float32, cast_scalar, global_norm, leaves_with_paths, named_key, tree_add
from mlax._objective import MASK
from mlax.core import Documented, Tree, frozen


@frozen
class DifferentialPrivacy(metaclass=Documented):
    """DP-SGD: clip the gradient of each example to the norm `clip`, and add noise of `noise * clip` to their sum.

    The gradient of a step is that sum over the batch size. `noise` is the noise multiplier, from which a privacy
    accountant computes epsilon and delta; it assumes batches that are sampled at random and a fixed batch size, so
    the sum is divided by the batch size with padding. Per-example gradients are computed by `jax.vmap`, `chunk`
    examples at a time; None is the whole batch, whose gradients need as much memory as that many copies of the weights.
    A model whose examples see each other, by batch normalization say, has no gradient of one example and is refused.
    Algorithm 1 of https://arxiv.org/abs/1607.00133
    """

    clip: float  # the largest norm of an example's gradient
    noise: float  # the noise multiplier
    chunk: int | None = dataclasses.field(default=None, kw_only=True)  # examples at a time; None: all

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"DifferentialPrivacy: clip is {self.clip!r}, but must be above 0; pass 1.0, for example.")
        if not self.noise >= 0:
            raise ValueError(f"DifferentialPrivacy: noise is {self.noise!r}, but must be at least 0.")
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise ValueError(f"DifferentialPrivacy: chunk is {self.chunk!r}, but must be an integer of at least 1.")

    def backward(
        self, loss: Any, trainables: Tree, examples: Any, non_trainables: Tree, rngs: jax.Array
    ) -> tuple[Tree, Tree, Tree]:
        """The mean values, the private gradient and the unchanged non_trainables, from one microbatch per example."""
        _refuse_state(non_trainables)
        size = rngs.shape[0]
        chunk = self.chunk or size
        if size % chunk:
            raise ValueError(
                f"DifferentialPrivacy: chunk is {chunk}, which does not divide the batch of {size}; pass a divisor."
            )

        valid = _count_valid(examples, size)

        def one_example(example: Any, rng: jax.Array) -> tuple[Any, Any]:
            (_, (means, _)), grads = jax.value_and_grad(loss, has_aux=True)(trainables, example, non_trainables, rng)
            return means, self._clip_gradient(grads, valid)

        def add_chunk(sums: Any, xs: Any) -> tuple[Any, None]:
            return tree_add(sums, jax.tree.map(lambda leaf: jnp.sum(leaf, 0), jax.vmap(one_example)(*xs))), None

        chunks = jax.tree.map(lambda leaf: leaf.reshape(size // chunk, chunk, *leaf.shape[1:]), (examples, rngs))
        first = jax.tree.map(lambda leaf: leaf[0, 0], chunks)
        shapes = jax.eval_shape(one_example, *first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, at_least_float32(leaf.dtype)), shapes)
        (values, grads), _ = lax.scan(add_chunk, zeros, chunks)
        return values, self._add_noise(grads, named_key(rngs[0], "privacy"), size), non_trainables

    def _clip_gradient(self, grads: Tree, valid: jax.Array) -> Tree:
        """The gradient of one example, from that of its share of the mean loss."""
        grads = jax.tree.map(lambda g: g.astype(at_least_float32(g.dtype)), grads)
        grads = jax.tree.map(lambda g: g * cast_scalar(valid, g), grads)
        norm = global_norm(dict(leaves_with_paths(grads)))
        factor = jnp.minimum(1.0, self.clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        return jax.tree.map(lambda g: g * cast_scalar(factor, g), grads)

    def _add_noise(self, sums: Tree, rng: jax.Array, size: int) -> Tree:
        """The noised sums over the batch size; an independent key for each leaf."""
        leaves, structure = jax.tree.flatten(sums)
        keys = [named_key(rng, path) for path, _ in leaves_with_paths(sums)]
        deviation = self.noise * self.clip
        noised = [
            (leaf + deviation * random.normal(key, leaf.shape, leaf.dtype)) / size
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        return structure.unflatten(noised)


def _count_valid(examples: Any, size: int) -> jax.Array:
    """The number of examples that are not padding."""
    mask = examples.get(MASK) if isinstance(examples, dict) else None
    return jnp.asarray(size) if mask is None else jnp.sum(mask.reshape(size, -1).any(1))


def _refuse_state(non_trainables: Tree) -> None:
    for path, leaf in leaves_with_paths(non_trainables):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"DifferentialPrivacy: the model has the statistic {path!r}, which all examples of a batch change; use "
                "a normalization of single examples, nn.GroupNorm or nn.LayerNorm."
            )
