"""Custom JVP rules, one for each argument."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

JVPRule = Callable[..., Any]  # of (its change, *arguments) to the change of the function


def with_jvps(function: Callable[..., Any], *rules: JVPRule | None) -> Callable[..., Any]:
    """`function`, which changes by the sum of what the rule of each argument gives; None: not with this argument.

    The rule of an argument that stays as it is costs nothing: it is not even traced.
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
    """No change at all as an array: of zeros, or of JAX's float0 where there can be none, as of keys."""
    if not isinstance(dot, SymbolicZero):
        return dot
    return jnp.zeros_like(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else np.zeros(leaf.shape, jax.dtypes.float0)
