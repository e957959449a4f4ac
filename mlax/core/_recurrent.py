"""Recurrent: a cell scanned over the time axis."""

import abc
import collections
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax._jax import Apply, Function, ScanStep, add_feedback, batched_grad_scan, named_key, shard_like, time_vmap
from mlax.core._composite import Composite, Sub
from mlax.core._errors import short_repr, signature
from mlax.core._frozen import frozen
from mlax.core._layer import Layer, Tree, shape_dtypes
from mlax.core._wrappers import Wrapper


@frozen
class Cell(Layer):
    """One step in time: a layer from (carry, x) to (carry, y), where x and y are of one time step, (b, ...)."""

    @abc.abstractmethod
    def start(self, x: Any) -> Any:
        """The carry before the first step, for a step's input of the shape and dtype of `x`."""


@frozen
class CompositeCell(Composite, Cell):
    """A cell made of parts, written as what needs no carry, `ahead`, and what does, `feedback` and `step`.

    `Recurrent` computes `ahead` for all time steps at once, and so it does the gradients of all weights: of each
    part, one product for the whole sequence. By itself the cell computes one after the other.
    """

    @abc.abstractmethod
    def ahead(self, sub: Sub, x: Any) -> Any:
        """What of a step needs its input (b, ...) only."""

    def feedback(self, sub: Sub, carry: Any) -> Any:
        """What the carry adds to `ahead`, if anything: like it, or None.

        `step` can do the same for itself; but a sum that is known as such has one gradient instead of two.
        """
        return None

    @abc.abstractmethod
    def step(self, sub: Sub, carry: Any, ahead: Any) -> tuple[Any, Any]:
        """The next carry and the output (b, ...), from the carry and from `ahead` with `feedback` added to it."""

    def wire(self, sub: Sub, x: Any) -> tuple[Any, Any]:
        carry, x = x
        return self.step(sub, carry, add_feedback(self.ahead(sub, x), self.feedback(sub, carry)))


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
        carry = shard_like(self.layer.start(step), x, axis=1) if carry is None else carry
        keys = None if rng is None else jax.random.split(rng, times)
        within = None
        if lengths is not None:
            _check_lengths(self, lengths, times, step)
            within = lax.broadcasted_iota(lengths.dtype, (times, *lengths.shape), 0) < lengths  # (t, b)
        if isinstance(self.layer, CompositeCell) and non_trainables is None:
            self.layer.check_variables((carry, x), trainables, None)
            options = {"inference_mode": inference_mode, "reverse": self.reverse, "unroll": self._unrolled}
            carry, y = cell_scan(self.layer, carry, x, trainables or {}, keys, within, self._kept, **options)
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
                f"{short_repr(self)}: the cell turns a carry of {signature(carry)} into {signature(after)}; "
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
                f"{short_repr(self)}: the input is {signature(x)}, but must be the tuple ({', '.join(wanted)}), "
                f"as {' and '.join(f'{field}=True' for field in wanted if field != 'x')} says."
            )
        return (None, *x) if not self.carry else (*x, None) if not self.lengths else x

    def _step(self, x: Any) -> tuple[int, Any]:
        """The number of time steps, and the shapes and dtypes of one."""
        sizes: set[int] = set()
        for leaf in jax.tree.leaves(x):
            if not -leaf.ndim <= self.axis < leaf.ndim:
                raise ValueError(
                    f"{short_repr(self)}: the input has the shape {leaf.shape}, which has no axis {self.axis}."
                )
            sizes.add(leaf.shape[self.axis])
        if len(sizes) != 1:
            raise ValueError(f"{short_repr(self)}: time has the lengths {sorted(sizes)} in the input; it needs one.")

        def drop(leaf: Any) -> jax.ShapeDtypeStruct:
            axis = self.axis % leaf.ndim
            return jax.ShapeDtypeStruct(leaf.shape[:axis] + leaf.shape[axis + 1 :], leaf.dtype)

        return sizes.pop(), jax.tree.map(drop, x)


def _check_lengths(self: Recurrent, lengths: Any, times: int, step: Any) -> None:
    """Refuse impossible lengths; their values only where they are known, which they are not inside of jit."""
    batch = jax.tree.leaves(step)[0].shape[:1]
    if lengths.shape != batch or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{short_repr(self)}: lengths is {signature(lengths)}, but must be whole numbers of the shape {batch}, "
            "one for each example."
        )
    if isinstance(lengths, Tracer | jax.ShapeDtypeStruct) or lengths.size == 0:
        return
    known = np.asarray(lengths)
    if known.min() < 0 or known.max() > times:
        raise ValueError(
            f"{short_repr(self)}: lengths go from {known.min()} to {known.max()}, but the input has {times} time "
            "steps; "
            f"give lengths from 0 to {times}, or a longer input."
        )


Keep = Callable[[Any, Any, Any, Any], tuple[Any, Any]]  # of (within, carry, next carry, y) to (next carry, y)


def cell_scan(
    cell: CompositeCell,
    carry: Any,
    x: Any,
    trainables: dict[str, Tree],
    keys: jax.Array | None,
    within: jax.Array | None,
    keep: Keep,
    *,
    inference_mode: bool,
    reverse: bool,
    unroll: int,
) -> tuple[Any, Any]:
    """The last carry and y (t, b, ...) from the first and x (t, b, ...)."""
    like = shape_dtypes(trainables)  # what a derivative holds on to may not hold the variables

    def sub(phase: str, apply: Apply, key: jax.Array | None) -> Sub:
        """The cell's parts; each call of one has a key of its own, if it reads it at all."""
        calls = collections.Counter[str]()

        def call(name: str, part: Layer, x: Any) -> Any:
            def run(weights: Tree, given: tuple[Any, jax.Array | None]) -> Any:
                return part.fwd(given[0], weights, None, rng=given[1], inference_mode=inference_mode)[0]

            calls[name] += 1
            own = None
            if key is not None and _reads_key(run, like.get(name), shape_dtypes(x)):
                own = named_key(named_key(key, phase), f"{name}#{calls[name]}")
            return apply(name, run, (x, own))

        return Sub(cell, call, inference_mode)

    def ahead(weights: dict[str, Tree], given: tuple[Any, jax.Array | None]) -> Any:
        x, key = given
        return cell.ahead(sub("ahead", _with(weights), key), x)

    def feedback(weights: dict[str, Tree], given: tuple[Any, jax.Array | None]) -> Any:
        carry, key = given
        return cell.feedback(sub("feedback", _with(weights), key), carry)

    def step(apply: Apply, carry: Any, ahead: Any, fixed: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        _, key, within = fixed
        return keep(within, carry, *cell.step(sub("step", apply, key), carry, ahead))

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)
    ahead_keys = keys if keys is not None and _reads_key(ahead, like, one) else None
    feedback_keys = keys if keys is not None and _reads_key(feedback, like, shape_dtypes(carry)) else None
    return batched_grad_scan(
        ScanStep(feedback, step),
        carry,
        time_vmap(lambda given: ahead(trainables, given), (x, ahead_keys)),
        (feedback_keys, keys, within),
        trainables,
        reverse=reverse,
        unroll=unroll,
    )


def _with(weights: dict[str, Tree]) -> Apply:
    return lambda name, run, given: run(weights.get(name), given)


def _reads_key(run: Function, weights: Any, x: Any) -> bool:
    """Whether `run(weights, (x, key))` does anything with the key: without one, steps can share a batch."""
    key = jax.eval_shape(jax.random.key, 0)
    traced = jax.make_jaxpr(lambda key, weights, x: run(weights, (x, key)))(key, weights, x)
    first = traced.jaxpr.invars[0]
    return any(var is first for eqn in traced.jaxpr.eqns for var in eqn.invars)
