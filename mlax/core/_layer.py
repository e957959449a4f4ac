"""Layer: the contract that every layer keeps, and the checks that hold every call to it."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mlax.core._frozen import frozen
from mlax.core._notes import brief, signature
from mlax.core._paths import flat
from mlax.core._shape_key import shape_key

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

    def splits(self, number: int) -> Mapping[str, int] | None:
        """Which axis of each trainable, by path, `number` devices could share the work along; None: ask the parts."""
        return None

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        """Refuse variables that `init` would not have made for inputs like `x`."""
        wanted = variables_like(self, x)
        _check_names(self, "trainables", wanted[0], trainables)
        _check_names(self, "non_trainables", wanted[1], non_trainables)
        _check_dtypes(self, x, trainables)


def structs(x: Any) -> Any:
    """The shapes and dtypes of a tree of arrays, each dtype as JAX would hold it."""
    return jax.tree.map(_struct, x)


def cached_by_shape(function: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
    """Compute `function(layer, x)` once for equal layers and inputs of the same shapes and dtypes."""

    @functools.lru_cache(maxsize=4096)
    def cached(layer: Any, treedef: Any, leaves: tuple[tuple[Any, Any], ...], widest: np.dtype) -> T:
        return function(layer, jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves]))

    @functools.wraps(function)
    def call(layer: Any, x: Any) -> T:
        leaves, treedef = jax.tree.flatten(structs(x))
        widest = jax.dtypes.canonicalize_dtype(np.float64)  # JAX may be told to have float64 or not, at any time
        return cached(layer, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), widest)

    return call


@cached_by_shape
def variables_like(layer: Layer, x: Any) -> tuple[Tree, Tree]:
    """The shapes and dtypes of the variables that `layer.init` makes for inputs like `x`; nothing is allocated."""
    return jax.eval_shape(init_for(layer, x), shape_key())


@cached_by_shape
def init_for(layer: Layer, x: Any) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    """`layer.init` for inputs like `x` as a function of the key, which JAX traces once for all equal layers."""
    return jax.jit(lambda rng: layer.init(rng, x))


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            f"the input has a leaf {leaf!r} of type {type(leaf).__name__}, but every leaf must be an array or a "
            "jax.ShapeDtypeStruct; wrap numbers with jnp.asarray."
        )
    dtype = leaf.dtype
    if isinstance(dtype, np.dtype):  # not so for keys, which have one form only
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _checked_init(init: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(init, "__isabstractmethod__", False):
        return init

    @functools.wraps(init)
    def checked(self: Layer, rng: Any, x: Any) -> tuple[Tree, Tree]:
        _check_key(self, rng)
        if rng is None:
            raise TypeError(f"{brief(self)}: init needs a key; pass jax.random.key(0), say.")
        x = structs(x)
        _check_floats(self, x)
        return _pair(self, "init", "(trainables, non_trainables)", init(self, rng, x))

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
        _check_mode(self, inference_mode)
        _check_key(self, rng)
        x = jax.tree.map(_array, x)
        self.check_variables(x, trainables, non_trainables)
        try:
            out = fwd(self, x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        except jax.errors.TracerBoolConversionError as error:
            if isinstance(inference_mode, Tracer):
                error.add_note(
                    f"{brief(self)} reads inference_mode, which is traced here; "
                    'write jax.jit(layer.fwd, static_argnames="inference_mode").'
                )
            raise
        return _pair(self, "fwd", "(y, non_trainables)", out)

    return checked


def _array(leaf: Any) -> Any:
    # not by jnp.asarray, which compiles something for each shape
    return jax.device_put(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _pair(layer: Layer, method: str, wanted: str, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"{brief(layer)}: {method} returned {signature(out)}, but must return a pair {wanted}.")
    return out


def _check_mode(layer: Layer, mode: Any) -> None:
    if mode is True or mode is False:
        return
    if isinstance(mode, Tracer) and mode.dtype == np.bool_ and mode.ndim == 0:
        return  # jitted without static_argnames: fine for as long as no layer reads it
    raise TypeError(f"{brief(layer)}: inference_mode is {mode!r}, but must be True or False.")


def _check_key(layer: Layer, rng: Any) -> None:
    if rng is None:
        return
    dtype = getattr(rng, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32):
        raise TypeError(f"{brief(layer)}: rng is {rng!r}, but must be a key; pass jax.random.key(0), say.")


def refuse_other_than_dict(layer: Layer, what: str, got: Any) -> None:
    """Refuse variables that are neither a dict nor None."""
    if got is not None and not isinstance(got, dict):
        pair = " Pass the pair from init as two arguments: fwd(x, *variables)." if isinstance(got, tuple) else ""
        raise TypeError(f"{brief(layer)}: {what} is {signature(got)}, but must be a dict of arrays or None.{pair}")


def _check_names(layer: Layer, what: str, wanted: Tree, got: Tree) -> None:
    refuse_other_than_dict(layer, what, got)
    missing, extra = ", ".join(flat(wanted).keys() - flat(got)), ", ".join(flat(got).keys() - flat(wanted))
    if missing or extra:
        faults = [f"lacks {missing}"] * bool(missing) + [f"has extra {extra}"] * bool(extra)
        raise ValueError(
            f"{brief(layer)}: {what} {' and '.join(faults)}; it must hold {', '.join(flat(wanted)) or 'nothing'}. "
            "Pass what init returned for this layer."
        )


def _check_floats(layer: Layer, x: Any) -> None:
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(x)]
    follows = getattr(layer, "param_dtype", "none") is None  # such a layer makes its weights in the input's dtype
    if follows and dtypes and not any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise TypeError(
            f"{brief(layer)}: the input is {signature(x)}, but must be of a floating dtype; "
            "cast it, as by x.astype(jnp.float32)."
        )


def _check_dtypes(layer: Layer, x: Any, trainables: Tree) -> None:
    inputs = {str(leaf.dtype) for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    allowed = inputs if len(inputs) == 1 else set()
    for path, leaf in flat(trainables).items():
        dtype = str(leaf.dtype)
        if not inputs or not jnp.issubdtype(leaf.dtype, jnp.floating) or dtype in allowed:
            continue
        if dtype != getattr(layer, "param_dtype", None):
            raise TypeError(
                f"{brief(layer)}: the input is {' and '.join(sorted(inputs))} but {path} is {dtype}, and nothing is "
                "cast unasked; cast one of them, or declare the cast with param_dtype or mlax.dtypes.Mixed."
            )
