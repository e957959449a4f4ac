"""One stage of a pipeline: what it does with a microbatch, forward and backward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax import at_least_float32
from mlax.place._cut import Cut
from mlax.place._inexact import inexact

By = dict[int, Any]  # leaves by their place among all inputs of the loss
Leaves = list[Any]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage while it runs: its number, which is traced, and all that it has.

    A microbatch is named by its index; one below zero or too large stands for none, and what is computed for it is
    left out of every sum.
    """

    pieces: Cut
    microbatches: int
    number: jax.Array
    own: Leaves  # this stage's slice of the pipeline's weights
    shared: By  # trainables that are used before the pipeline or after it
    fixed: By  # what is the same for all microbatches
    several: By  # what is not, on a leading axis

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.pieces.layer.stages - 1

    def first(self) -> Leaves:
        """The first stage's input for the first microbatch."""
        return self.pieces.before(self._inputs(jnp.int32(0), self.shared))

    def forward(self, time: jax.Array, received: Leaves, kept: Leaves) -> tuple[Leaves, Leaves]:
        """The output for the microbatch whose turn it is, and what is kept with its input in it."""
        microbatch = time - self.number
        fresh = self.pieces.before(self._inputs(microbatch, self.shared))
        x = [jnp.where(self.number == 0, new, old) for new, old in zip(fresh, received, strict=True)]
        slot = microbatch % len(kept[0])
        here = self._is_there(microbatch)
        kept = [
            lax.dynamic_update_index_in_dim(room, jnp.where(here, leaf, _at(room, slot)), slot, 0)
            for room, leaf in zip(kept, x, strict=True)
        ]
        return self._through(self.own, x, microbatch), kept

    def end(self, time: jax.Array, y: Leaves, state: By) -> tuple[Leaves, By, Leaves]:
        """All that the loss returns for the last stage's output, and gradients by the shared weights and by `y`."""
        inputs = self._inputs(time - np.int32(self.last), self.shared, state)

        def after(shared: By, moving: Leaves) -> tuple[jax.Array, Leaves]:
            results = self.pieces.after({**inputs, **shared}, _with_floats(y, moving))
            return results[0], results

        loss, pull, results = jax.vjp(after, self.shared, floats(y), has_aux=True)
        shared, dy = pull(jnp.ones_like(loss))
        return results, _if(self.number == self.last, shared), dy

    def backward(self, time: jax.Array, kept: Leaves, dy: Leaves) -> tuple[Leaves, tuple[Leaves, By]]:
        """Gradients for the microbatch whose turn it is: by the input, by its own and by the shared weights."""
        microbatch = time - (np.int32(2 * self.last) - self.number)
        x = [_at(room, microbatch % len(room)) for room in kept]

        def through(own: Leaves, moving: Leaves) -> Leaves:
            return floats(self._through(own, _with_floats(x, moving), microbatch))

        def before(shared: By) -> Leaves:
            return floats(self.pieces.before(self._inputs(microbatch, shared)))

        own, dx = jax.vjp(through, self.own, floats(x))[1](dy)
        (shared,) = jax.vjp(before, self.shared)[1](dx)
        here = self._is_there(microbatch)
        return dx, (_if(here, own), _if(here & (self.number == 0), shared))

    def room(self, x: Leaves) -> Leaves:
        """Where inputs like `x` are kept until their backward pass."""
        slots = min(2 * self.last + 1, self.microbatches)
        return [jnp.zeros((slots, *leaf.shape), leaf.dtype) for leaf in x]

    def _through(self, own: Leaves, x: Leaves, microbatch: jax.Array) -> Leaves:
        keys = self.pieces.key(self._inputs(microbatch, self.shared))
        x, own, key = jax.tree.unflatten(self.pieces.tree, [*x, *own, *keys])
        return jax.tree.leaves(self.pieces.layer.stage(self.number, x, own, key, self.pieces.inference_mode))

    def _inputs(self, microbatch: jax.Array, shared: By, state: By | None = None) -> By:
        there = jnp.clip(microbatch, 0, self.microbatches - 1)
        now = {place: _at(leaf, there) for place, leaf in self.several.items()}
        return {**self.fixed, **shared, **now, **(state or {})}

    def _is_there(self, microbatch: jax.Array) -> jax.Array:
        return (microbatch >= 0) & (microbatch < self.microbatches)


def floats(leaves: Leaves) -> Leaves:
    """The leaves that have a derivative."""
    return inexact(leaves)[0]


def nothing(tree: Any) -> Any:
    """Sums of arrays like these before anything was added, wide enough to add up many."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, at_least_float32(leaf.dtype)), tree)


def added(sums: Any, more: Any) -> Any:
    """The sums with one more added to each."""
    return jax.tree.map(lambda total, one: total + one.astype(total.dtype), sums, more)


def _with_floats(leaves: Leaves, moving: Leaves) -> Leaves:
    return inexact(leaves)[1](moving)


def _at(leaf: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)


def _if(condition: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, jnp.zeros_like(leaf)), tree)
