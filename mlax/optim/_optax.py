"""from_optax and to_optax: an Optax transformation as an mlax optimizer, and the reverse."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from mlax._jax import at_least_float32, is_on_host
from mlax.core import Tree, frozen
from mlax.optim._base import Optimizer
from mlax.optim._slots import OptimizerState, Slot, make_state
from mlax.optim._trees import FlatTree, cast_like, flatten_trainables

if TYPE_CHECKING:
    import optax


@frozen
class FromOptax(Optimizer):
    """An Optax transformation as an optimizer: its state has named slots, and every leaf keeps its dtype and sharding.

    Each part of its state with the tree structure of the trainables is a slot, under Optax's name (`mu`, `nu`); the
    others are scalars. Weights narrower than float32 are passed to it in float32, and so are its slots.
    """

    nesting_error: ClassVar[str] = (
        "cannot be wrapped, since Optax does not update leaf by leaf; use Optax's own wrappers inside from_optax: "
        "from_optax(optax.chain(optax.clip_by_global_norm(1.0), ...))."
    )

    transformation: Any

    def init(self, trainables):
        tree = flatten_trainables(self, trainables)
        _refuse_host_memory(tree.by_path)
        with jax.numpy_dtype_promotion("standard"):
            state = self._to_named(tree, jax.tree.map(jnp.asarray, self.transformation.init(_upcast(trainables))))
        return self._map_state(tree, state, trainables, _shard_like)

    def update(self, grads, state, trainables, *, value=None, loss=None, loss_scale=None, apply_if=None, **overrides):
        tree = flatten_trainables(self, trainables)
        _refuse_host_memory(tree.by_path)
        tree.flatten_gradients(grads, tree.by_path)
        if overrides:
            raise TypeError(
                f"FromOptax: update has no hyperparameters such as {min(overrides)!r}; use optax.inject_hyperparams."
            )
        with jax.numpy_dtype_promotion("standard"):
            before = jax.eval_shape(self.transformation.init, _upcast(trainables))
            inner = self._from_named(tree, before, state)
            grads, weights = _upcast(grads), _upcast(trainables)
            extra = {} if value is None else {"value": value, "grad": grads}
            extra |= {} if loss is None else {"value_fn": _scale_cotangents(loss, loss_scale)}
            updates, inner = _with_extra_args(self.transformation).update(grads, inner, weights, **extra)
            new = jax.tree.map(lambda new, u, w: cast_like(new + u.astype(new.dtype), w), weights, updates, trainables)
            after = self._to_named(tree, inner)
        cast = {name: jax.tree.map(cast_like, getattr(after, name), getattr(state, name)) for name in after._fields[1:]}
        after = after._replace(**cast, step=state.step + 1)
        if apply_if is None:
            return new, after
        return jax.tree.map(lambda new, old: jnp.where(apply_if, new, old), (new, after), (trainables, state))

    def partition(self, specs, trainables=None):
        if trainables is None:
            raise ValueError("FromOptax: Optax's state depends on the parameters; call partition(specs, trainables).")
        tree = flatten_trainables(self, trainables)
        state = self._to_named(tree, jax.eval_shape(self.transformation.init, _upcast(trainables)))
        return self._map_state(tree, state, specs, lambda leaf, spec, alike: spec if alike else Slot(()).sharding(spec))

    def describe(self, trainables):
        tree = flatten_trainables(self, trainables)
        state = self._to_named(tree, jax.eval_shape(self.transformation.init, _upcast(trainables)))
        sizes = {
            name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(field))
            for name, field in {**state._asdict(), "the state": state}.items()
        }
        return "\n".join([str(self), *(f"{name}: {size:,} bytes" for name, size in sizes.items())])

    def eval_trainables(self, state, trainables):
        return trainables

    def slots(self, path, w):
        raise TypeError(f"FromOptax {self.nesting_error}")

    def update_leaves(self, context, grads, weights, slots):
        raise TypeError(f"FromOptax {self.nesting_error}")

    def policy(self, path):
        raise TypeError(f"FromOptax {self.nesting_error}")

    def _map_state(
        self, tree: FlatTree, state: OptimizerState, like: Tree, function: Callable[[Any, Any, bool], Any]
    ) -> OptimizerState:
        """`function` of each leaf of the state, the leaf of `like` for its parameter, and whether their shapes agree.

        For a scalar, the first leaf of `like`.
        """
        by_path = tree.flatten_like(like, "specs")
        first = next(iter(by_path.values()), jnp.zeros(()))

        def map_field(field: Any) -> Any:
            if not _is_slot(tree, field):
                return jax.tree.map(lambda leaf: function(leaf, first, False), field)
            slot = tree.flatten_like(field, "slot")
            return tree.unflatten(
                {p: function(slot[p], by_path[p], slot[p].shape == w.shape) for p, w in tree.by_path.items()}
            )

        return type(state)(*map(map_field, state))  # pyright: ignore[reportReturnType]

    def _to_named(self, tree: FlatTree, inner: Any) -> OptimizerState:
        """The parts of Optax's state by name, after `step`, which counts updates whatever Optax counts."""
        parts, _ = jax.tree_util.tree_flatten_with_path(inner, is_leaf=lambda node: _is_slot(tree, node))
        fields: dict[str, Any] = {"step": jnp.zeros((), jnp.int32)}
        for keys, field in parts:
            name = jax.tree_util.keystr(keys[-1:], simple=True) if keys else "state"
            name = name if name.isidentifier() else f"part_{name}"
            fields[_unused_name(name, fields)] = field
        return make_state(fields)

    def _from_named(self, tree: FlatTree, like: Any, state: OptimizerState) -> Any:
        """Optax's state with the structure of `like`."""
        structure = jax.tree.structure(like, is_leaf=lambda node: _is_slot(tree, node))
        if len(state) != structure.num_leaves + 1:
            raise ValueError(f"{self}: the state is of another optimizer; create it with `init` of the same optimizer.")
        return structure.unflatten(state[1:])


def from_optax(transformation: "optax.GradientTransformation") -> FromOptax:
    """The optimizer that runs an Optax transformation, with its own learning rate: `from_optax(optax.adam(1e-3))`."""
    return FromOptax(transformation)


def to_optax(optimizer: Optimizer) -> "optax.GradientTransformationExtraArgs":
    """The Optax transformation that runs an mlax optimizer: its updates are the new weights minus the old.

    Adding them to narrow weights rounds once more; use `optimizer.update` itself where that matters.
    """
    import optax

    def init(params: Tree) -> Any:
        return optimizer.init(params)

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(f"{optimizer}: needs the weights; call update(grads, state, params).")
        new, state = optimizer.update(updates, state, params, **_rename_extra_args(extra))
        return jax.tree.map(lambda a, b: a - b, new, params), state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _is_slot(tree: FlatTree, field: Any) -> bool:
    return jax.tree.structure(field) == tree.structure


def _refuse_host_memory(weights: Mapping[str, Any]) -> None:
    for path, w in weights.items():
        if is_on_host(w):
            raise ValueError(
                f"from_optax: the trainable at {path!r} is in host memory, but Optax updates all leaves at once, on "
                "the device; use an optimizer of mlax.optim, which updates such leaves in chunks, or move the leaf."
            )


def _shard_like(leaf: jax.Array, w: jax.Array, alike: bool) -> jax.Array:
    """The leaf on the devices of the parameter and, if their shapes agree, sharded like it."""
    never = Slot(... if alike else ()).init_value(w, bool)
    return jnp.where(never, leaf, leaf)


def _upcast(tree: Tree) -> Any:
    """Arrays or their shapes in at least float32."""

    def upcast(leaf: Any) -> Any:
        dtype = at_least_float32(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)

    return jax.tree.map(upcast, tree)


def _scale_cotangents(loss: Callable[[Any], Any], scale: jax.Array | None) -> Callable[[Any], Any]:
    """The loss, whose backward pass runs on cotangents times `scale`, and divides the gradients by it in float32."""
    if scale is None:
        return loss

    @jax.custom_vjp
    def scaled(weights: Any) -> Any:
        return loss(weights)

    def backward(pullback: Any, cotangent: jax.Array) -> tuple[Any]:
        (grads,) = pullback(cotangent * scale.astype(cotangent.dtype))
        return (jax.tree.map(lambda g: g / scale.astype(g.dtype), grads),)

    scaled.defvjp(lambda weights: jax.vjp(loss, weights), backward)
    return scaled


def _with_extra_args(transformation: Any) -> Any:
    """The transformation, ignoring extra arguments that it does not take."""
    import optax

    return optax.with_extra_args_support(transformation)


def _rename_extra_args(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Optax's extra arguments under our names."""
    others = {name: value for name, value in extra.items() if name not in ("grad", "value_fn")}
    return {**others, **({"loss": extra["value_fn"]} if "value_fn" in extra else {})}


def _unused_name(name: str, used: Mapping[str, Any]) -> str:
    """The name, or the first of name_1, name_2, ... that is unused."""
    candidates = (name, *(f"{name}_{index}" for index in range(1, len(used) + 1)))
    return next(each for each in candidates if each not in used)
