"""from_optax, to_optax: a transformation of Optax as an optimizer of mlax, and the other way round."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from mlax._jax import at_least_float32, is_on_host
from mlax.core import Tree, frozen
from mlax.optim._base import Optimizer
from mlax.optim._slots import OptimizerState, Slot, make_state
from mlax.optim._trees import cast_like, flatten_trainables

if TYPE_CHECKING:
    import optax


@frozen
class FromOptax(Optimizer):
    """An Optax transformation under the contract: named slots like the trainables, every leaf keeps dtype and place.

    Whatever in its state has the tree of the trainables is a slot, named as Optax names it (`mu`, `nu`); the rest are
    scalars. Weights narrower than float32 are given to it in float32, and so are its slots.
    """

    stands_alone: ClassVar[str] = (
        "goes inside no other optimizer, since Optax does not work leaf by leaf; use Optax's own wrappers inside of "
        "from_optax: from_optax(optax.chain(optax.clip_by_global_norm(1.0), ...))."
    )

    transformation: Any

    def init(self, trainables):
        leaves = flatten_trainables(self, trainables)
        _refuse_host_memory(leaves.by_path)
        with jax.numpy_dtype_promotion("standard"):
            named = self._named(leaves, jax.tree.map(jnp.asarray, self.transformation.init(_upcast(trainables))))
        return self._beside(leaves, named, trainables, _place_like)

    def update(self, grads, state, trainables, *, value=None, loss=None, take=None, **numbers):
        leaves = flatten_trainables(self, trainables)
        _refuse_host_memory(leaves.by_path)
        leaves.of_gradients(grads)
        if numbers:
            raise TypeError(f"FromOptax: update has no numbers such as {min(numbers)!r}; use optax.inject_hyperparams.")
        with jax.numpy_dtype_promotion("standard"):
            before = jax.eval_shape(self.transformation.init, _upcast(trainables))
            inner = self._unnamed(leaves, before, state)
            grads, weights = _upcast(grads), _upcast(trainables)
            extra = {} if value is None else {"value": value, "grad": grads}
            extra |= {} if loss is None else {"value_fn": loss}
            updates, inner = _with_extra_args(self.transformation).update(grads, inner, weights, **extra)
            new = jax.tree.map(lambda new, u, w: cast_like(new + u.astype(new.dtype), w), weights, updates, trainables)
            after = self._named(leaves, inner)
        after = after._replace(
            **{name: jax.tree.map(cast_like, getattr(after, name), getattr(state, name)) for name in after._fields[1:]},
            step=state.step + 1,
        )
        if take is None:
            return new, after
        return jax.tree.map(lambda new, old: jnp.where(take, new, old), (new, after), (trainables, state))

    def partition(self, specs, trainables=None):
        if trainables is None:
            raise ValueError(
                "FromOptax: what Optax keeps depends on the parameters; call partition(specs, trainables)."
            )
        leaves = flatten_trainables(self, trainables)
        layout = self._named(leaves, jax.eval_shape(self.transformation.init, _upcast(trainables)))
        return self._beside(leaves, layout, specs, lambda leaf, spec, whole: spec if whole else Slot(()).sharding(spec))

    def describe(self, trainables):
        named = self._named(
            flatten_trainables(self, trainables), jax.eval_shape(self.transformation.init, _upcast(trainables))
        )
        sizes = {
            name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(field))
            for name, field in {**named._asdict(), "the state": named}.items()
        }
        return "\n".join([str(self), *(f"{name}: {size:,} bytes" for name, size in sizes.items())])

    def averaged(self, state, trainables):
        return trainables

    def slots(self, path, w):
        raise TypeError(f"FromOptax {self.stands_alone}")

    def advance(self, now, grads, weights, slots):
        raise TypeError(f"FromOptax {self.stands_alone}")

    def policy(self, path):
        raise TypeError(f"FromOptax {self.stands_alone}")

    def _beside(
        self, leaves: Any, named: OptimizerState, tree: Tree, function: Callable[[Any, Any, bool], Any]
    ) -> OptimizerState:
        """`function` of each leaf, what `tree` has for its parameter, or for the first, and whether those are alike."""
        by_path = leaves.same(tree, "specs")
        first = next(iter(by_path.values()), jnp.zeros(()))

        def each(field: Any) -> Any:
            if not self._is_slot(leaves, field):
                return jax.tree.map(lambda leaf: function(leaf, first, False), field)
            slot = leaves.same(field, "slot")
            return leaves.tree(
                {p: function(slot[p], by_path[p], slot[p].shape == w.shape) for p, w in leaves.by_path.items()}
            )

        return type(named)(*map(each, named))  # pyright: ignore[reportReturnType]

    def _is_slot(self, leaves: Any, field: Any) -> bool:
        return jax.tree.structure(field) == leaves.structure

    def _named(self, leaves: Any, inner: Any) -> OptimizerState:
        """The state's parts by name: `step` first, which counts whatever Optax counts."""
        found, _ = jax.tree_util.tree_flatten_with_path(inner, is_leaf=lambda node: self._is_slot(leaves, node))
        fields: dict[str, Any] = {"step": jnp.zeros((), jnp.int32)}
        for keys, field in found:
            name = jax.tree_util.keystr(keys[-1:], simple=True) if keys else "state"
            name = name if name.isidentifier() else f"part_{name}"
            fields[_unused_name(name, fields)] = field
        return make_state(fields)

    def _unnamed(self, leaves: Any, before: Any, named: OptimizerState) -> Any:
        structure = jax.tree.structure(before, is_leaf=lambda node: self._is_slot(leaves, node))
        if len(named) != structure.num_leaves + 1:
            raise ValueError(f"{self}: the state is of another optimizer; make it by `init` of this one.")
        return structure.unflatten(named[1:])


def from_optax(transformation: "optax.GradientTransformation") -> FromOptax:
    """The optimizer that runs an Optax transformation, rate and sign included: `from_optax(optax.adam(1e-3))`."""
    return FromOptax(transformation)


def to_optax(optimizer: Optimizer) -> "optax.GradientTransformationExtraArgs":
    """The Optax transformation that runs an mlax optimizer: its updates are the new weights less the old.

    With narrow weights the sum of both rounds once more; use `optimizer.update` itself where that matters.
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


def _refuse_host_memory(weights: Mapping[str, Any]) -> None:
    for path, w in weights.items():
        if is_on_host(w):
            raise ValueError(
                f"from_optax: the trainable at {path!r} is in host memory, but Optax takes all leaves at once, on the "
                "device; use an optimizer of mlax.optim, which takes such leaves in pieces, or move the leaf."
            )


def _place_like(leaf: jax.Array, w: jax.Array, whole: bool) -> jax.Array:
    """The leaf on the devices of the parameter and, if it is like it as a whole, with its axes where that has them."""
    never = Slot(... if whole else ()).first(w, bool)
    return jnp.where(never, leaf, leaf)


def _upcast(tree: Tree) -> Any:
    def widened(leaf: Any) -> Any:
        dtype = at_least_float32(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)

    return jax.tree.map(widened, tree)


def _with_extra_args(transformation: Any) -> Any:
    """The transformation, made to pass over what it does not ask for."""
    import optax

    return optax.with_extra_args_support(transformation)


def _rename_extra_args(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What Optax passes along, under our names."""
    given = {name: value for name, value in extra.items() if name not in ("grad", "value_fn")}
    return {**given, **({"loss": extra["value_fn"]} if "value_fn" in extra else {})}


def _unused_name(name: str, taken: Mapping[str, Any]) -> str:
    """The name, or with a number behind it that is not taken."""
    tries = (name, *(f"{name}_{place}" for place in range(1, len(taken) + 1)))
    return next(each for each in tries if each not in taken)
