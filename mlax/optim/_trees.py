"""Trainables by path, and arithmetic on their leaves."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec, Sharding

from mlax._jax import at_least_float32, euclidean_norm, is_narrow, leaves_with_paths, with_weak_type
from mlax.core import short_repr, signature


@dataclasses.dataclass(frozen=True)
class FlatTree:
    """The trainables of an optimizer, flattened."""

    optimizer: Any
    by_path: dict[str, Any]
    structure: Any

    @property
    def owner(self) -> str:
        """The optimizer, for error messages."""
        return short_repr(self.optimizer)

    @property
    def is_abstract(self) -> bool:
        """Whether the trainables are shapes, not arrays."""
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self.by_path.values())

    def unflatten(self, by_path: dict[str, Any]) -> Any:
        """The tree with these leaves."""
        return self.structure.unflatten([by_path[path] for path in self.by_path])

    def flatten_like(self, tree: Any, name: str) -> dict[str, Any]:
        """The leaves by path of a tree that must have the structure of the trainables."""
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_spec)
        if structure != self.structure:
            self._raise_structure_error(name, dict(leaves_with_paths(tree, _is_spec)))
        return dict(zip(self.by_path, leaves, strict=True))

    def flatten_gradients(self, grads: Any, live: Collection[str]) -> dict[str, jax.Array]:
        """The gradients of the live leaves by path; each must match its parameter. Those of others may be left out."""
        _refuse_state(self.owner, grads, "gradients")
        by_path = dict(leaves_with_paths(grads))
        if len(live) == len(self.by_path) or by_path.keys() != set(live):
            by_path = self.flatten_like(grads, "gradients")
        for path in live:
            g, w, dtype = by_path[path], self.by_path[path], jnp.result_type(by_path[path])
            if jnp.shape(g) != w.shape or (dtype != w.dtype and dtype != at_least_float32(w.dtype)):
                raise ValueError(
                    f"{self.owner}: the gradient at {path!r} is {signature(g)}, but the parameter is {signature(w)}; "
                    f"pass gradients of that shape, in its dtype or in {at_least_float32(w.dtype)}."
                )
        return {path: jnp.asarray(by_path[path]) for path in live}

    def _raise_structure_error(self, name: str, by_path: dict[str, Any]) -> None:
        missing, extra = self.by_path.keys() - by_path.keys(), by_path.keys() - self.by_path.keys()
        difference = "the nodes differ"
        if missing or extra:
            difference = f"they lack {min(missing)!r}" if missing else f"they also have {min(extra)!r}"
        raise ValueError(
            f"{self.owner}: the {name} have another tree structure than the trainables: {difference}. "
            "Differentiate with respect to the same trainables, and use the state that was initialized for them."
        )


def flatten_trainables(optimizer: Any, trainables: Any) -> FlatTree:
    """The trainables, or their PartitionSpecs or Shardings, by path; each must be a floating-point array."""
    _refuse_state(short_repr(optimizer), trainables, "trainables")
    by_path = leaves_by_path(trainables, _is_spec)
    for path, leaf in by_path.items():
        if _is_spec(leaf):
            by_path[path] = UnknownShape(short_repr(optimizer))
            continue
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | Tracer):
            raise TypeError(
                f"{short_repr(optimizer)}: the trainable at {path!r} is a {type(leaf).__name__}, but must be a "
                "jax.Array; convert it with `jnp.asarray`."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{short_repr(optimizer)}: the trainable at {path!r} is {signature(leaf)}, but only floating-point "
                "arrays can be trained; keep it out of the trainables (`mlax.freeze` splits a tree)."
            )
    return FlatTree(optimizer, by_path, jax.tree.structure(trainables, is_leaf=_is_spec))


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves by path; two of the same path, as in `{"a/b": x, "a": {"b": y}}`, are an error."""
    by_path: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(tree, is_leaf):
        if path in by_path:
            raise ValueError(f"Two leaves have the path {path!r}; rename one, as with '_' for '/' in its key.")
        by_path[path] = leaf
    return by_path


def _refuse_state(owner: str, tree: Any, name: str) -> None:
    """Raise an error if a tree is the state of an optimizer."""
    if getattr(tree, "_fields", ("",))[0] == "step":
        raise TypeError(
            f"{owner}: the state came as {name}; the order is update(grads, state, trainables), and "
            "eval_trainables(state, trainables)."
        )


@dataclasses.dataclass(frozen=True)
class UnknownShape:
    """A parameter of which only the path is known: an error where more is needed."""

    owner: str

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"{self.owner}: its slots depend on the {name} of the parameters; "
            "pass them too: partition(specs, trainables)."
        )


def cast_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` in the dtype of `old`, weakly typed if `old` is."""
    new = new.astype(old.dtype)
    return with_weak_type(new) if jax.typeof(old).weak_type else new


def moving_average(old: jax.Array, new: jax.Array, beta: Any) -> jax.Array:
    """`beta * old + (1 - beta) * new`."""
    return beta * old + (1 - beta) * new


def norm(x: jax.Array) -> jax.Array:
    """The Euclidean norm over all axes."""
    if is_narrow(x.dtype):
        return lax.squeeze(euclidean_norm(x, tuple(range(x.ndim))), range(x.ndim))
    return lax.sqrt(jnp.sum(x * x, dtype=x.dtype))


def trust_ratio(above: jax.Array, below: jax.Array, added: jax.Array | float = 0.0) -> jax.Array:
    """`above / (below + added)`, and 1 where one of the first two is zero."""
    usable = (above > 0) & (below > 0)
    return jnp.where(usable, above / jnp.where(usable, below + added, jnp.ones_like(below)), jnp.ones_like(above))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec | Sharding)
