"""The rows of the catalogue: a layer or an optimizer, what its tests need, and how much of it `make test` runs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from mlax import optim

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """How much of a row `make test` runs; `make thorough` runs every test over every row in every dtype."""

    variant: bool = False  # of a row above: only tests marked `every_row` run, and those with a dtype in bfloat16
    thorough: bool = False  # built from parts that have rows themselves: nothing runs

    def is_left_to_thorough(self, marks: set[str], dtype: str | None) -> bool:
        """Whether `make test` leaves out a test with these marks, in this dtype, if it has one."""
        is_plain_only = "every_row" not in marks or "plain_rows" in marks
        if self.thorough or (self.variant and (is_plain_only or dtype not in (None, "bfloat16"))):
            return True
        if dtype == "bfloat16" and not self.variant and "one_dtype" in marks:
            return True
        return dtype in ("float16", "float64") and "every_dtype" not in marks


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRow(Row):
    """A layer, an input for it, the shapes of its variables, and what it should compute.

    A field named `no_...` is an exception: the reason why the row breaks a promise, "" where it keeps it.
    """

    layer: Callable[[str], mlax.Layer]  # takes the dtype, for layers whose input is not floating
    shape: Any  # of the input, batch axis first: a tuple, or a pytree of tuples
    variables: tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]  # shapes by path: trainables, state
    reference: Callable[..., Any]  # of (x, {path: trainable}) in NumPy float64, in inference mode
    integers: int = 0  # above 0: the input is integers below this
    needs_key: bool = False  # to train
    tolerance: float = 1e-6  # of float32 against the reference, relative
    no_dtype_error: str = ""  # why it accepts an input of another dtype than its weights
    quantized: str = ""  # the dtype of its kernel, which has no gradient, if that is quantized
    no_forward_mode: str = ""  # why it has no derivatives in forward mode
    no_second_derivatives: str = ""  # why they are not those of finite differences
    no_single_example: str = ""  # why it cannot be called on one example of the batch that `init` saw
    no_exported_call: str = ""  # why the exported program cannot be called
    large: Any = None  # the shape of an input of about a million elements; None: more examples
    no_sums: str = ""  # why its sums in narrow dtypes are not compared

    def x(self, dtype: str, seed: int = 0) -> Any:
        """An input of that dtype, normally distributed."""
        draws = np.random.default_rng(seed)
        return self._draw(self.shape, dtype, lambda shape: draws.normal(size=shape))

    def large_x(self, dtype: str) -> Any:
        """An input of about a million elements, whose mean is 1, so that its sums grow."""
        draws, shape = np.random.default_rng(0), self.large
        if shape is None:
            size = sum(map(math.prod, jax.tree.leaves(self.shape, is_leaf=_is_shape)))
            more = 2**20 // size
            shape = jax.tree.map(lambda each: (each[0] * more, *each[1:]), self.shape, is_leaf=_is_shape)
        return self._draw(shape, dtype, lambda shape: draws.normal(1.0, 1.0, shape))

    def _draw(self, shapes: Any, dtype: str, sample: Callable[[tuple[int, ...]], np.ndarray]) -> Any:
        def draw(shape):
            if self.integers:
                return jnp.asarray(np.random.default_rng(0).integers(0, self.integers, shape), jnp.int32)
            return jnp.asarray(sample(shape), dtype)

        return jax.tree.map(draw, shapes, is_leaf=_is_shape)

    def init(self, dtype: str) -> tuple[mlax.Layer, Any, Any, Any]:
        """The layer, an input, and its trainables and state: the same arrays each time."""
        return _initialized(self, dtype)

    def structs(self, dtype: str) -> tuple[mlax.Layer, Any, Any, Any]:
        """The layer, and the shapes and dtypes of an input and of its variables: what tracing needs."""
        return _abstract(self, dtype)


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and isinstance(node[0], int)


@functools.cache  # about twenty tests ask for each
def _initialized(row: LayerRow, dtype: str) -> tuple[mlax.Layer, Any, Any, Any]:
    layer, x = row.layer(dtype), row.x(dtype)
    return layer, x, *layer.init(jax.random.key(0), x)


@functools.cache
def _abstract(row: LayerRow, dtype: str) -> tuple[mlax.Layer, Any, Any, Any]:
    layer, x = row.layer(dtype), row.x(dtype)
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    return layer, x, *jax.eval_shape(layer.init, jax.random.key(0), x)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerRow(Row):
    """An optimizer, what its `update` needs, and which promises it cannot keep.

    A field named `no_...` is an exception: the reason why the row breaks a promise, "" where it keeps it.
    """

    optimizer: optim.Optimizer
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of `update`, besides the usual three
    unbounded_slots: tuple[str, ...] = ()  # may be infinite before the first update
    ambiguous_slots: tuple[str, ...] = ()  # eigenvectors: not unique, so not comparable
    no_slot_declarations: str = ""  # why its slots and arithmetic are not described to mlax
    no_inner_slots: str = ""  # why its slots at `init` differ from those of the optimizer that it wraps

    @property
    def update(self) -> Callable[..., Any]:
        """`update`, ready for `jax.jit`: the method itself if it needs nothing more."""
        return functools.partial(self.optimizer.update, **self.arguments) if self.arguments else self.optimizer.update
