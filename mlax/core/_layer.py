"""Layer: the contract that every layer keeps, and the checks that hold every call to it."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from mlax._jax import abstract_key
from mlax.core._checks import (
    A_KEY,
    check_dtypes,
    check_floats,
    check_key,
    check_mode,
    check_names,
    check_not_swapped,
    check_shapes,
    foreign_array_type,
    is_key,
)
from mlax.core._errors import short_repr, short_signature, signature
from mlax.core._frozen import check_sizes, frozen

T = TypeVar("T")
Tree = Any  # nested dicts with string keys whose leaves are arrays, or None


@frozen
class Layer(abc.ABC):
    """A description of a computation with variables: hyperparameters and nothing else.

    A leaf layer writes `init` and `fwd`. Both are pure, and every call of them is checked while it is traced,
    which costs a compiled call nothing.
    """

    takes_statistics: ClassVar[bool] = False  # True where mixed precision should set accum_dtype to float32

    @abc.abstractmethod
    def init(self, rng: jax.Array, x: Any) -> tuple[Tree, Tree]:
        """Make the variables for inputs like `x`: (trainables, non_trainables), each a dict or None.

        `x` is a tree of arrays or of `jax.ShapeDtypeStruct`; an author is always handed the latter.
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "init" in vars(cls):
            cls.init = _checked_init(vars(cls)["init"])  # pyright: ignore[reportAttributeAccessIssue]
        if "fwd" in vars(cls):
            cls.fwd = _checked_fwd(vars(cls)["fwd"])  # pyright: ignore[reportAttributeAccessIssue]

    if not TYPE_CHECKING:  # so that a type checker says it as well

        def __call__(self, *args, **kwargs):
            raise TypeError(
                f"{short_repr(self)} is a description and is not called; write y, non_trainables = "
                "model.fwd(x, trainables, non_trainables), or, for a part inside wire, sub.name(x)."
            )

    def splits(self, number: int) -> Mapping[str, int] | None:
        """Which axis of each trainable, by path, `number` devices could share the work along; None: ask the parts."""
        return None

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        """Refuse variables that `init` would not have made for inputs like `x`."""
        wanted = variable_shapes(self, x)
        check_names(self, wanted, (trainables, non_trainables))
        check_dtypes(self, x, trainables)
        check_shapes(self, wanted[0], trainables)


def shape_dtypes(x: Any) -> Any:
    """The shapes and dtypes of a tree of arrays, each dtype as JAX would hold it."""
    return jax.tree.map(_shape_dtype, x)


def cached_by_shape(function: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
    """Compute `function(layer, x)` once for equal layers and inputs of the same shapes and dtypes."""

    @functools.lru_cache(maxsize=4096)
    def cached(layer: Any, treedef: Any, leaves: tuple[tuple[Any, Any], ...], widest: np.dtype) -> T:
        return function(layer, jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves]))

    @functools.wraps(function)
    def call(layer: Any, x: Any) -> T:
        leaves, treedef = jax.tree.flatten(shape_dtypes(x))
        widest = jax.dtypes.canonicalize_dtype(np.float64)  # JAX may be told to have float64 or not, at any time
        return cached(layer, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), widest)

    return call


@cached_by_shape
def variable_shapes(layer: Layer, x: Any) -> tuple[Tree, Tree]:
    """The shapes and dtypes of the variables that `layer.init` makes for inputs like `x`; nothing is allocated."""
    return shape_dtypes(
        jax.eval_shape(jitted_init(layer, x), abstract_key())
    )  # remembered, so without the mesh of today


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
    if (theirs := foreign_array_type(leaf)) is not None:
        raise TypeError(f"the input is a {theirs}; pass x.numpy().")
    dtype = leaf.dtype
    if isinstance(dtype, np.dtype):  # not so for keys, which have one form only
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _checked_init(init: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(init, "__isabstractmethod__", False):
        return init

    @functools.wraps(init)
    def checked(self: Layer, rng: Any, x: Any) -> tuple[Tree, Tree]:
        check_key(f"{short_repr(self)}: init", "init(rng, x)", rng, x)
        check_sizes(self)
        x = shape_dtypes(x)
        check_floats(self, x)
        return _check_pair(self, "init", "(trainables, non_trainables)", init(self, rng, x))

    return checked


def _checked_fwd(fwd: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(fwd, "__isabstractmethod__", False):
        return fwd

    @functools.wraps(fwd)
    def checked(
        self: Layer,
        x: Any,
        trainables: Tree,
        non_trainables: Tree = None,
        *,
        rng: Any = None,
        inference_mode: Any = False,
    ) -> tuple[Any, Tree]:
        check_mode(self, inference_mode)
        if rng is not None and not is_key(rng):
            raise TypeError(f"{short_repr(self)}: rng is {short_signature(rng)}, but must be a key; {A_KEY}.")
        check_not_swapped(self, x, trainables)
        x = jax.tree.map(_to_device_array, x)
        self.check_variables(x, trainables, non_trainables)
        try:
            out = fwd(self, x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        except jax.errors.TracerBoolConversionError as error:
            if isinstance(inference_mode, Tracer):
                error.add_note(
                    f"{short_repr(self)} reads inference_mode, which is traced here; "
                    'write jax.jit(layer.fwd, static_argnames="inference_mode").'
                )
            raise
        return _check_pair(self, "fwd", "(y, non_trainables)", out)

    return checked


def _to_device_array(leaf: Any) -> Any:
    # not by jnp.asarray, which compiles something for each shape
    return jax.device_put(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _check_pair(layer: Layer, method: str, wanted: str, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"{short_repr(layer)}: {method} returned {signature(out)}, but must return a pair {wanted}.")
    return out
