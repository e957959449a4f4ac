"""Cell, Recurrent: a cell scanned over the time axis."""

import abc
import collections
import functools
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax._jax import (
    Apply,
    Function,
    ScanStep,
    add_feedback,
    batched_grad_scan,
    explicit_sharding,
    named_key,
    shard_like,
    time_vmap,
)
from mlax.core._composite import KEYS, Composite, Sub, number_call
from mlax.core._errors import error_scope, locate_nan_in_scan, short_repr, signature, wrong_instance_message
from mlax.core._frozen import frozen, with_fields
from mlax.core._layer import Layer, Tree, join_outputs, prefix_outputs, shape_dtypes, split_outputs
from mlax.core._parts import split_parts
from mlax.core._surgery import find_layers
from mlax.core._wrappers import Tap, Wrapper, slice_shapes

CARRY = "carry"  # the name of a carry among the non-trainables


@frozen
class Cell(Layer):
    """One time step: a layer from (carry, x) to (carry, y), where x and y (b, ...) have no time axis."""

    @abc.abstractmethod
    def initial_carry(self, x: Any) -> Any:
        """The initial carry, for a step's input of the shape and dtype of `x`."""


@frozen
class CompositeCell(Composite, Cell):
    """A cell made of parts, split into what does not need the carry, `ahead`, and what does, `feedback` and `step`.

    `Recurrent` computes `ahead` for all time steps at once, and likewise the gradients of all weights: for each
    part, one product for the whole sequence. Called by itself, the cell computes them in turn.
    """

    @abc.abstractmethod
    def ahead(self, sub: Sub, x: Any) -> Any:
        """The part of a step that needs only its input (b, ...)."""

    def feedback(self, sub: Sub, carry: Any) -> Any:
        """What the carry adds to `ahead`: a pytree like it, or None.

        `step` could add it too; but a sum declared here has one gradient instead of two.
        """
        return None

    def scan_with_next(
        self, x: jax.Array, trainables: Tree, following: "Cell", next_trainables: Tree
    ) -> jax.Array | None:
        """The outputs (t, b, ...) of a layer of the cell `following` on those of one of this cell on x (t, b, ...).

        None if two scans are faster than one for both. The carries start as `initial_carry`.
        """
        return None

    @abc.abstractmethod
    def step(self, sub: Sub, carry: Any, ahead: Any) -> tuple[Any, Any]:
        """The next carry and the output (b, ...), from the carry and `ahead`, to which `feedback` has been added."""

    def wire(self, sub: Sub, x: Any) -> tuple[Any, Any]:
        if not isinstance(x, tuple) or len(x) != 2:
            raise ValueError(
                f"{short_repr(self)}: the input is {signature(x)}, but must be the pair (carry, x); for a "
                "sequence, use mlax.Recurrent(cell)."
            )
        carry, x = x
        _check_carry(self, carry, x)
        return self.step(sub, carry, add_feedback(self.ahead(sub, x), self.feedback(sub, carry)))


@frozen
class Recurrent(Wrapper):
    """A recurrent layer (RNN): scan a cell over the time axis of x (b, t, ...), carrying its state: y (b, t, ...).

    Variables: those of the cell, shared by all steps. `reverse` scans from the last step to the first.
    With `carry=True` the input is (carry, x) and the output (carry, y): the initial carry and the final one. With
    `lengths=True` the sequence length of each example, integers (b,), comes last in the input, (x, lengths) or
    (carry, x, lengths): past it the carry stays as it is and y is zero. With `stateful` a call starts with the final
    carry of the one before, for decoding and for truncated backpropagation through time: non-trainables carry/0,
    carry/1 and so on, (b, ...), zero at first. `unroll` is that of `lax.scan`; None is 8 on a GPU, where an LSTM then
    takes three fifths of the time, and 1 elsewhere, where it gains nothing. On a GPU `Series` and `nn.Stacked` compute
    two small LSTM layers in a row by one scan.

    >>> layer, x = mlax.Recurrent(nn.LSTMCell(32)), jnp.ones((8, 20, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 20, 32)
    """

    layer: Cell  # the cell
    _: KW_ONLY
    axis: int = 1  # of time
    reverse: bool = False  # whether to start at the last time step
    unroll: int | None = None  # steps of the scan per iteration; None: as is fastest
    carry: bool = False  # whether the carry is an input and an output
    lengths: bool = False  # whether the lengths of the sequences are an input
    stateful: bool = False  # whether a call starts with the final carry of the one before

    def __post_init__(self) -> None:
        if self.stateful and (self.carry or self.reverse):
            raise ValueError(
                "Recurrent: with stateful=True the carry is in non_trainables, and the next call continues forward in "
                "time; leave carry and reverse False."
            )
        if isinstance(self.layer, Layer) and not isinstance(self.layer, Cell):
            raise TypeError(
                f"Recurrent: {self.layer!r} is not an mlax.Cell; it needs `initial_carry` beside `init` and `fwd`."
            )
        if not isinstance(self.layer, Cell):
            raise TypeError(wrong_instance_message("Recurrent", "layer", self.layer, Cell))
        if self.unroll is not None and (not isinstance(self.unroll, int) or self.unroll < 1):
            raise ValueError(f"Recurrent: unroll is {self.unroll!r}, but must be an integer of at least 1.")

    def init(self, rng, x):
        carry, x, lengths = unpack_sequence(self, x)
        times, step = slice_shapes(self, x, self.axis)
        if lengths is not None:
            _check_lengths(self, lengths, times, step)
        first = jax.eval_shape(self.layer.initial_carry, step) if carry is None else carry
        trainables, non_trainables = self.layer.init(rng, (first, step))
        if self.stateful:
            non_trainables = self._join_carry(non_trainables, self.layer.initial_carry(step))
        return trainables, non_trainables

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        carry, x, lengths = unpack_sequence(self, x)
        times, step = slice_shapes(self, x, self.axis)
        if self.stateful:
            carry, non_trainables = self._split_carry(non_trainables, step)
        x = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, self.axis, 0), x)  # (t, b, ...)
        carry = shard_like(self.layer.initial_carry(step), x, axis=1) if carry is None else carry
        keys = None if rng is None else jax.random.split(rng, times)
        valid = None
        if lengths is not None:
            _check_lengths(self, lengths, times, step)
            step_index = lax.broadcasted_iota(lengths.dtype, (times, *lengths.shape), 0)
            valid = step_index < lax.expand_dims(lengths, (0,))  # (t, b)
            x = _zero_padding(x, valid)
        init, xs, apply_step = (carry, non_trainables), (x, keys, valid), self._cell_step(trainables, inference_mode)
        with locate_nan_in_scan(apply_step, init, xs, times, reverse=self.reverse):
            if isinstance(self.layer, CompositeCell) and non_trainables is None:
                _check_carry(self.layer, carry, step)
                self.layer.check_variables((carry, x), trainables, None)
                weights = split_parts(self.layer, trainables)
                carry, y, outputs = self._scan_parts(self.layer, carry, x, weights, keys, valid, inference_mode)
            else:  # a cell of any kind, with its state in the carry
                scanned = lax.scan(apply_step, init, xs, reverse=self.reverse, unroll=self._unroll)
                (carry, non_trainables), (y, outputs) = scanned
        y = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, self.axis), y)
        if self.stateful:
            non_trainables = self._join_carry(non_trainables, carry)
        return ((carry, y) if self.carry else y), join_outputs(non_trainables, outputs)

    def fwd_with_next(self, x, trainables, following, next_trainables):
        plain = Recurrent(self.layer, axis=self.axis)
        if not isinstance(self.layer, CompositeCell) or not isinstance(following, Recurrent):
            return None
        if self != plain or following != with_fields(plain, layer=following.layer):
            return None
        if not isinstance(x, jax.Array) or x.ndim != 3:  # the layers by themselves say what does not fit
            return None
        y = self.layer.scan_with_next(jnp.moveaxis(x, self.axis, 0), trainables, following.layer, next_trainables)
        return None if y is None else jnp.moveaxis(y, 0, self.axis)

    def _join_carry(self, non_trainables: Tree, carry: Any) -> Tree:
        """The state of the cell and the carry, whose leaves are named by their numbers."""
        if CARRY in (non_trainables or {}):
            raise ValueError(f"{short_repr(self)}: the cell has state of the name {CARRY!r}; rename that part.")
        leaves = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(carry))}
        return {**(non_trainables or {}), CARRY: leaves}

    def _split_carry(self, non_trainables: Tree, step: Any) -> tuple[Any, Tree]:
        """The inverse of `_join_carry`."""
        state = non_trainables or {}
        shapes = jax.eval_shape(self.layer.initial_carry, step)
        wanted = self._join_carry(None, shapes)
        found = {CARRY: shape_dtypes(state.get(CARRY))}
        if found != wanted:
            raise ValueError(
                f"{short_repr(self)}: the carry in non_trainables is {signature(found[CARRY])}, but must be "
                f"{signature(wanted[CARRY])}; pass what init returned for an input of this batch and dtype."
            )
        treedef = jax.tree.structure(shapes)
        carry = treedef.unflatten([state[CARRY][str(number)] for number in range(treedef.num_leaves)])
        return carry, {name: tree for name, tree in state.items() if name != CARRY} or None

    def _cell_step(self, trainables: Tree, inference_mode: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        """One step of the cell, whose carry includes its state; the outputs captured from its parts follow y."""

        def step(before: tuple[Any, Tree], xs: tuple[Any, Any, Any]) -> tuple[tuple[Any, Tree], Any]:
            carry, state = before
            x, key, valid = xs
            out, new = self.layer.fwd((carry, x), trainables, state, rng=key, inference_mode=inference_mode)
            state, outputs = split_outputs(new)
            after, y = self._mask(valid, carry, *out)
            return (after, state), (y, outputs)

        return step

    def _scan_parts(
        self,
        cell: CompositeCell,
        carry: Any,
        x: Any,
        trainables: dict[str, Tree],
        keys: jax.Array | None,
        valid: Any,
        inference_mode: bool,
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Compute `ahead` for all steps at once, and scan the rest with weight gradients batched over time.

        Returns the carry, y, and the outputs captured from the parts. Those of `feedback` pass as leaves of what it
        adds to `ahead`, which has zeros there.
        """
        shapes = shape_dtypes(trainables)  # a closure that is differentiated must not hold the variables
        counts: dict[str, collections.Counter[str]] = {}  # the calls of each part, by phase

        def bind(phase: str, apply: Apply, key: jax.Array | None) -> tuple[Sub, dict[str, Any]]:
            """The parts in one phase, and a dict to which calls add captured outputs."""
            earlier = sum((counts[before] for before in _phases_before(phase)), collections.Counter[str]())
            calls = counts[phase] = collections.Counter[str]()
            outputs: dict[str, Any] = {}

            def call(name: str, part: Layer, x: Any) -> Any:
                def run(weights: Tree, x_and_key: tuple[Any, jax.Array | None]) -> tuple[Any, dict[str, Any]]:
                    x, key = x_and_key
                    y, new = part.fwd(x, weights, None, rng=key, inference_mode=inference_mode)
                    return y, split_outputs(new)[1]

                with error_scope(name, x):
                    calls[name] += 1
                    own = None
                    if key is not None and _reads_key(run, shapes.get(name), shape_dtypes(x)):
                        own = named_key(named_key(key, phase), f"{name}#{calls[name]}")
                    y, found = apply(name, run, (x, own))
                    outputs.update(prefix_outputs(number_call(name, earlier[name] + calls[name]), found))
                    return y

            return Sub(cell, call, key, inference_mode, f"{KEYS}/{phase}"), outputs

        def ahead(weights: dict[str, Tree], x_and_key: tuple[Any, jax.Array | None]) -> tuple[Any, dict[str, Any]]:
            x, key = x_and_key
            sub, outputs = bind("ahead", _apply_to(weights), key)
            return cell.ahead(sub, x), outputs

        def feedback(weights: dict[str, Tree], carry_and_key: tuple[Any, jax.Array | None]) -> Any:
            carry, key = carry_and_key
            sub, outputs = bind("feedback", _apply_to(weights), key)
            added = cell.feedback(sub, carry)
            return None if added is None else (added, outputs)

        def step(apply: Apply, carry: Any, ahead: tuple[Any, dict[str, Any]], nondiff: tuple[Any, Any, Any]) -> Any:
            _, key, valid = nondiff
            sub, outputs = bind("step", apply, key)
            after, y = self._mask(valid, carry, *cell.step(sub, carry, ahead[0]))
            return after, (y, {**ahead[1], **outputs})

        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x)
        ahead_keys = keys if keys is not None and _reads_key(ahead, shapes, one) else None
        xs, outputs = time_vmap(lambda x_and_key: ahead(trainables, x_and_key), (x, ahead_keys))
        feedback_keys = keys if keys is not None and _reads_key(feedback, shapes, shape_dtypes(carry)) else None
        zeros = {}
        if _is_tapped(cell):
            key = None if feedback_keys is None else feedback_keys[0]
            added = jax.eval_shape(feedback, trainables, (carry, key))
            times = jax.tree.leaves(x)[0].shape[0]
            zeros = jax.tree.map(lambda leaf: jnp.zeros((times, *leaf.shape), leaf.dtype), added[1] if added else {})
        carry, (y, more) = batched_grad_scan(
            ScanStep(feedback, step),
            carry,
            (xs, zeros),
            (feedback_keys, keys, valid),
            trainables,
            reverse=self.reverse,
            unroll=self._unroll,
        )
        return carry, y, {**outputs, **more}

    @property
    def _unroll(self) -> int:
        return self.unroll or (8 if jax.default_backend() == "gpu" else 1)

    def _mask(self, valid: Any, carry: Any, after: Any, y: Any) -> tuple[Any, Any]:
        """The new carry and y where the step is within the sequence; elsewhere the old carry and zeros."""
        if signature(after) != signature(carry):
            raise ValueError(
                f"{short_repr(self)}: the cell maps a carry of {signature(carry)} to {signature(after)}; "
                "it must return one of the same shapes and dtypes."
            )
        if valid is None:
            return after, y

        def select(new: jax.Array, old: jax.Array) -> jax.Array:
            return lax.select(lax.broadcast_in_dim(valid, new.shape, (0,)), new, old)

        return jax.tree.map(select, after, carry), jax.tree.map(lambda leaf: select(leaf, jnp.zeros_like(leaf)), y)


def unpack_sequence(layer: Any, x: Any) -> tuple[Any, Any, Any]:
    """(carry, x, lengths) of the input of a layer with the fields `carry` and `lengths`; None for what it lacks."""
    wanted = ["carry"] * layer.carry + ["x"] + ["lengths"] * layer.lengths
    if len(wanted) == 1:
        return None, x, None
    if not isinstance(x, tuple) or len(x) != len(wanted):
        options = " and ".join(f"{field}=True" for field in wanted if field != "x")
        raise ValueError(
            f"{short_repr(layer)}: the input is {signature(x)}, but with {options} must be the tuple "
            f"({', '.join(wanted)})."
        )
    return (None, *x) if not layer.carry else (*x, None) if not layer.lengths else x


def _check_carry(cell: CompositeCell, carry: Any, x: Any) -> None:
    """Raise unless the carry is like the initial one for a step's input like `x`."""
    wanted = jax.eval_shape(cell.initial_carry, shape_dtypes(x))
    if signature(carry) != signature(wanted):
        raise ValueError(
            f"{short_repr(cell)}: the carry is {signature(carry)}, but must be {signature(wanted)} for a step's input "
            f"of {signature(x)}; cell.initial_carry(x) makes one."
        )


def _zero_padding(x: Any, valid: jax.Array) -> Any:
    """The input (t, b, ...) with zeros past each length.

    What a padded step computes has no effect, unless it is NaN: the backward pass multiplies it by zero.
    """

    def mask(leaf: jax.Array) -> jax.Array:
        inside = lax.broadcast_in_dim(valid, leaf.shape, (0, 1), out_sharding=explicit_sharding(leaf))
        return lax.select(inside, leaf, jnp.zeros_like(leaf))

    return jax.tree.map(mask, x)


def _phases_before(phase: str) -> tuple[str, ...]:
    return {"ahead": (), "feedback": ("ahead",), "step": ("ahead", "feedback")}[phase]


@functools.lru_cache(maxsize=4096)
def _is_tapped(cell: CompositeCell) -> bool:
    """Whether outputs of the cell's parts are captured."""
    return bool(find_layers(cell, Tap))


def _apply_to(weights: dict[str, Tree]) -> Apply:
    return lambda name, run, value: run(weights.get(name), value)


def _reads_key(run: Function, weights: Any, x: Any) -> bool:
    """Whether `run(weights, (x, key))` uses the key; if not, time can be merged with the batch."""
    key = jax.eval_shape(jax.random.key, 0)
    traced = jax.make_jaxpr(lambda key, weights, x: run(weights, (x, key)))(key, weights, x)
    first = traced.jaxpr.invars[0]
    return any(var is first for eqn in traced.jaxpr.eqns for var in eqn.invars)


def _check_lengths(self: Recurrent, lengths: Any, times: int, step: Any) -> None:
    """Raise for impossible lengths; their values are checked only if they are known, which they are not under jit."""
    batch = jax.tree.leaves(step)[0].shape[:1]
    if lengths.shape != batch or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{short_repr(self)}: lengths is {signature(lengths)}, but must be integers of the shape {batch}, "
            "one for each example."
        )
    if isinstance(lengths, Tracer | jax.ShapeDtypeStruct) or lengths.size == 0:
        return
    known = np.asarray(lengths)
    if known.min() < 0 or known.max() > times:
        raise ValueError(
            f"{short_repr(self)}: lengths range from {known.min()} to {known.max()}, but the input has {times} time "
            f"steps; pass lengths from 0 to {times}, or a longer input."
        )
