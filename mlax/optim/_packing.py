"""Packing: many leaves in a few long vectors, so that a step touches few arrays."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mlax._jax import leaves_with_paths
from mlax.core import Tree, frozen, match_paths, matches, signature


@frozen
class Packing:
    """How the leaves of a tree lie in vectors, one for each dtype and group: `packing = Packing.of(trainables)`.

        packed = packing.pack(trainables)
        state = optimizer.init(packed)
        loss = lambda packed: model.fwd(x, packing.unpack(packed))...   # its gradient is packed too

    A call with many leaves waits for the host, which needs a few microseconds for each; a vector is one leaf. In turn
    the model reads its weights, and writes their gradients, by one more copy. An optimizer that looks at each number
    by itself (SGD, Adam, Lion and their kin) takes the same steps; one that looks at whole leaves does not. Leaves
    with an axis sharded should not be packed. A group is a pair of a name and a pattern: leaves that are to be told
    apart by patterns later, decayed ones from others say. `Packing.of(trainables, ("decayed", "**/kernel"))` gives the
    vectors decayed/float32 and rest/float32.
    """

    leaves: tuple[tuple[str, tuple[int, ...], str, str], ...]  # path, shape, dtype, vector; in the order of the tree
    structure: Any

    @classmethod
    def of(cls, trainables: Tree, *groups: tuple[str, str]) -> "Packing":
        """The packing of a tree of arrays or of `jax.ShapeDtypeStruct`s."""
        by_path = dict(leaves_with_paths(trainables))
        match_paths([pattern for _, pattern in groups], by_path)

        def vector(path: str, dtype: str) -> str:
            names = [name for name, pattern in groups if matches(pattern, path)] + ["rest"] * bool(groups)
            return "/".join([*names[:1], dtype])

        leaves = tuple(
            (path, tuple(leaf.shape), leaf.dtype.name, vector(path, leaf.dtype.name)) for path, leaf in by_path.items()
        )
        return cls(leaves, jax.tree.structure(trainables))

    def pack(self, trainables: Tree) -> dict[str, Any]:
        """The vectors, by name, from the tree."""
        by_path = dict(leaves_with_paths(trainables))
        extra = by_path.keys() - {path for path, *_ in self.leaves}
        if extra:
            raise ValueError(f"Packing: the tree also holds {min(extra)!r}; make a packing of this tree.")
        vectors: dict[str, Any] = {}
        for name, members in self._members().items():
            for path, shape, dtype, _ in members:
                leaf = by_path.get(path)
                if leaf is None or leaf.shape != shape or leaf.dtype != dtype:
                    raise ValueError(
                        f"Packing: the leaf at {path!r} is {signature(leaf)}, but must be {dtype}{list(shape)}; "
                        "pass a tree like the one that the packing is of."
                    )
            joined = jnp.concatenate([by_path[path].reshape(-1) for path, *_ in members])
            *parents, last = name.split("/")
            functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, vectors)[last] = joined
        return vectors

    def unpack(self, packed: Tree) -> Any:
        """The tree, from the vectors; the gradient of the vectors is one joining of the leaves' gradients."""
        vectors = dict(leaves_with_paths(packed))
        found: dict[str, Any] = {}
        for name, members in self._members().items():
            if name not in vectors:
                raise ValueError(f"Packing: there is no vector {name!r}; pass what `pack` gave, or its gradient.")
            size = sum(math.prod(shape) for _, shape, *_ in members)
            if vectors[name].shape != (size,):
                raise ValueError(
                    f"Packing: the vector {name!r} is {signature(vectors[name])}, but must have {size} numbers; "
                    "pass what `pack` gave, or its gradient."
                )
            leaves: Any = _split_vector(tuple(shape for _, shape, _, _ in members), vectors[name])
            found |= {path: leaf for (path, *_), leaf in zip(members, leaves, strict=True)}
        return self.structure.unflatten([found[path] for path, *_ in self.leaves])

    def _members(self) -> dict[str, list[tuple[str, tuple[int, ...], str, str]]]:
        names = dict.fromkeys(vector for *_, vector in self.leaves)
        return {name: [leaf for leaf in self.leaves if leaf[3] == name] for name in names}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split_vector(shapes: tuple[tuple[int, ...], ...], vector: jax.Array) -> list[jax.Array]:
    """The parts of a vector, each in its shape. JAX's own gradient would add up one padded vector for each part."""
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [part.reshape(shape) for part, shape in zip(jnp.split(vector, ends[:-1]), shapes, strict=True)]


def _split_vector_fwd(shapes: Any, vector: jax.Array) -> tuple[list[jax.Array], None]:
    return _split_vector(shapes, vector), None


def _split_vector_bwd(shapes: Any, _: None, grads: list[jax.Array]) -> tuple[jax.Array]:
    return (jnp.concatenate([g.reshape(-1) for g in grads]),)


_split_vector.defvjp(_split_vector_fwd, _split_vector_bwd)
