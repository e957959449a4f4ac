"""Trainables by path, and arithmetic on their leaves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec, Sharding

from mlax._jax import at_least_float32, leaves_with_paths, with_weak_type
from mlax.core import short_repr, signature


@dataclasses.dataclass(frozen=True)
class FlatTree:
    """The leaves of the trainables, by path."""

    owner: str
    by_path: dict[str, Any]
    structure: Any

    def tree(self, by_path: dict[str, Any]) -> Any:
        """The tree with these leaves in place."""
        return self.structure.unflatten([by_path[path] for path in self.by_path])

    def same(self, tree: Any, name: str) -> dict[str, Any]:
        """The leaves of a tree that must be like the trainables."""
        found, structure = jax.tree.flatten(tree, is_leaf=_is_spec)
        if structure != self.structure:
            self._differ(name, dict(leaves_with_paths(tree, _is_spec)))
        return dict(zip(self.by_path, found, strict=True))

    def of_gradients(self, grads: Any) -> dict[str, Any]:
        """The gradients by path; each must fit its parameter."""
        found = self.same(grads, "gradients")
        for path, g in found.items():
            w = self.by_path[path]
            if jnp.shape(g) != w.shape or jnp.result_type(g) not in (w.dtype, at_least_float32(w.dtype)):
                raise ValueError(
                    f"{self.owner}: the gradient at {path!r} is {signature(g)}, but the parameter is {signature(w)}; "
                    f"give gradients of that shape, in its dtype or in {at_least_float32(w.dtype)}."
                )
        return {path: jnp.asarray(g) for path, g in found.items()}

    def _differ(self, name: str, found: dict[str, Any]) -> None:
        missing, extra = self.by_path.keys() - found.keys(), found.keys() - self.by_path.keys()
        wrong = (
            f"they lack {min(missing)!r}"
            if missing
            else f"they also hold {min(extra)!r}"
            if extra
            else "its nodes differ"
        )
        raise ValueError(
            f"{self.owner}: the {name} have another tree than the trainables: {wrong}. "
            "Differentiate with respect to the same trainables, and keep the state that was made for them."
        )


def flatten_trainables(optimizer: Any, trainables: Any) -> FlatTree:
    """The trainables by path; a leaf that is no floating-point array is refused."""
    by_path = dict(leaves_with_paths(trainables, _is_spec))
    for path, leaf in by_path.items():
        if _is_spec(leaf):
            by_path[path] = UnknownShape(short_repr(optimizer))
            continue
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | Tracer):
            raise TypeError(
                f"{short_repr(optimizer)}: the trainable at {path!r} is a {type(leaf).__name__}, but must be a "
                "jax.Array; "
                "make it one by `jnp.asarray`."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{short_repr(optimizer)}: the trainable at {path!r} is {signature(leaf)}, but only floating-point "
                "numbers "
                "can be trained; keep it out of the trainables (`mlax.freeze` splits a tree)."
            )
    return FlatTree(short_repr(optimizer), by_path, jax.tree.structure(trainables, is_leaf=_is_spec))


@dataclasses.dataclass(frozen=True)
class UnknownShape:
    """A parameter of which only the path is known, as long as that is enough."""

    owner: str

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"{self.owner}: which slots there are depends on the {name} of the parameters; "
            "pass them too: partition(specs, trainables)."
        )


def cast_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` in the dtype, and as weak, as `old`."""
    new = new.astype(old.dtype)
    return with_weak_type(new) if jax.typeof(old).weak_type else new


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec | Sharding)


def norm(x: jax.Array) -> jax.Array:
    """The root of the sum of squares."""
    return lax.sqrt(jnp.sum(x * x, dtype=x.dtype))


def trust_ratio(above: jax.Array, below: jax.Array, added: jax.Array | float = 0.0) -> jax.Array:
    """`above / (below + added)`, and 1 where one of the first two is zero."""
    usable = (above > 0) & (below > 0)
    return jnp.where(usable, above / jnp.where(usable, below + added, jnp.ones_like(below)), jnp.ones_like(above))


def moving_average(old: jax.Array, new: jax.Array, beta: Any) -> jax.Array:
    """`beta * old + (1 - beta) * new`."""
    return beta * old + (1 - beta) * new
