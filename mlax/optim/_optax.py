"""from_optax and to_optax: an Optax transformation as an mlax optimizer, and the reverse."""

import dataclasses
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from mlax._jax import at_least_float32, count_non_finite, is_on_host, leaves_with_paths
from mlax.core import Tree, check_not_donated, check_patterns, frozen, matches, short_repr
from mlax.optim._base import Optimizer
from mlax.optim._hyperparams import Patterns, hyperparam_ranges
from mlax.optim._slots import EMPTY, OptimizerState, Slot, make_state, unused_name
from mlax.optim._trees import FlatTree, cast_like, flatten_trainables

if TYPE_CHECKING:
    import optax


@frozen
class OptaxCall:
    """A call of a function that returns an Optax transformation."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return ", ".join([name, *map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs)])


@functools.lru_cache(maxsize=256)
def _call(call: OptaxCall) -> Any:
    return call.function(*call.args, **dict(call.kwargs))


@frozen
class FromOptax(Optimizer):
    """An Optax transformation as an optimizer: its state has named slots, and every leaf keeps its dtype and sharding.

    Each part of its state with the tree structure of the trainables is a slot, under Optax's name (`mu`, `nu`); the
    leaves that `optax.masked` leaves out of it have shape (0,). The other parts are scalars. Weights narrower than
    float32 are passed to Optax in float32, and so are its slots. Optax sees only the leaves that match `trained`, if
    there are any patterns, as `train.step(train=...)` sets them; the others are frozen.

    >>> optimizer = optim.from_optax(optax.adam, 1e-3)
    >>> optimizer.init({"kernel": jnp.ones((4, 3))})._fields
    ('step', 'count', 'mu', 'nu')
    """

    nesting_error: ClassVar[str] = (
        "cannot be wrapped, since Optax does not update leaf by leaf; use Optax's own wrappers inside from_optax: "
        "from_optax(optax.chain(optax.clip_by_global_norm(1.0), ...)). To freeze leaves, pass train= to train.step."
    )

    transformation: Any  # an Optax transformation, or the call that makes it
    trained: Patterns = dataclasses.field(default=(), kw_only=True)  # patterns of the leaves that Optax sees; (): all

    def __repr__(self) -> str:
        call = self.transformation
        made = f"from_optax({call!r})" if isinstance(call, OptaxCall) else "from_optax(an Optax transformation)"
        return f"FromOptax({made}, trained={self.trained!r})" if self.trained else made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self.transformation, OptaxCall):
            return self.__reduce__()
        raise pickle.PicklingError(
            "from_optax: an Optax transformation consists of closures, which cannot be pickled; pass the function and "
            "its arguments, from_optax(optax.adam, 1e-3), or a function of a module that returns the transformation."
        )

    def init(self, trainables):
        check_not_donated(short_repr(self), trainables=trainables)
        tree = flatten_trainables(self, trainables)
        _refuse_host_memory(tree.by_path)
        if tree.is_abstract:
            return jax.eval_shape(self.init, trainables)
        with jax.numpy_dtype_promotion("standard"):
            inner = self._transformation.init(_upcast(self._mask_frozen(tree, tree.by_path)))
        _refuse_lookahead(inner)
        state = self._to_named(tree, inner, jax.tree.map(jnp.asarray, inner))
        return self._map_state(tree, state, trainables, _shard_like)

    def update(
        self,
        grads,
        state,
        trainables,
        *,
        value=None,
        loss=None,
        loss_scale=None,
        apply_if=None,
        skip_nonfinite=False,
        **overrides,
    ):
        check_not_donated(short_repr(self), gradients=grads, state=state, trainables=trainables)
        tree = flatten_trainables(self, trainables)
        _refuse_host_memory(tree.by_path)
        grads = self._mask_frozen(tree, tree.flatten_gradients(grads, self._live(tree)))
        if overrides:
            raise TypeError(
                f"FromOptax: update has no hyperparameters such as {min(overrides)!r}; use optax.inject_hyperparams."
            )
        with jax.numpy_dtype_promotion("standard"):
            template = self._template(tree)
            inner = self._from_named(tree, template, state)
            live = self._mask_frozen(tree, tree.by_path)
            grads, weights = _upcast(grads), _upcast(live)
            loss = loss and functools.partial(self._loss_of_live, tree, loss)
            extra = _extra_args(self._transformation, grads, value, loss, loss_scale)
            updates, inner = self._transformation.update(grads, inner, weights, **extra)
            new = jax.tree.map(lambda new, u, w: cast_like(new + u.astype(new.dtype), w), weights, updates, live)
            after = self._to_named(tree, template, inner)
        cast = {name: jax.tree.map(cast_like, getattr(after, name), getattr(state, name)) for name in after._fields[1:]}
        after = after._replace(**cast, step=state.step + 1)
        if skip_nonfinite:
            finite = count_non_finite(dict(leaves_with_paths(new))) == 0
            apply_if = finite if apply_if is None else finite & apply_if
        if apply_if is not None:
            select = functools.partial(jnp.where, apply_if)
            new, after = jax.tree.map(select, new, live), jax.tree.map(select, after, state)
        return self._fill_in_frozen(tree, new), after

    def partition(self, specs, trainables=None):
        if trainables is None:
            raise ValueError("FromOptax: Optax's state depends on the parameters; call partition(specs, trainables).")
        tree = flatten_trainables(self, trainables)
        template = self._template(tree)
        state = self._to_named(tree, template, template)
        return self._map_state(tree, state, specs, lambda leaf, spec, alike: spec if alike else Slot(()).sharding(spec))

    def describe(self, trainables):
        tree = flatten_trainables(self, trainables)
        template = self._template(tree)
        state = self._to_named(tree, template, template)
        sizes = {
            name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(field))
            for name, field in {**state._asdict(), "the state": state}.items()
        }
        return "\n".join([str(self), *(f"{name}: {size:,} bytes" for name, size in sizes.items())])

    def eval_trainables(self, state, trainables):
        import optax.contrib

        tree = flatten_trainables(self, trainables)
        inner = self._from_named(tree, self._template(tree), state)
        for node in _nodes(inner, optax.contrib.ScheduleFreeState):
            with jax.numpy_dtype_promotion("standard"):
                live = self._mask_frozen(tree, tree.by_path)
                average = optax.contrib.schedule_free_eval_params(node, _upcast(live))
            return jax.tree.map(cast_like, self._fill_in_frozen(tree, average), trainables)
        return trainables

    def patterns(self):
        return self.trained

    def is_frozen(self, path):
        return bool(self.trained) and not matches(self.trained, path)

    def slots(self, path, w):
        raise TypeError(f"FromOptax {self.nesting_error}")

    def update_leaves(self, context, grads, weights, slots):
        raise TypeError(f"FromOptax {self.nesting_error}")

    def policy(self, path):
        raise TypeError(f"FromOptax {self.nesting_error}")

    @property
    def _transformation(self) -> Any:
        import optax

        made = _call(self.transformation) if isinstance(self.transformation, OptaxCall) else self.transformation
        return optax.with_extra_args_support(made)

    def _template(self, tree: FlatTree) -> Any:
        """The shapes of Optax's state."""
        with jax.numpy_dtype_promotion("standard"):
            return jax.eval_shape(self._transformation.init, _upcast(self._mask_frozen(tree, tree.by_path)))

    def _live(self, tree: FlatTree) -> list[str]:
        return [path for path in tree.by_path if not self.is_frozen(path)]

    def _mask_frozen(self, tree: FlatTree, leaves: Mapping[str, Any]) -> Any:
        """The tree of these leaves, with Optax's masked nodes for frozen ones: what `optax.masked` passes on."""
        import optax

        check_patterns(self.trained, tree.by_path)
        return tree.unflatten({p: optax.MaskedNode() if self.is_frozen(p) else leaves[p] for p in tree.by_path})

    def _fill_in_frozen(self, tree: FlatTree, live: Any) -> Any:
        """The inverse of `_mask_frozen`, with the frozen leaves of the trainables."""
        return tree.unflatten({**tree.by_path, **dict(zip(self._live(tree), jax.tree.leaves(live), strict=True))})

    def _loss_of_live(self, tree: FlatTree, loss: Callable[[Any], Any], live: Any) -> Any:
        return loss(self._fill_in_frozen(tree, live))

    def _map_state(
        self, tree: FlatTree, state: OptimizerState, like: Tree, function: Callable[[Any, Any, bool], Any]
    ) -> OptimizerState:
        """`function` of each leaf of the state, the leaf of `like` for its parameter, and whether their shapes agree.

        For a scalar, the first leaf of `like`.
        """
        by_path = tree.flatten_like(like, "specs")
        first = next(iter(by_path.values()), jnp.zeros(()))

        def map_field(field: Any) -> Any:
            if jax.tree.structure(field) != tree.structure:
                return jax.tree.map(lambda leaf: function(leaf, first, False), field)
            slot = tree.flatten_like(field, "slot")
            return tree.unflatten(
                {p: function(slot[p], by_path[p], slot[p].shape == w.shape) for p, w in tree.by_path.items()}
            )

        return type(state)(*map(map_field, state))  # pyright: ignore[reportReturnType]

    def _to_named(self, tree: FlatTree, template: Any, inner: Any) -> OptimizerState:
        """The parts of Optax's state by name, after `step`, which counts updates whatever Optax counts."""
        parts, structure = jax.tree_util.tree_flatten_with_path(template, is_leaf=lambda node: _is_slot(tree, node))
        fields: dict[str, Any] = {"step": jnp.zeros((), jnp.int32)}
        for (keys, shapes), field in zip(parts, structure.flatten_up_to(inner), strict=True):
            name = jax.tree_util.keystr(keys[-1:], simple=True) if keys else "state"
            name = name if name.isidentifier() else f"part_{name}"
            fields[unused_name(name, fields)] = _fill_masked(tree, field) if _is_slot(tree, shapes) else field
        return make_state(fields)

    def _from_named(self, tree: FlatTree, template: Any, state: OptimizerState) -> Any:
        """Optax's state with the structure of `template`."""
        parts, structure = jax.tree.flatten(template, is_leaf=lambda node: _is_slot(tree, node))
        if len(state) != len(parts) + 1:
            raise ValueError(f"{self}: the state is of another optimizer; create it with `init` of the same optimizer.")
        return structure.unflatten(
            _mask_like(shapes, field) if _is_slot(tree, shapes) else field
            for shapes, field in zip(parts, state[1:], strict=True)
        )


def from_optax(transformation: Any, *args: Any, **kwargs: Any) -> FromOptax:
    """The optimizer that runs an Optax transformation, with its own learning rate: `from_optax(optax.adam(1e-3))`.

    Given a function and its arguments, `from_optax(optax.adam, 1e-3)`, it can be pickled, and equal ones are equal.
    """
    if hasattr(transformation, "init") and hasattr(transformation, "update"):
        if args or kwargs:
            raise TypeError("from_optax: arguments belong to a function that returns a transformation, not to one.")
        return FromOptax(transformation)
    if not callable(transformation):
        raise TypeError(
            f"from_optax: {transformation!r} is neither an Optax transformation nor a function that returns one; pass "
            "optax.adam(1e-3), for example."
        )
    return FromOptax(OptaxCall(transformation, args, tuple(sorted(kwargs.items()))))


def to_optax(optimizer: Optimizer, **hyperparams: Any) -> "optax.GradientTransformationExtraArgs":
    """The Optax transformation that runs an mlax optimizer: its updates are the new weights minus the old.

    `hyperparams`, numbers or arrays, replace those of the optimizer, so that Optax can store them in its state:
    `optax.inject_hyperparams(lambda rate: optim.to_optax(optim.AdamW(1e-3), rate=rate))(rate=1e-3)`. Extra arguments
    of `update` that the optimizer does not use are ignored, as by Optax. `optax.tree.map_params`, which calls `init`
    with a placeholder, is answered from the last call of `init`. Adding the updates to narrow weights rounds once more;
    use `optimizer.update` itself where that matters.
    """
    import optax

    known = {"value", "loss", *_hyperparam_names(optimizer)}
    slots: dict[str, bool] = {}  # the fields of the last state, and whether each is a slot

    def init(params: Tree) -> Any:
        if not isinstance(params, dict | list | tuple | None) and not jax.tree.leaves(params):
            if not slots:
                raise TypeError(f"to_optax({optimizer}): its slots depend on the weights; call init(params) first.")
            return make_state({name: params if is_slot else jnp.zeros(()) for name, is_slot in slots.items()})
        state = optimizer.init(params)
        slots.clear()
        slots.update(
            (name, jax.tree.structure(field) == jax.tree.structure(params)) for name, field in state._asdict().items()
        )
        return state

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(f"{optimizer}: needs the weights; call update(grads, state, params).")
        extra = {name: value for name, value in _rename_extra_args(extra).items() if name in known}
        new, state = optimizer.update(updates, state, params, **{**hyperparams, **extra})
        return jax.tree.map(lambda a, b: a - b, new, params), state

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _hyperparam_names(optimizer: Optimizer) -> set[str]:
    inner = (name for each in optimizer.inner_optimizers() for name in _hyperparam_names(each))
    return {*hyperparam_ranges(type(optimizer)), *inner}


def _is_slot(tree: FlatTree, field: Any) -> bool:
    """Whether a part of Optax's state has the tree structure of the trainables, except for masked subtrees."""
    leaves, structure = jax.tree.flatten(field, is_leaf=_is_masked)
    if not any(not _is_masked(leaf) for leaf in leaves):
        return False
    try:
        parameters = structure.flatten_up_to(tree.unflatten(dict.fromkeys(tree.by_path, 0)))
    except (ValueError, TypeError):
        return False
    return all(_is_masked(leaf) or parameter == 0 for leaf, parameter in zip(leaves, parameters, strict=True))


def _fill_masked(tree: FlatTree, field: Any) -> Any:
    """A slot whose masked leaves are empty arrays."""
    empty = tree.unflatten({path: jnp.zeros(EMPTY.sizes) for path in tree.by_path})
    return jax.tree.map(lambda leaf, rest: rest if _is_masked(leaf) else leaf, field, empty, is_leaf=_is_masked)


def _mask_like(template: Any, field: Any) -> Any:
    """A slot with Optax's masked nodes where `template` has them."""
    return jax.tree.map(lambda leaf, own: leaf if _is_masked(leaf) else own, template, field, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    import optax

    return isinstance(node, optax.MaskedNode)


def _nodes(tree: Any, kind: type) -> Iterator[Any]:
    """The nodes of a type in a tree, outermost only."""
    return (
        node for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind)) if isinstance(node, kind)
    )


def _refuse_lookahead(inner: Any) -> None:
    import optax

    if any(_nodes(inner, optax.LookaheadState)):
        raise TypeError(
            "from_optax: optax.lookahead keeps fast and slow weights in the place of the trainables; use "
            "optim.Lookahead around an optimizer of mlax, which keeps the slow ones in its state."
        )


def _extra_args(transformation: Any, grads: Tree, value: Any, loss: Any, loss_scale: Any) -> dict[str, Any]:
    """The extra arguments of Optax's `update` that are known and that the transformation takes, under Optax's names."""
    extra: dict[str, Any] = {} if value is None else {"value": value, "grad": grads}
    if loss is not None:
        scaled = _scale_cotangents(loss, loss_scale)

        def value_fn(params: Tree, obj_fn: Any = None, grad_fn: Any = None) -> Any:
            """The loss; a line search passes it all other arguments, and refuses those that it does not name."""
            return scaled(params)

        # Hessian-vector products need the loss itself, since the scaled one has a reverse-mode rule only
        extra |= {"value_fn": value_fn, "obj_fn": loss, "grad_fn": lambda params, _: jax.grad(scaled)(params)}
    parameters = inspect.signature(transformation.update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return extra
    return {name: given for name, given in extra.items() if name in parameters}


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


def _rename_extra_args(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Optax's extra arguments under our names."""
    others = {name: value for name, value in extra.items() if name not in ("grad", "value_fn")}
    return {**others, **({"loss": extra["value_fn"]} if "value_fn" in extra else {})}
