"""Wrapper, Remat, Map, Repeat: one layer under a JAX transformation."""

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax._jax import abstract_key, fusion_barrier, to_host, write_slice
from mlax.core._composite import check_layer
from mlax.core._errors import error_scope, short_repr, signature
from mlax.core._frozen import frozen
from mlax.core._layer import Layer, Tree, cached_by_shape, variable_shapes


@frozen
class Wrapper(Layer):
    """A layer that changes how another one is computed and not what it owns: write `fwd`.

    Variables: those of `layer`, under the same paths, so wrapping a part never moves a variable.
    """

    layer: Layer

    def __post_init__(self) -> None:
        check_layer(type(self).__name__, "layer", self.layer)

    def init(self, rng, x):
        return self.layer.init(rng, x)

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        """Nothing: the layer inside checks its own."""


@frozen
class Remat(Wrapper):
    """Trade time for memory on `layer` by `jax.checkpoint`; the numbers stay the same.

    `policy` is one of `jax.checkpoint_policies` and says what is stored all the same; None stores only inputs.
    `prevent_cse=False` is right inside a scan, where XLA cannot undo the trade anyway.
    """

    _: KW_ONLY
    policy: Callable[..., bool] | None = None
    prevent_cse: bool = True

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def run(x: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array | None) -> tuple[Any, Tree]:
            return self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

        again = jax.checkpoint(run, policy=self.policy, prevent_cse=self.prevent_cse)
        return again(x, trainables, non_trainables, rng)


@frozen
class Map(Wrapper):
    """Apply `layer` to every slice of the input along `axis`, and stack the outputs along the same axis.

    `variables` is what `jax.vmap` would call their `in_axes`: None shares one set between the slices; 0 gives
    each slice a set of its own, stacked on a leading axis. A layer with state needs a set for each slice.
    """

    _: KW_ONLY
    axis: int = 1
    variables: Literal[0] | None = None

    def init(self, rng, x):
        size, inner = self.slices(x)
        if self.variables is None:
            return self.layer.init(rng, inner)
        return init_stacked(self.layer, rng, inner, size)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        size, _ = self.slices(x)
        if self.variables is None and non_trainables is not None:
            raise ValueError(
                f"{short_repr(self)}: the layer has state, and each of the {size} slices would leave another one; "
                "pass variables=0 to give each slice its own."
            )

        def run(x: Any, trainables: Tree, non_trainables: Tree, key: jax.Array | None) -> tuple[Any, Tree]:
            return self.layer.fwd(x, trainables, non_trainables, rng=key, inference_mode=inference_mode)

        keys = None if rng is None else jax.random.split(rng, size)
        over = (self.axis, self.variables, self.variables, None if rng is None else 0)
        return jax.vmap(run, in_axes=over, out_axes=(self.axis, 0))(x, trainables, non_trainables, keys)

    def slices(self, x: Any) -> tuple[int, Any]:
        """How many slices there are, and the shape and dtype of one."""
        sizes: set[int] = set()
        for leaf in jax.tree.leaves(x):
            if not -leaf.ndim <= self.axis < leaf.ndim:
                raise ValueError(
                    f"{short_repr(self)}: the input has the shape {leaf.shape}, which has no axis {self.axis}."
                )
            sizes.add(leaf.shape[self.axis])
        if len(sizes) != 1:
            raise ValueError(
                f"{short_repr(self)}: axis {self.axis} has the sizes {sorted(sizes)} in the input; it needs one."
            )

        def drop(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = list(leaf.shape)
            del shape[self.axis]
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        return sizes.pop(), jax.tree.map(drop, x)


Mode = Literal["scan", "remat", "unroll"]


@frozen
class Repeat(Wrapper):
    """Apply `layer` `times` times, each time to the output of the time before, with variables of its own.

    Output like input. Variables: those of `layer`, each with a leading axis of `times`, in every mode:
    - "scan" compiles the layer once, whatever `times` is;
    - "remat" is a scan that stores only each layer's input for the backward pass;
    - "unroll" writes the layer out `times` times, which compiles longer and may run faster.
    """

    times: int
    _: KW_ONLY
    mode: Mode = "scan"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.times, int) or self.times < 1:
            raise ValueError(f"Repeat: times is {self.times!r}, but must be a whole number of at least 1.")
        if self.mode not in get_args(Mode):
            raise ValueError(f"Repeat: mode is {self.mode!r}, but must be one of {', '.join(get_args(Mode))}.")

    def init(self, rng, x):
        _refuse_changing(self, x)
        return init_stacked(self.layer, rng, x, self.times)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        keys = None if rng is None else jax.random.split(rng, self.times)
        return self.with_keys(x, trainables, non_trainables, keys, inference_mode)

    def with_keys(
        self, x: Any, trainables: Tree, non_trainables: Tree, keys: jax.Array | None, inference_mode: bool
    ) -> tuple[Any, Tree]:
        """As `fwd`, the key of each time given."""
        layer = Remat(self.layer, prevent_cse=False) if self.mode == "remat" else self.layer

        def step(x: Any, own: tuple[Tree, Tree, jax.Array | None]) -> tuple[Any, Tree]:
            trainables, non_trainables, key = own
            y, new = layer.fwd(x, trainables, non_trainables, rng=key, inference_mode=inference_mode)
            if signature(y) != signature(x):
                raise ValueError(
                    f"{short_repr(self)}: the layer turns {signature(x)} into {signature(y)}, but each time is fed "
                    "with the "
                    "output of the time before; its output must be like its input."
                )
            return y, new

        stacked = (trainables, non_trainables, keys)
        if self.mode != "unroll":
            return lax.scan(step, x, stacked, length=self.times)
        news = []  # unfenced, 48 blocks compile two to four times as long on a CPU and run slower, fused time and again
        for time, own in enumerate(unstack(stacked, self.times)):
            with error_scope(str(time), x):
                x, new = step(*fusion_barrier((x, own)))
                news.append(new)
        return x, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *news)

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        for leaf in jax.tree.leaves((trainables, non_trainables)):
            if leaf.shape[:1] != (self.times,):
                raise ValueError(
                    f"{short_repr(self)}: a variable has the shape {leaf.shape}, but each must have a leading axis of "
                    f"{self.times}; pass what init returned for this layer."
                )


@cached_by_shape
def _refuse_changing(repeat: Repeat, x: Any) -> None:
    """Trace `fwd`, which refuses a layer that changes the shape, in the way of a composite, which then need not."""
    each = variable_shapes(repeat.layer, x)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((repeat.times, *leaf.shape), leaf.dtype), each)
    fwd = jax.jit(repeat.fwd, static_argnames="inference_mode")
    jax.eval_shape(functools.partial(fwd, inference_mode=True), x, *stacked, rng=abstract_key())


def init_stacked(layer: Layer, rng: jax.Array, x: Any, times: int, *, in_host: bool = False) -> tuple[Tree, Tree]:
    """What `times` calls of `layer.init`, each with a key of its own, would give, stacked.

    Outside of a trace each copy is made on its own and written to its place, so that every compiled piece is
    shared with the layer alone, and memory holds the stack and one copy at most. With `in_host` the stack of the
    trainables is in host memory, inside of a trace too, and the device holds one copy at most.
    """
    if isinstance(rng, Tracer):
        of = functools.partial(_copy, layer, x, rng)
        keys = jnp.arange(times, dtype=np.uint32)
        return lax.map(lambda time: _kept(of(time), in_host), keys) if in_host else jax.vmap(of)(keys)
    stacked = _empty_stack(*variable_shapes(layer, x), times, in_host)
    for time in range(times):
        stacked = _written(stacked, _copy(layer, x, rng, np.uint32(time)), np.uint32(time))
    return stacked


def unstack(tree: Any, times: int) -> list[Any]:
    """The slices along the leading axis; their gradient is one concatenation, where indexing's is a sum of n."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [[lax.squeeze(piece, (0,)) for piece in lax.split(leaf, (1,) * times)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True)] or [tree] * times


def _copy(layer: Layer, x: Any, rng: jax.Array, time: Any) -> tuple[Tree, Tree]:
    return layer.init(jax.random.fold_in(rng, time), x)


def _kept(variables: tuple[Tree, Tree], in_host: bool) -> tuple[Tree, Tree]:
    trainables, non_trainables = variables
    return to_host(trainables) if in_host else trainables, non_trainables


def _empty_stack(trainables: Tree, non_trainables: Tree, times: int, in_host: bool) -> tuple[Tree, Tree]:
    leaves, treedef = jax.tree.flatten((trainables, non_trainables))
    return _zeros(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), times, in_host)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _zeros(treedef: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...], times: int, in_host: bool) -> Any:
    def one(times: tuple[int, ...]) -> Any:
        return treedef.unflatten([jnp.zeros((*times, *shape), dtype) for shape, dtype in leaves])

    # a row at a time, since XLA would make all of it on the device first
    return lax.map(lambda _: _kept(one(()), True), jnp.arange(times)) if in_host else one((times,))


@functools.partial(jax.jit, donate_argnums=0)
def _written(stacked: Any, copy: Any, time: int) -> Any:
    return write_slice(stacked, jax.tree.map(lambda leaf: leaf[None], copy), time)
