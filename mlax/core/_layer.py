"""Layer: the contract of every layer, and the checks of every call."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from mlax._jax import abstract_key
from mlax.core._checks import (
    KEY_ADVICE,
    check_dtypes,
    check_floating_input,
    check_inference_mode,
    check_key,
    check_leaf_names,
    check_names,
    check_not_swapped,
    check_not_truncated,
    check_shapes,
    expect_array,
    foreign_array_type,
    is_key,
)
from mlax.core._display import Node, print_pretty, tree_html, tree_text
from mlax.core._errors import short_repr, short_signature, signature
from mlax.core._frozen import call_repr, check_sizes, frozen, repr_arguments
from mlax.core._help import Documented

T = TypeVar("T")


class CalledDescription(TypeError):
    """The error of calling a layer."""

    def __init__(self, layer: Any):
        super().__init__(
            f"{short_repr(layer)} is a description and cannot be called; write y, non_trainables = "
            "model.fwd(x, trainables, non_trainables), or, for a part inside wire, sub.name(x)."
        )
        self.layer = layer


Tree = Any  # nested dicts with string keys whose leaves are arrays, or None

OUTPUTS = "#outputs"  # the name of captured outputs in the new state that `fwd` returns; see `mlax.capture`


class Outputs(NamedTuple):
    """Captured outputs by path, relative to the layer that returns them: one leaf of the state, not a tree of it."""

    by_path: dict[str, Any]


@frozen
class Layer(metaclass=Documented):
    """A description of a computation with variables: hyperparameters and nothing else.

    A leaf layer implements `init` and `fwd`. Both are pure. Every call is checked while it is traced, which costs
    a compiled call nothing.
    """

    _listed = ("init", "fwd")  # by `help`

    has_statistics: ClassVar[bool] = False  # True: mixed precision sets accum_dtype to float32
    needs_floating_input: ClassVar[bool] = False  # True: integers are refused by a layer without weights, too
    stores_activations: ClassVar[bool] = False  # True: mixed precision sets param_dtype to the compute dtype

    @abc.abstractmethod
    def init(self, rng: jax.Array, x: Any) -> tuple[Tree, Tree]:
        """Create the variables for inputs like `x`: (trainables, non_trainables), each a dict or None.

        `x` is a pytree of arrays or of `jax.ShapeDtypeStruct`; an implementation always receives the latter.
        """

    @abc.abstractmethod
    def fwd(
        self,
        x: Any,
        trainables: Tree,
        non_trainables: Tree = None,
        *,
        rng: jax.Array | None = None,
        inference_mode: bool = False,
    ) -> tuple[Any, Tree]:
        """Compute the output and the new non_trainables: (y, non_trainables)."""

    # Of every subclass, this wraps `init` and `fwd` in the checks below, and `frozen` makes the bound methods of
    # equal layers one object.
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "init" in vars(cls):
            cls.init = _check_init_calls(vars(cls)["init"])  # pyright: ignore[reportAttributeAccessIssue]
        if "fwd" in vars(cls):
            cls.fwd = _check_fwd_calls(vars(cls)["fwd"])  # pyright: ignore[reportAttributeAccessIssue]

    if not TYPE_CHECKING:  # so that a type checker reports the call too

        def __call__(self, *args, **kwargs):
            raise CalledDescription(self)

    def tensor_parallel_axes(self, number: int) -> Mapping[str, int] | None:
        """The axis of each trainable, by path, to shard over `number` devices; None: as its parts are sharded."""
        return None

    def fwd_with_next(self, x: Any, trainables: Tree, following: "Layer", next_trainables: Tree) -> Any | None:
        """The output of the layer `following` on that of this one, if both are faster computed at once; else None."""
        return None

    def split_bias(self, x: Any, trainables: Tree, inference_mode: Any) -> tuple["Layer", Tree, jax.Array] | None:
        """The layer and its trainables without the bias that it adds last, and the bias, if others add it faster."""
        return None

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        """Raise unless the variables are like those that `init` creates for inputs like `x`."""
        wanted = variable_shapes(self, x)
        check_names(self, wanted, (trainables, non_trainables))
        check_dtypes(self, x, trainables)
        check_shapes(self, x, trainables, lambda x: variable_shapes(self, x)[0])
        check_shapes(self, x, non_trainables, lambda x: variable_shapes(self, x)[1])

    def __str__(self) -> str:
        if not hasattr(self, "_hash"):  # its fields are still being checked, and its parts are not known yet
            return repr(self)
        return tree_text(self._tree())

    def _repr_html_(self) -> str:
        return tree_html(self._tree())  # what a notebook shows

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        print_pretty(self, printer)  # what IPython shows

    def _tree(self, name: str = "") -> Node:
        """What `print` shows: the layer, and its parts indented below it."""
        return Node(name, header(self))


def split_outputs(state: Tree) -> tuple[Tree, dict[str, Any]]:
    """The new state that `fwd` returned, and the outputs captured with it, by path."""
    if not isinstance(state, dict) or OUTPUTS not in state:
        return state, {}
    return {name: tree for name, tree in state.items() if name != OUTPUTS} or None, state[OUTPUTS].by_path


def join_outputs(state: Tree, outputs: Mapping[str, Any]) -> Tree:
    """The inverse of `split_outputs`."""
    return {**(state or {}), OUTPUTS: Outputs(dict(outputs))} if outputs else state


def prefix_outputs(name: str, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a part, by their paths in its owner."""
    return {f"{name}/{path}" if path else name: y for path, y in outputs.items()}


def header(layer: Layer, *, has_below: bool = False) -> str:
    """The repr of a layer without the layers in its fields; `?` is a size that is inferred from the input.

    Empty parentheses are left out if parts follow below.
    """
    arguments = [(prefix, value) for prefix, value in repr_arguments(layer) if not has_layers(value)]
    shown = [(prefix, _Inferred() if value is None and not prefix else value) for prefix, value in arguments]
    return call_repr(type(layer).__name__, shown, "()" if shown or not has_below else "")


class _Inferred:
    def __repr__(self) -> str:
        return "?"


def shape_dtypes(x: Any) -> Any:
    """The shapes and dtypes of a pytree of arrays, each dtype canonicalized as JAX would."""
    return jax.tree.map(_shape_dtype, x)


def cached_by_shape(function: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
    """Cache `function(layer, x)` by the layer and the shapes and dtypes of `x`."""

    @functools.lru_cache(maxsize=4096)
    def cached(layer: Any, treedef: Any, leaves: tuple[tuple[Any, Any], ...], widest: np.dtype) -> T:
        return function(layer, jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves]))

    @functools.wraps(function)
    def call(layer: Any, x: Any) -> T:
        leaves, treedef = jax.tree.flatten(shape_dtypes(x))
        widest = jax.dtypes.canonicalize_dtype(np.float64)  # part of the key, since jax_enable_x64 may change
        return cached(layer, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), widest)

    return call


@cached_by_shape
def variable_shapes(layer: Layer, x: Any) -> tuple[Tree, Tree]:
    """The shapes and dtypes of the variables that `layer.init` creates for inputs like `x`; nothing is allocated."""
    # shape_dtypes drops the shardings, since the cache must not keep the current mesh
    return shape_dtypes(jax.eval_shape(jitted_init(layer, x), abstract_key()))


@cached_by_shape
def jitted_init(layer: Layer, x: Any) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    """`layer.init` for inputs like `x` as a function of the key, which JAX traces once for all equal layers."""
    return jax.jit(lambda rng: layer.init(rng, x))


def _shape_dtype(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"the input has a leaf {leaf!r} of type {type(leaf).__name__}, but every leaf must be an array or a "
            "jax.ShapeDtypeStruct; wrap numbers with jnp.asarray."
        )
    if (foreign := foreign_array_type(leaf)) is not None:
        raise TypeError(f"the input is a {foreign}; pass x.numpy().")
    check_not_truncated(leaf)
    dtype = leaf.dtype
    if isinstance(dtype, np.dtype):  # a key's dtype is an extended one
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


_MISSING: Any = object()


def _check_arguments(method: Callable[..., Any], layer: Any, call: str, last: Any, more: tuple[Any, ...]) -> None:
    """Raise in words for a call on the class, or one with too few or too many arguments."""
    if not isinstance(layer, Layer):
        name, _, method_name = method.__qualname__.rpartition(".")
        raise TypeError(f"{name}.{method_name} is called on the class; make a layer first: {name}(...).{call}.")
    if last is _MISSING:
        raise TypeError(f"{short_repr(layer)}: an argument is missing; the call is {call}.")
    if any(map(is_key, more)):
        raise TypeError(f"{short_repr(layer)}: the call is {call}, and the key is a keyword argument: rng=key.")
    if more:
        several = call.replace("x", "(x, t)", 1)
        raise TypeError(f"{short_repr(layer)}: the call is {call}; pass several inputs as one tuple: {several}.")


def _check_init_calls(init: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(init, "__isabstractmethod__", False):
        return init

    @functools.wraps(init)
    def checked_init(self: Layer, rng: Any = _MISSING, x: Any = _MISSING, *more: Any) -> tuple[Tree, Tree]:
        _check_arguments(init, self, "init(rng, x)", x, more)
        check_key(f"{short_repr(self)}: init", "init(rng, x)", rng, x)
        check_sizes(self)
        x = shape_dtypes(x)
        check_floating_input(self, x)
        with expect_array(self, x):
            variables = _check_pair(self, "init", "(trainables, non_trainables)", init(self, rng, x))
        for tree in variables:
            check_leaf_names(self, tree)
        return variables

    return checked_init


def _check_fwd_calls(fwd: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(fwd, "__isabstractmethod__", False):
        return fwd

    @functools.wraps(fwd)
    def checked_fwd(
        self: Layer,
        x: Any = _MISSING,
        trainables: Tree = _MISSING,
        non_trainables: Tree = None,
        *more: Any,
        rng: Any = None,
        inference_mode: Any = False,
    ) -> tuple[Any, Tree]:
        _check_arguments(fwd, self, "fwd(x, trainables, non_trainables)", trainables, more)
        check_inference_mode(self, inference_mode)
        if rng is not None and not is_key(rng):
            raise TypeError(f"{short_repr(self)}: rng is {short_signature(rng)}, but must be a key; {KEY_ADVICE}.")
        check_not_swapped(self, x, trainables)
        x = jax.tree.map(_to_device_array, x)
        with expect_array(self, x):
            self.check_variables(x, trainables, non_trainables)
        try:
            with expect_array(self, x):
                out = fwd(self, x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        except jax.errors.TracerBoolConversionError as error:
            if isinstance(inference_mode, Tracer):
                error.add_note(
                    f"{short_repr(self)} reads inference_mode, which is traced here; "
                    'write jax.jit(layer.fwd, static_argnames="inference_mode").'
                )
            raise
        return _check_pair(self, "fwd", "(y, non_trainables)", out)

    return checked_fwd


def _to_device_array(leaf: Any) -> Any:
    check_not_truncated(leaf)
    if isinstance(leaf, np.integer):  # as a length: a layer may use its value while tracing
        return leaf
    # jnp.asarray would compile for each shape
    return jax.device_put(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _check_pair(layer: Layer, method: str, wanted: str, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"{short_repr(layer)}: {method} returned {signature(out)}, but must return a pair {wanted}.")
    return out


def has_layers(value: Any) -> bool:
    """Whether a field is a layer, or a tuple or dict that holds one."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value, Layer) or (isinstance(value, tuple) and any(map(has_layers, value)))
