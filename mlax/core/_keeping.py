"""A scan that also gives what its steps held, each array of which is stored once."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def keeping_scan(
    body: Callable[[Any, Any], tuple[Any, tuple[Any, Any]]], carry: Any, xs: Any, *, reverse: bool, unroll: int
) -> tuple[Any, tuple[Any, Any]]:
    """`lax.scan` of a body from (carry, x) to (carry, (y, kept)).

    Most cells show what they carry: what a step keeps of such a carry is y of the step before, and not stored again.
    """
    first = jax.tree.leaves(carry)
    known: dict[int, tuple[int, int]] = {}  # leaves of `kept`: which of the carry they are, and which of y shows it
    form: Any = None

    def step(carry: Any, x: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        nonlocal form
        after, (y, kept) = body(carry, x)
        shown = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(y))}
        pairs = enumerate(zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True))
        found = {id(old): (place, shown[id(new)]) for place, (old, new) in pairs if id(new) in shown}
        leaves, form = jax.tree.flatten(kept)
        known.update({place: found[id(leaf)] for place, leaf in enumerate(leaves) if id(leaf) in found})
        return after, (y, [None if place in known else leaf for place, leaf in enumerate(leaves)])

    def delayed(y: jax.Array, start: jax.Array) -> jax.Array:
        return lax.concatenate([y, start[None]], 0)[1:] if reverse else lax.concatenate([start[None], y], 0)[:-1]

    last, (y, kept) = lax.scan(step, carry, xs, reverse=reverse, unroll=unroll)
    for place, (old, new) in known.items():
        kept[place] = delayed(jax.tree.leaves(y)[new], first[old])
    return last, (y, jax.tree.unflatten(form, kept))
