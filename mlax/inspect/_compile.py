"""Trace and compile what is inspected: a function, a jitted function, a training step or a compiled program."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax


def trace_and_compile(owner: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The traced function, or None if only the compiled one is known, and the compiled function.

    `function` is a `train.step`, a compiled function, which takes no arguments here, or any other function.
    """
    aot = getattr(function, "aot", None)  # of a `train.step`
    if aot is not None:
        if not args and not aot.compiled:
            raise ValueError(f"{owner}: {function} is not compiled yet; pass a state and a batch as well.")
        if args and (len(args) != 2 or not hasattr(args[0], "trainables")):
            kinds = ", ".join(type(each).__name__ for each in args)
            raise TypeError(f"{owner}: a training step takes a state and a batch, but got ({kinds}).")
        return aot.stages(*args)
    if hasattr(function, "as_text"):
        if args or kwargs:
            raise TypeError(f"{owner}: a compiled function takes no arguments here; pass it alone.")
        return None, function
    if not callable(function):
        raise TypeError(
            f"{owner}: {function!r} is neither a function nor a compiled function; the call is "
            f"{owner}(function, *arguments)."
        )
    traced = trace(function, args, kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")  # `stages` says which
        return traced, traced.lower().compile()


def trace(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The function traced for these arguments. A jitted one keeps its options; of others, non-arrays are static."""
    jitted: Any = function if hasattr(function, "trace") else None
    traced = None if jitted is None else jitted.trace(*args, **kwargs)
    if hasattr(traced, "jaxpr"):  # that of Flax's `nnx.jit` has none
        return traced
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}
    if len(arrays) == len(leaves) and _is_hashable(function):
        return jax.jit(function).trace(*args, **kwargs)

    @functools.wraps(function)
    def call(arrays: dict[int, Any]) -> Any:
        args, kwargs = structure.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*args, **kwargs)

    return jax.jit(call).trace(arrays)


def _is_hashable(function: Any) -> bool:
    """Whether JAX can cache what it traces of a function; not of Equinox's `filter_grad(f)`, say."""
    try:
        hash(function)
    except TypeError:
        return False
    return True
