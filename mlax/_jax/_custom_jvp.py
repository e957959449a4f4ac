"""Custom JVP rules, one for each argument."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

JVPRule = Callable[..., Any]  # of (tangent of the argument, *primals) to the tangent of the output


def with_jvps(function: Callable[..., Any], *rules: JVPRule | None) -> Callable[..., Any]:
    """`function` with a JVP rule for each argument, as by `jax.custom_jvp.defjvps`; None: not differentiated.

    The rule of an argument with a symbolic-zero tangent is not traced and costs nothing.
    """
    made = jax.custom_jvp(function)

    @functools.partial(made.defjvp, symbolic_zeros=True)
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        changes = [
            rule(jax.tree.map(_materialize_zero, dot, primal), *primals)
            for rule, dot, primal in zip(rules, tangents, primals, strict=True)
            if rule is not None and not all(isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(dot))
        ]
        return made(*primals), functools.reduce(lambda a, b: jax.tree.map(lax.add, a, b), changes)

    return made


def _materialize_zero(dot: Any, leaf: Any) -> Any:
    """Materialize a symbolic-zero tangent: zeros, or float0 for integers and keys."""
    if not isinstance(dot, SymbolicZero):
        return dot
    return jnp.zeros_like(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else np.zeros(leaf.shape, jax.dtypes.float0)
