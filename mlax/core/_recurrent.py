"""Recurrent: a cell over the time axis."""

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax.core._cell import Cell, CompositeCell
from mlax.core._frozen import frozen
from mlax.core._laid import laid_like
from mlax.core._layer import Tree
from mlax.core._notes import brief, signature
from mlax.core._split import split_scan
from mlax.core._wrapper import Wrapper


@frozen
class Recurrent(Wrapper):
    """Apply a cell to each time step of x (b, t, ...) in turn, carrying its state along: y (b, t, ...).

    Variables: those of the cell, the same at every step. `reverse` goes from the last step to the first.
    With `carry=True` the input is (carry, x) and the output (carry, y), the first carry and the last. With
    `lengths=True` the number of steps of each example, whole numbers (b,), comes last in the input, (x, lengths) or
    (carry, x, lengths): beyond it the carry stays and y is zero. `unroll` steps are compiled side by side; unless it
    is given, 4 on a GPU, where an LSTM then takes two thirds of the time, and 1 elsewhere, where nothing is gained.
    """

    layer: Cell
    _: KW_ONLY
    axis: int = 1
    reverse: bool = False
    unroll: int | None = None
    carry: bool = False
    lengths: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Cell):
            raise TypeError(f"Recurrent: {self.layer!r} is no mlax.Cell; it needs `start` beside `init` and `fwd`.")
        if self.unroll is not None and (not isinstance(self.unroll, int) or self.unroll < 1):
            raise ValueError(f"Recurrent: unroll is {self.unroll!r}, but must be a whole number of at least 1.")

    def init(self, rng, x):
        carry, x, lengths = self._taken_apart(x)
        times, step = self._step(x)
        if lengths is not None:
            _check_lengths(self, lengths, times, step)
        return self.layer.init(rng, (jax.eval_shape(self.layer.start, step) if carry is None else carry, step))

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        carry, x, lengths = self._taken_apart(x)
        times, step = self._step(x)
        x = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, self.axis, 0), x)  # (t, b, ...)
        carry = laid_like(self.layer.start(step), x, axis=1) if carry is None else carry
        keys = None if rng is None else jax.random.split(rng, times)
        within = None
        if lengths is not None:
            _check_lengths(self, lengths, times, step)
            within = lax.broadcasted_iota(lengths.dtype, (times, *lengths.shape), 0) < lengths  # (t, b)
        if isinstance(self.layer, CompositeCell) and non_trainables is None:
            self.layer.check_variables((carry, x), trainables, None)
            options = {"inference_mode": inference_mode, "reverse": self.reverse, "unroll": self._unrolled}
            carry, y = split_scan(self.layer, carry, x, trainables or {}, keys, within, self._kept, **options)
        else:
            (carry, non_trainables), y = self._whole(
                (carry, non_trainables), x, trainables, keys, within, inference_mode
            )
        y = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, self.axis), y)
        return ((carry, y) if self.carry else y), non_trainables

    def _whole(
        self, before: tuple[Any, Tree], x: Any, trainables: Tree, keys: Any, within: Any, inference_mode: bool
    ) -> tuple[tuple[Any, Tree], Any]:
        """The scan of a cell as it comes."""

        def step(before: tuple[Any, Tree], now: tuple[Any, Any, Any]) -> tuple[tuple[Any, Tree], Any]:
            carry, state = before
            x, key, within = now
            out, state = self.layer.fwd((carry, x), trainables, state, rng=key, inference_mode=inference_mode)
            after, y = self._kept(within, carry, *out)
            return (after, state), y

        return lax.scan(step, before, (x, keys, within), reverse=self.reverse, unroll=self._unrolled)

    @property
    def _unrolled(self) -> int:
        return self.unroll or (4 if jax.default_backend() == "gpu" else 1)

    def _kept(self, within: Any, carry: Any, after: Any, y: Any) -> tuple[Any, Any]:
        """What a step gives, where the example is long enough; the carry as it was, and zeros, elsewhere."""
        if signature(after) != signature(carry):
            raise ValueError(
                f"{brief(self)}: the cell turns a carry of {signature(carry)} into {signature(after)}; "
                "it must return one like the one it was given."
            )
        if within is None:
            return after, y

        def kept(new: jax.Array, old: jax.Array) -> jax.Array:
            return lax.select(lax.broadcast_in_dim(within, new.shape, (0,)), new, old)

        return jax.tree.map(kept, after, carry), jax.tree.map(lambda leaf: kept(leaf, jnp.zeros_like(leaf)), y)

    def _taken_apart(self, x: Any) -> tuple[Any, Any, Any]:
        """(carry, x, lengths), with None for what the input does not hold."""
        wanted = ["carry"] * self.carry + ["x"] + ["lengths"] * self.lengths
        if len(wanted) == 1:
            return None, x, None
        if not isinstance(x, tuple) or len(x) != len(wanted):
            raise ValueError(
                f"{brief(self)}: the input is {signature(x)}, but must be the tuple ({', '.join(wanted)}), "
                f"as {' and '.join(f'{field}=True' for field in wanted if field != 'x')} says."
            )
        return (None, *x) if not self.carry else (*x, None) if not self.lengths else x

    def _step(self, x: Any) -> tuple[int, Any]:
        """The number of time steps, and the shapes and dtypes of one."""
        sizes: set[int] = set()
        for leaf in jax.tree.leaves(x):
            if not -leaf.ndim <= self.axis < leaf.ndim:
                raise ValueError(f"{brief(self)}: the input has the shape {leaf.shape}, which has no axis {self.axis}.")
            sizes.add(leaf.shape[self.axis])
        if len(sizes) != 1:
            raise ValueError(f"{brief(self)}: time has the lengths {sorted(sizes)} in the input; it needs one.")

        def drop(leaf: Any) -> jax.ShapeDtypeStruct:
            axis = self.axis % leaf.ndim
            return jax.ShapeDtypeStruct(leaf.shape[:axis] + leaf.shape[axis + 1 :], leaf.dtype)

        return sizes.pop(), jax.tree.map(drop, x)


def _check_lengths(self: Recurrent, lengths: Any, times: int, step: Any) -> None:
    """Refuse impossible lengths; their values only where they are known, which they are not inside of jit."""
    batch = jax.tree.leaves(step)[0].shape[:1]
    if lengths.shape != batch or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{brief(self)}: lengths is {signature(lengths)}, but must be whole numbers of the shape {batch}, "
            "one for each example."
        )
    if isinstance(lengths, Tracer | jax.ShapeDtypeStruct) or lengths.size == 0:
        return
    known = np.asarray(lengths)
    if known.min() < 0 or known.max() > times:
        raise ValueError(
            f"{brief(self)}: lengths go from {known.min()} to {known.max()}, but the input has {times} time steps; "
            f"give lengths from 0 to {times}, or a longer input."
        )
