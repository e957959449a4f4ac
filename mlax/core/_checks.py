"""The checks of a call of a layer, made while tracing: key, inference_mode, and the variables' names and dtypes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mlax._jax import is_typed_key, leaves_with_paths
from mlax.core._errors import not_a_dtype_message, short_repr, short_signature, signature
from mlax.core._paths import STACKED, flatten_paths

KEY_ADVICE = "pass jax.random.key(0), for example"
DONATION_ADVICE = (
    "`train.step`, `train.fit` and functions jitted with `donate_argnums` donate arrays, so use those that they "
    "returned, or make them again."
)


def is_key(given: Any) -> bool:
    """Whether it is a typed key or a legacy uint32 one."""
    if is_typed_key(given):
        return True
    return isinstance(given, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and given.dtype == np.uint32


def check_key(owner: str, call: str, rng: Any, x: Any) -> None:
    """Raise unless `rng` is a key; `call` shows the arguments in order."""
    if not is_key(rng):
        swapped = f" Are the arguments swapped? The call is {call}." if is_key(x) else ""
        raise TypeError(f"{owner} needs a key, but rng is {short_signature(rng)}; {KEY_ADVICE}.{swapped}")


def check_inference_mode(layer: Any, mode: Any) -> None:
    """Raise unless `mode` is True or False."""
    if mode is True or mode is False:
        return
    if isinstance(mode, Tracer) and mode.dtype == np.bool_ and mode.ndim == 0:
        return  # jitted without static_argnames, which is fine unless a layer reads it
    raise TypeError(f"{short_repr(layer)}: inference_mode is {short_signature(mode)}, but must be True or False.")


def foreign_array_type(leaf: Any) -> str | None:
    """The type of an array of another library, whose dtype JAX cannot read; None for any other value."""
    library = type(leaf).__module__.partition(".")[0]
    return f"{library}.{type(leaf).__name__}" if library in ("torch", "tensorflow") else None


def check_is_dict(layer: Any, what: str, got: Any) -> None:
    """Raise unless the variables are a dict or None."""
    if got is not None and not isinstance(got, dict):
        advice = " Pass the pair from init as two arguments: fwd(x, *variables)." if isinstance(got, tuple) else ""
        if isinstance(got, jax.Array):
            advice = " Pass several inputs as one tuple: fwd((x, t), trainables)."
        raise TypeError(
            f"{short_repr(layer)}: {what} is {short_signature(got)}, but must be a dict of arrays or None.{advice}"
        )


def check_leaf_names(layer: Any, variables: Any) -> None:
    """Raise for a variable of a layer that is called "stacked", which would count its first axis as layers."""
    if isinstance(variables, dict) and not isinstance(variables.get(STACKED), dict | None):
        raise ValueError(
            f"{short_repr(layer)}: a variable cannot be called {STACKED!r}, since that name in a path says that leaves "
            "have a leading axis of layers, as in Repeat; rename it."
        )


def check_not_swapped(layer: Any, x: Any, trainables: Any) -> None:
    """Raise if the variables were passed for the input."""
    if isinstance(x, dict) and isinstance(trainables, jax.Array | np.ndarray):
        raise TypeError(f"{short_repr(layer)}: fwd(x, trainables): the input is a dict; are the arguments swapped?")


def check_names(layer: Any, wanted: tuple[Any, Any], got: tuple[Any, Any]) -> None:
    """Raise unless the leaves of (trainables, non_trainables) have the names wanted."""
    for index, what in enumerate(("trainables", "non_trainables")):
        check_is_dict(layer, what, got[index])
        names, given = flatten_paths(wanted[index]), flatten_paths(got[index])
        missing, extra = (", ".join(sorted(some)) for some in (names.keys() - given, given.keys() - names))
        if missing or extra:
            faults = [f"lacks {missing}"] * bool(missing) + [f"has extra {extra}"] * bool(extra)
            swapped = [flatten_paths(each).keys() for each in got] == [
                flatten_paths(each).keys() for each in reversed(wanted)
            ]
            advice = "Pass what init returned for this layer."
            if swapped:
                advice = "Are trainables and non_trainables swapped?"
            elif index == 1 and not given:
                advice = "Pass the state, such as a cache or running statistics, that init(rng, x)[1] returned."
            raise ValueError(
                f"{short_repr(layer)}: {what} {' and '.join(faults)}; it must hold {', '.join(names) or 'nothing'}. "
                f"{advice}"
            )


def check_not_donated(owner: str, advice: str = DONATION_ADVICE, **trees: Any) -> None:
    """Raise if an array was donated to an earlier call; `advice` ends the sentence, with what to do."""
    if not any(map(_is_deleted, jax.tree.leaves(trees))):
        return
    path = next(path for path, leaf in leaves_with_paths(trees) if _is_deleted(leaf))
    raise ValueError(f"{owner}: {path} was donated to an earlier call, which reused its memory; {advice}")


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def check_is_dtype(owner: str, **dtypes: Any) -> None:
    """Raise if an argument is neither None nor a dtype; the error of NumPy names neither function nor argument."""
    for argument, dtype in dtypes.items():
        try:
            if dtype is not None:
                jnp.dtype(dtype)
        except TypeError:
            raise TypeError(not_a_dtype_message(owner, argument, dtype)) from None


def check_floating_input(layer: Any, x: Any) -> None:
    """Raise for an input without a floating dtype if the layer needs one, or creates its weights in that dtype."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(x)]
    follows = getattr(layer, "param_dtype", "none") is None  # then the weights have the dtype of the input
    needs = follows or layer.needs_floating_input
    if needs and dtypes and not any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        raise TypeError(
            f"{short_repr(layer)}: the input is {signature(x)}, but must have a floating dtype; "
            "cast it, for example by x.astype(jnp.float32)."
        )


def check_not_truncated(x: Any) -> None:
    """Raise for float64 that JAX would silently truncate to float32."""
    if not isinstance(x, np.ndarray | np.generic | jax.ShapeDtypeStruct) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise TypeError(
            f"the input is {signature(x)}, which JAX would truncate to 32 bits; pass x.astype(np.float32), or call "
            'jax.config.update("jax_enable_x64", True) to compute in float64.'
        )


def check_array(layer: Any, x: Any) -> None:
    """Raise unless the input is one array."""
    if x is None or isinstance(x, tuple | list | dict):
        raise TypeError(f"{short_repr(layer)}: the input is {signature(x)}, but must be an array.")


@contextlib.contextmanager
def expect_array(layer: Any, x: Any) -> Iterator[None]:
    """Explain the AttributeError of a layer that takes an array but got a tuple, a dict or None."""
    try:
        yield
    except AttributeError as error:
        if type(error.obj) is type(x) and error.name in ("shape", "ndim", "dtype", "size"):
            check_array(layer, x)
        raise


def check_dtypes(layer: Any, x: Any, trainables: Any) -> None:
    """Raise for trainables whose dtype is not the input's, unless the layer declares the cast."""
    inputs = {str(leaf.dtype) for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    allowed = inputs if len(inputs) == 1 else set()
    check_not_donated(type(layer).__name__, trainables=trainables)
    for path, leaf in flatten_paths(trainables).items():
        if (foreign := foreign_array_type(leaf)) is not None:
            raise TypeError(f"{short_repr(layer)}: {path} is a {foreign}; convert it by jnp.asarray(leaf.numpy()).")
        dtype = str(leaf.dtype)
        if not inputs or not jnp.issubdtype(leaf.dtype, jnp.floating) or dtype in allowed:
            continue
        if dtype != getattr(layer, "param_dtype", None):
            raise TypeError(
                f"{short_repr(layer)}: the input is {' and '.join(sorted(inputs))} but {path} is {dtype}, "
                "and mlax never casts implicitly; cast one of them, or declare the cast with param_dtype or "
                "mlax.dtypes.Mixed."
            )


def check_shapes(layer: Any, x: Any, variables: Any, shapes_for: Callable[[Any], Any]) -> None:
    """Raise for variables of other shapes than `shapes_for(x)`; inside `shard_map`, which splits them, of other ranks.

    `shapes_for` gives the variables that a layer needs for an input.
    """
    likes = flatten_paths(shapes_for(x))
    for path, leaf in flatten_paths(variables).items():
        shape = likes[path].shape
        if leaf.shape == shape or (leaf.ndim == len(shape) and jax.sharding.get_abstract_mesh().manual_axes):
            continue
        must = signature(jax.ShapeDtypeStruct(shape, leaf.dtype))
        advice = _input_advice(x, path, shape, leaf.shape, shapes_for) or "pass what init returned for this layer."
        with contextlib.suppress(Exception):  # where the layer refuses the transposed input, or x is a tree
            transposed = jax.ShapeDtypeStruct(x.shape[::-1], x.dtype)
            advice = "did you mean x.T?" if flatten_paths(shapes_for(transposed))[path].shape == leaf.shape else advice
        raise ValueError(
            f"{short_repr(layer)}: the input is {signature(x)}, which needs {path} to be {must}, but it is "
            f"{signature(leaf)}; {advice}"
        )


def _input_advice(
    x: Any, path: str, wanted: tuple[int, ...], got: tuple[int, ...], shapes_for: Callable[[Any], Any]
) -> str | None:
    """The change of one axis of the input that may be meant: with it, the variable must have the shape that it has."""
    changes = [sizes for sizes in zip(wanted, got, strict=False) if sizes[0] != sizes[1]]
    if len(wanted) != len(got) or len(changes) != 1:
        return None
    new, old = changes[0]
    for axis, size in enumerate(getattr(x, "shape", ())):
        with contextlib.suppress(Exception):  # where the layer refuses the other input
            other = jax.ShapeDtypeStruct((*x.shape[:axis], old, *x.shape[axis + 1 :]), x.dtype)
            if size == new and flatten_paths(shapes_for(other))[path].shape == got:
                return f"pass an input with {old} in place of {new}, or what init returned for this one."
    return None
