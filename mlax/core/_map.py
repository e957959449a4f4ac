"""Map: a layer over one more axis of its input, by vmap."""

from dataclasses import KW_ONLY
from typing import Any, Literal

import jax

from mlax.core._frozen import frozen
from mlax.core._layer import Tree
from mlax.core._notes import brief
from mlax.core._stacked import init_stacked
from mlax.core._wrapper import Wrapper


@frozen
class Map(Wrapper):
    """Apply `layer` to every slice of the input along `axis`, and stack the outputs along the same axis.

    `variables` is what `jax.vmap` would call their `in_axes`: None shares one set between the slices; 0 gives
    each slice a set of its own, stacked on a leading axis. A layer with state needs a set for each slice.
    """

    _: KW_ONLY
    axis: int = 1
    variables: Literal[0] | None = None

    def init(self, rng, x):
        size, inner = self.slices(x)
        if self.variables is None:
            return self.layer.init(rng, inner)
        return init_stacked(self.layer, rng, inner, size)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        size, _ = self.slices(x)
        if self.variables is None and non_trainables is not None:
            raise ValueError(
                f"{brief(self)}: the layer has state, and each of the {size} slices would leave another one; "
                "pass variables=0 to give each slice its own."
            )

        def run(x: Any, trainables: Tree, non_trainables: Tree, key: jax.Array | None) -> tuple[Any, Tree]:
            return self.layer.fwd(x, trainables, non_trainables, rng=key, inference_mode=inference_mode)

        keys = None if rng is None else jax.random.split(rng, size)
        over = (self.axis, self.variables, self.variables, None if rng is None else 0)
        return jax.vmap(run, in_axes=over, out_axes=(self.axis, 0))(x, trainables, non_trainables, keys)

    def slices(self, x: Any) -> tuple[int, Any]:
        """How many slices there are, and the shape and dtype of one."""
        sizes: set[int] = set()
        for leaf in jax.tree.leaves(x):
            if not -leaf.ndim <= self.axis < leaf.ndim:
                raise ValueError(f"{brief(self)}: the input has the shape {leaf.shape}, which has no axis {self.axis}.")
            sizes.add(leaf.shape[self.axis])
        if len(sizes) != 1:
            raise ValueError(
                f"{brief(self)}: axis {self.axis} has the sizes {sorted(sizes)} in the input; it needs one."
            )

        def drop(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            del shape[self.axis]
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return sizes.pop(), jax.tree.map(drop, x)
