"""audit: find the operations in a function's jaxpr that leave its declared dtype."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from mlax._jax import layer_path, source_line
from mlax.core import Documented, Layer, check_is_dtype, short_repr


@dataclasses.dataclass(frozen=True)
class DtypeViolation(metaclass=Documented):
    """One operation with an operand or a result of another floating dtype than the declared one."""

    path: str  # of the layer, like "blocks/mlp/up"; "" outside of a layer
    primitive: str  # like "add"; of a product in another dtype with its algorithm, like "dot_general[BF16_BF16_F32]"
    inputs: tuple[str, ...]  # dtypes of all operands, in order
    outputs: tuple[str, ...]  # dtypes of all results
    declared: str  # the dtype that was expected
    source: str  # like "model.py:31 (wire)"; "" where JAX has no line of the user's

    def __str__(self):
        layer = f"{self.path}: " if self.path else ""
        inputs = f"{', '.join(self.inputs)} " if self.inputs else ""
        line = f", at {self.source}" if self.source else ""
        return f"{layer}{self.primitive} {inputs}-> {', '.join(self.outputs)}, declared {self.declared}{line}"


class Violations(tuple[DtypeViolation, ...]):
    """A tuple that is printed with a line for each violation."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "every operation is in the declared dtype"


class DtypeError(TypeError, metaclass=Documented):
    """Raised by `check`: an operation leaves the declared dtype."""


def audit(function: Callable, *args: Any, dtype: Any = None, **kwargs: Any) -> tuple[DtypeViolation, ...]:
    """A dtype audit: list the operations of `function(*args, **kwargs)` that leave `dtype`, in the order they run.

    Arrays and `jax.ShapeDtypeStruct`s anywhere in the arguments are traced; every other leaf is static.
    `dtype=None` declares the one floating dtype of the traced arguments. Nothing is computed, and only the
    function's jaxpr is inspected: audit `jax.grad(loss)` to include the backward pass.

    An operation is a violation if any operand or result is floating or complex and not of the declared dtype, or if it
    is a product whose `precision` names an algorithm that multiplies in another one, such as "BF16_BF16_F32".
    Two things are allowed: a cast *to* the declared dtype, and weakly typed scalars: Python numbers, and what is
    computed from them, such as BatchNorm's fraction by the number of steps, which are float32 or float64. Rounding
    0.999 to bfloat16 would be the mistake.

    What XLA makes of a product by default is not in the jaxpr: on GPUs float32 is multiplied as TF32, and on TPUs as
    bfloat16, unless the layer's `precision` or `jax_default_matmul_precision` is "highest". Sums are accumulated in the
    declared dtype or a wider one.
    """
    if isinstance(function, Layer):
        raise TypeError(
            f"audit: {short_repr(function)} is a layer, but a function is audited: audit(model.fwd, x, trainables, "
            "non_trainables)."
        )
    if not callable(function):
        raise TypeError(f"audit: {function!r} is not a function; the call is audit(function, *arguments).")
    check_is_dtype("audit", dtype=dtype)
    jaxpr = _trace(function, args, kwargs)
    declared = _infer_dtype(jaxpr.in_avals) if dtype is None else jnp.dtype(dtype)
    return Violations(_find_violations(jaxpr, declared))


def check(function: Callable, *args: Any, dtype: Any = None, **kwargs: Any) -> None:
    """Raise `DtypeError` for the first operation that `audit` lists, if any."""
    violations = audit(function, *args, dtype=dtype, **kwargs)
    if violations:
        first, *rest = violations
        more = f" (and {len(rest)} more, listed by audit)" if rest else ""
        raise DtypeError(
            f"{first}{more}; compute in the dtype of the input, "
            "or declare the override (accum_dtype, param_dtype, Mixed)."
        )


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def _trace(function, args, kwargs) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs))

    def call(*arrays):
        remaining = iter(arrays)
        traced = [next(remaining) if isinstance(leaf, _ARRAYS) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, traced)
        return function(*args, **kwargs)

    return jax.make_jaxpr(call)(*(leaf for leaf in leaves if isinstance(leaf, _ARRAYS)))


def _infer_dtype(avals) -> np.dtype:
    floats = {aval.dtype for aval in avals if _is_float(aval)}
    if len(floats) != 1:
        found = ", ".join(sorted(set(_dtype_names(avals)))) or "no arrays"
        raise TypeError(f"The arguments have {found} but the audit needs one floating dtype; pass dtype=.")
    return floats.pop()


def _find_violations(jaxpr, declared, enclosing=()) -> Iterator[DtypeViolation]:
    for equation in jaxpr.eqns:
        stack = (*enclosing, equation)
        bodies = tuple(_sub_jaxprs(equation))
        for body in bodies:
            yield from _find_violations(body, declared, stack)

        inputs = [operand.aval for operand in equation.invars]
        outputs = [result.aval for result in equation.outvars]
        is_cast_back = equation.primitive.name == "convert_element_type" and outputs[0].dtype == declared
        is_foreign = any(_is_float(aval) and aval.dtype != declared for aval in inputs + outputs)
        algorithm = _foreign_algorithm(equation, declared)
        if algorithm or (is_foreign and not is_cast_back and not _is_noop_cast(equation) and not bodies):
            yield DtypeViolation(
                path=layer_path(stack),
                primitive=equation.primitive.name + algorithm,
                inputs=_dtype_names(inputs),
                outputs=_dtype_names(outputs),
                declared=str(declared),
                source=source_line(stack),
            )


def _is_noop_cast(equation) -> bool:
    """Whether it casts a dtype to itself, as JAX does to make a weakly typed value strongly typed."""
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype


def _foreign_algorithm(equation, declared) -> str:
    """The algorithm that a product is computed by, in brackets, if it multiplies in another dtype; else ""."""
    algorithm = equation.params.get("precision")
    if isinstance(algorithm, jax.lax.DotAlgorithmPreset):
        multiplied = _ALGORITHM_DTYPES.get(algorithm.name.split("_")[0], algorithm.name.split("_")[0])
        return "" if multiplied in (str(declared), "ANY", "DEFAULT") else f"[{algorithm.name}]"
    if isinstance(algorithm, jax.lax.DotAlgorithm):
        multiplied = jnp.dtype(algorithm.lhs_precision_type)
        return "" if multiplied == declared else f"[{multiplied}]"
    return ""


_ALGORITHM_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def _sub_jaxprs(holder) -> Iterator[Any]:
    """The jaxprs in an equation's params: plain, traced, in a tuple, or in an object with params."""
    if isinstance(holder, (Jaxpr, ClosedJaxpr)):
        yield holder
    elif isinstance(holder, jax.stages.Traced):
        yield holder.jaxpr
    elif isinstance(params := getattr(holder, "params", None), dict):
        # A scatter's update_jaxpr is cached with the source line of another operation.
        yield from _sub_jaxprs([value for name, value in params.items() if name != "update_jaxpr"])
    elif isinstance(holder, (tuple, list)):
        for item in holder:
            yield from _sub_jaxprs(item)


def _is_float(aval) -> bool:
    # Random keys have an extended dtype, and tokens have none.
    is_inexact = hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)
    return is_inexact and not (getattr(aval, "weak_type", False) and aval.ndim == 0)


def _dtype_names(avals) -> tuple[str, ...]:
    return tuple(str(getattr(aval, "dtype", aval)) for aval in avals)
