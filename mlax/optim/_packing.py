"""Packing: the leaves of a tree in a few long vectors, so that a call passes few arrays."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlax._jax import leaves_with_paths
from mlax.core import Documented, Tree, check_patterns, frozen, matches, signature, unflatten_paths
from mlax.optim._trees import leaves_by_path


class PackedLeaf(NamedTuple):
    """A leaf of the tree, and the vector that contains it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    vector: str


@frozen
class Packing(metaclass=Documented):
    """Concatenates the leaves of a tree into one vector per dtype and group: `packing = Packing.of(trainables)`.

        packed = packing.pack(trainables)
        state = optimizer.init(packed)
        loss = lambda packed: model.fwd(x, packing.unpack(packed))...   # its gradient is packed too

    A jitted call costs the host a few microseconds for each array; a vector is one array. In exchange, the weights and
    their gradients are copied once more. Elementwise optimizers (SGD, Adam, Lion and the like) take the same steps as
    without packing; those that use whole leaves do not. Do not pack leaves that are sharded. A group is a name with a
    pattern, for leaves that patterns must select later, decayed ones say: `Packing.of(trainables, ("decayed",
    "**/kernel"))` gives the vectors decayed/float32 and rest/float32.
    """

    leaves: tuple[PackedLeaf, ...]  # in the order of the tree
    structure: Any  # of the tree that is packed

    @classmethod
    def of(cls, trainables: Tree, *groups: tuple[str, str]) -> "Packing":
        """The packing of a tree of arrays or `jax.ShapeDtypeStruct`s."""
        by_path = leaves_by_path(trainables)
        check_patterns([pattern for _, pattern in groups], by_path)

        def vector(path: str, dtype: str) -> str:
            names = [name for name, pattern in groups if matches(pattern, path)] + ["rest"] * bool(groups)
            return "/".join([*names[:1], dtype])

        leaves = tuple(
            PackedLeaf(path, tuple(leaf.shape), leaf.dtype.name, vector(path, leaf.dtype.name))
            for path, leaf in by_path.items()
        )
        return cls(leaves, jax.tree.structure(trainables))

    def pack(self, trainables: Tree) -> dict[str, Any]:
        """The vectors of a tree, nested by group and dtype."""
        by_path = leaves_by_path(trainables)
        extra = by_path.keys() - {leaf.path for leaf in self.leaves}
        if extra:
            raise ValueError(f"Packing: the tree also has {min(extra)!r}; make a packing of this tree.")
        for path, shape, dtype, _ in self.leaves:
            leaf = by_path.get(path)
            if leaf is None or leaf.shape != shape or leaf.dtype != dtype:
                raise ValueError(
                    f"Packing: the leaf at {path!r} is {signature(leaf)}, but must be {dtype}{list(shape)}; "
                    "pass a tree like the one that the packing was made of."
                )
        vectors = (
            (name, jnp.concatenate([by_path[leaf.path].reshape(-1) for leaf in leaves]))
            for name, leaves in self._by_vector().items()
        )
        return unflatten_paths(vectors) or {}

    def unpack(self, packed: Tree) -> Any:
        """The tree of the vectors; its transpose concatenates the gradients of the leaves."""
        vectors = dict(leaves_with_paths(packed))
        by_path: dict[str, Any] = {}
        for name, leaves in self._by_vector().items():
            if name not in vectors:
                raise ValueError(
                    f"Packing: the vector {name!r} is missing; pass the result of `pack`, or its gradient."
                )
            size = sum(math.prod(leaf.shape) for leaf in leaves)
            if vectors[name].shape != (size,):
                raise ValueError(
                    f"Packing: the vector {name!r} is {signature(vectors[name])}, but must have {size} elements; "
                    "pass the result of `pack`, or its gradient."
                )
            parts: Any = _split(tuple(leaf.shape for leaf in leaves), vectors[name])
            by_path |= {leaf.path: part for leaf, part in zip(leaves, parts, strict=True)}
        return self.structure.unflatten([by_path[leaf.path] for leaf in self.leaves])

    def _by_vector(self) -> dict[str, list[PackedLeaf]]:
        names = dict.fromkeys(leaf.vector for leaf in self.leaves)
        return {name: [leaf for leaf in self.leaves if leaf.vector == name] for name in names}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split(shapes: tuple[tuple[int, ...], ...], vector: jax.Array) -> list[jax.Array]:
    """The parts of a vector in these shapes. JAX's own transpose would add up a padded vector for each part."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [part.reshape(shape) for part, shape in zip(jnp.split(vector, ends[:-1]), shapes, strict=True)]


def _split_fwd(shapes: Any, vector: jax.Array) -> tuple[list[jax.Array], None]:
    return _split(shapes, vector), None


def _split_bwd(shapes: Any, _: None, grads: list[jax.Array]) -> tuple[jax.Array]:
    return (jnp.concatenate([g.reshape(-1) for g in grads]),)


_split.defvjp(_split_fwd, _split_bwd)
