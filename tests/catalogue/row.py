"""Row: one entry of the catalogue."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mlax

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A layer, an input for it, the shapes of its variables, and what it should compute."""

    layer: Callable[[str], mlax.Layer]  # of a floating dtype, for the layers that have no floating input to follow
    shape: Any  # of the input, batch axis first: a tuple, or a tree of tuples
    variables: tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]  # path to shape: trainables, state
    reference: Callable[..., Any]  # of (x, {path: trainable}) in NumPy float64, in inference mode
    integers: int = 0  # above 0: the input is whole numbers below this
    needs_key: bool = False  # to train
    tolerance: float = 1e-6  # of float32 against the reference, relative
    thorough: bool = False  # made of parts that have rows of their own, so that `make test` leaves it out

    def x(self, dtype: str, seed: int = 0) -> Any:
        """An input of that dtype."""
        draws = np.random.default_rng(seed)

        def draw(shape):
            if self.integers:
                return jnp.asarray(draws.integers(0, self.integers, shape), jnp.int32)
            return jnp.asarray(draws.normal(size=shape), dtype)

        return jax.tree.map(draw, self.shape, is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int))

    def init(self, dtype: str) -> tuple[mlax.Layer, Any, Any, Any]:
        """The layer, an input, and variables for it: the same ones each time."""
        return _made(self, dtype)


@functools.cache  # a score of tests ask for each
def _made(row: Row, dtype: str) -> tuple[mlax.Layer, Any, Any, Any]:
    layer, x = row.layer(dtype), row.x(dtype)
    return layer, x, *layer.init(jax.random.key(0), x)
