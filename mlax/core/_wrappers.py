"""Wrapper, Remat, Map, Repeat: one layer under a JAX transformation."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mlax._jax import (
    abstract_key,
    fold_in,
    fusion_barrier,
    is_abstract_key,
    layer_scan,
    prefers_layer_scan,
    to_host,
    write_slice,
)
from mlax.core._checks import check_is_dict
from mlax.core._display import Node
from mlax.core._errors import error_scope, is_like_first, locate_nan_in_scan, short_repr, signature
from mlax.core._frozen import frozen, with_fields
from mlax.core._layer import (
    Layer,
    Tree,
    cached_by_shape,
    header,
    join_outputs,
    prefix_outputs,
    split_outputs,
    variable_shapes,
)
from mlax.core._parts import check_layer
from mlax.core._paths import STACKED, flatten_paths

Mode = Literal["scan", "remat", "unroll"]


@frozen
class Wrapper(Layer):
    """A layer that changes how another layer is computed: write `fwd`.

    Variables: those of `layer`, under the same paths, unless a subclass writes `init` too.
    """

    needs_repeat: ClassVar[bool] = False  # whether `layer` must be a Repeat

    layer: Layer  # the layer inside

    def __post_init__(self) -> None:
        check_layer(type(self).__name__, "layer", self.layer)

    @property
    def has_stack(self) -> bool:
        """Whether the variables are those of several calls of `layer`, stacked on a leading axis under "stacked"."""
        return False

    def init(self, rng, x):
        return self.layer.init(rng, x)

    def _tree(self, name: str = "") -> Node:
        inner = self.layer._tree(name)
        return inner._replace(text=f"{header(self, has_below=True)} of {inner.text}")

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        """Do nothing: `layer` checks its variables."""


@frozen
class Remat(Wrapper):
    """Gradient checkpointing (rematerialization) of `layer`, by `jax.checkpoint`: activations are recomputed.

    `policy`, one of `jax.checkpoint_policies`, selects residuals to store nevertheless; None stores the inputs only.
    `prevent_cse=False` is right inside a scan, where XLA cannot merge the recomputation with the forward pass.

    >>> layer, x = mlax.Remat(nn.MLP((64, 16))), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 16)
    """

    _: KW_ONLY
    policy: Callable[..., bool] | None = None  # one of jax.checkpoint_policies; None: only inputs are stored
    prevent_cse: bool = True  # False inside of a scan

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def run(x: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array | None) -> tuple[Any, Tree]:
            return self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

        checkpointed = jax.checkpoint(run, policy=self.policy, prevent_cse=self.prevent_cse)
        return checkpointed(x, trainables, non_trainables, rng)


@frozen
class Tap(Wrapper):
    """`layer`, whose output is returned with its new state, too, for `mlax.capture`; with `inputs`, (input, output)."""

    _: KW_ONLY
    inputs: bool = False

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        state, outputs = split_outputs(new)
        return y, join_outputs(state, {"": (x, y) if self.inputs else y, **outputs})

    def __repr__(self) -> str:
        return repr(self.layer)  # errors name the layer that the user wrote


@frozen
class Map(Wrapper):
    """Apply `layer` to each slice of the input along `axis` by `jax.vmap`, and stack the outputs along that axis.

    `variables` is the `in_axes` of the variables: None shares one set between the slices; 0 gives each slice its
    own, stacked on a leading axis under the name "stacked". A layer with state needs `variables=0`.

    >>> layer, x = mlax.Map(nn.Conv(16, 3), axis=1), jnp.ones((8, 5, 28, 28, 3))  # each of 5 frames
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> layer.fwd(x, trainables, non_trainables)[0].shape
    (8, 5, 28, 28, 16)
    """

    _: KW_ONLY
    axis: int = 1  # of the input and the output
    variables: Literal[0] | None = None  # 0: separate for each slice; None: shared

    @property
    def has_stack(self) -> bool:
        return self.variables is not None

    def init(self, rng, x):
        size, inner = self.slices(x)
        return init_stacked(self.layer, rng, inner, size) if self.has_stack else self.layer.init(rng, inner)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        size, _ = self.slices(x)
        if self.variables is None and non_trainables is not None:
            raise ValueError(
                f"{short_repr(self)}: the layer has state, which would differ between the {size} slices; "
                "pass variables=0 to give each slice its own."
            )

        def run(x: Any, trainables: Tree, non_trainables: Tree, key: jax.Array | None) -> tuple[Any, Tree]:
            return self.layer.fwd(x, trainables, non_trainables, rng=key, inference_mode=inference_mode)

        keys = None if rng is None else jax.random.split(rng, size)
        in_axes = (self.axis, self.variables, self.variables, None if rng is None else 0)
        run = jax.vmap(run, in_axes=in_axes, out_axes=(self.axis, 0))
        if not self.has_stack:
            return run(x, trainables, non_trainables, keys)
        with error_scope(STACKED, x):
            y, new = run(x, get_stack(trainables), get_stack(non_trainables), keys)
        return y, name_stack(new)

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        if self.has_stack:
            check_stack(self, self.slices(x)[0], trainables, non_trainables)

    def slices(self, x: Any) -> tuple[int, Any]:
        """The number of slices, and the shapes and dtypes of one."""
        return slice_shapes(self, x, self.axis)


@frozen
class Repeat(Wrapper):
    """A stack of identical layers: apply `layer` `times` times in sequence, each time with its own variables.

    The output must have the shapes and dtypes of the input; or, of several inputs, (x, t), those of the first: it then
    becomes the x of the next repetition, and every repetition gets the same t. Variables: those of `layer` under the
    name "stacked", each with a leading axis of `times`, in every mode:
    - "scan" compiles the layer once, however large `times` is;
    - "remat" is a scan that stores only each layer's input for the backward pass;
    - "unroll" compiles the layer `times` times, which takes longer and may run faster.

    >>> layer, x = mlax.Repeat(mlax.Residual(nn.MLP((64, 16))), times=12), jnp.ones((8, 16))
    >>> trainables, non_trainables = layer.init(jax.random.key(0), x)
    >>> mlax.get(trainables, "stacked/layer/linear_0/kernel").shape
    (12, 16, 64)
    """

    times: int  # how often
    _: KW_ONLY
    mode: Mode = "scan"  # "scan", "remat" or "unroll"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.times, int) or self.times < 1:
            raise ValueError(f"Repeat: times is {self.times!r}, but must be an integer of at least 1.")
        if self.mode not in get_args(Mode):
            raise ValueError(f"Repeat: mode is {self.mode!r}, but must be one of {', '.join(get_args(Mode))}.")

    @property
    def has_stack(self) -> bool:
        return True

    def init(self, rng, x):
        _check_output_shapes(self, x)
        return init_stacked(self.layer, rng, x, self.times)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        keys = None if rng is None else jax.random.split(rng, self.times)
        return self.apply_with_keys(x, trainables, non_trainables, keys, inference_mode)

    def apply_with_keys(
        self, x: Any, trainables: Tree, non_trainables: Tree, keys: jax.Array | None, inference_mode: bool
    ) -> tuple[Any, Tree]:
        """Like `fwd`, given the key of each repetition."""
        stacked = (get_stack(trainables), get_stack(non_trainables), keys)
        if isinstance(x, tuple) and len(x) > 1:
            with contextlib.suppress(_NotLikeFirst):  # the layer is traced again only if it returns all of its inputs
                return self._apply_stack(x[0], x[1:], stacked, inference_mode)
        return self._apply_stack(x, (), stacked, inference_mode)

    def _apply_stack(
        self, x: Any, constants: tuple[Any, ...], stacked: tuple[Tree, Tree, jax.Array | None], inference_mode: bool
    ) -> tuple[Any, Tree]:
        """Apply the layer to `x`, which each repetition passes on, and to the same constants."""
        layer = Remat(self.layer, prevent_cse=False) if self.mode == "remat" else self.layer

        def step(x: Any, own: tuple[Tree, Tree, jax.Array | None], layer: Layer = layer) -> tuple[Any, Tree]:
            trainables, non_trainables, key = own
            inputs = (x, *constants) if constants else x
            y, new = layer.fwd(inputs, trainables, non_trainables, rng=key, inference_mode=inference_mode)
            if signature(y) != signature(x):
                if constants:
                    raise _NotLikeFirst
                raise ValueError(
                    f"{short_repr(self)}: the layer maps {signature(x)} to {signature(y)}, but its output is the "
                    "input of the next repetition; they must have the same shapes and dtypes."
                )
            return y, new

        plain_step = functools.partial(step, layer=self.layer)
        if self.mode != "unroll":
            scan = layer_scan if self.mode == "scan" and prefers_layer_scan(x, constants, stacked) else lax.scan
            # around the scan: inside, JAX repeats the scope in the backward pass of a remat
            with locate_nan_in_scan(plain_step, x, stacked, self.times), error_scope(STACKED, x):
                y, new = scan(step, x, stacked, length=self.times)
            return y, name_stack(new)
        # without the barrier, 48 blocks take two to four times as long to compile on a CPU and run slower
        fused_step = jax.jit(lambda x, own: step(*fusion_barrier((x, own))), inline=True)  # traced only once
        states = []
        for index, own in enumerate(unstack(stacked, self.times)):
            with error_scope(str(index), x):
                x, state = fused_step(x, own)
                states.append(state)
            if stacked[2] is not None and is_abstract_key(stacked[2]):  # only shapes count, and all are like the first
                states *= self.times
                break
        return x, name_stack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))

    def has_constants(self, x: Any, trainables: Tree, non_trainables: Tree, key: Any, inference_mode: bool) -> bool:
        """Whether of several inputs only the first is passed on from repetition to repetition; by its shapes alone."""
        if not isinstance(x, tuple) or len(x) < 2:
            return False
        stacked = get_stack(trainables), get_stack(non_trainables)
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)

        def run(x: Any, trainables: Tree, non_trainables: Tree, key: jax.Array | None) -> Any:
            return self.layer.fwd(x, trainables, non_trainables, rng=key, inference_mode=inference_mode)[0]

        with error_scope(STACKED, x):
            return is_like_first(jax.eval_shape(run, x, *one, key), x)

    def carry_constants(self) -> "Repeat":
        """The Repeat of a layer that returns its inputs after the first, too, as part of the output."""
        return with_fields(self, layer=_ReturnConstants(self.layer))

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        check_stack(self, self.times, trainables, non_trainables)


class _NotLikeFirst(Exception):
    """The layer of a Repeat of several inputs does not map them to an output like the first."""


@frozen
class _ReturnConstants(Wrapper):
    """`layer` of several inputs, (x, t), to an output y like x: (y, t)."""

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        y, new = self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return (y, *x[1:]), new


@cached_by_shape
def _check_output_shapes(repeat: Repeat, x: Any) -> None:
    """Trace `fwd`, which raises if the layer changes the shape, as `init` of a composite does for its parts."""
    with error_scope(STACKED, x):
        variables = variable_shapes(repeat.layer, x)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((repeat.times, *leaf.shape), leaf.dtype), variables)
    fwd = jax.jit(repeat.fwd, static_argnames="inference_mode")
    jax.eval_shape(functools.partial(fwd, inference_mode=True), x, *map(name_stack, stacked), rng=abstract_key())


def name_stack(variables: Tree) -> Tree:
    """Variables with a leading axis of layers, and outputs captured with them, under the name that says so."""
    variables, outputs = split_outputs(variables)
    return join_outputs(None if variables is None else {STACKED: variables}, prefix_outputs(STACKED, outputs))


def get_stack(variables: Tree) -> Tree:
    """The variables that `name_stack` was given."""
    return None if variables is None else variables[STACKED]


def check_stack(layer: Layer, times: int, *variables: Tree) -> None:
    """Raise unless variables are under the name "stacked", each with a leading axis of `times`."""
    for tree in variables:
        check_is_dict(layer, "a tree of variables", tree)
        if tree is not None and tree.keys() != {STACKED}:
            raise ValueError(
                f"{short_repr(layer)}: the variables have {', '.join(map(repr, tree)) or 'no names'}, but those of a "
                f"stack of layers are under {STACKED!r} alone; pass what init returned for this layer, or, for weights "
                f'without that name, insert it: mlax.rename(trainables, {{"blocks": "blocks/{STACKED}"}}).'
            )
        for path, leaf in flatten_paths(tree).items():
            if leaf.shape[:1] != (times,):
                raise ValueError(
                    f"{short_repr(layer)}: {path} has the shape {leaf.shape}, but must have a leading axis of "
                    f"{times}; pass what init returned for this layer."
                )


def slice_shapes(layer: Layer, x: Any, axis: int) -> tuple[int, Any]:
    """The size of `axis`, which all leaves of the input share, and the shapes and dtypes without it."""
    sizes: set[int] = set()
    for leaf in jax.tree.leaves(x):
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(f"{short_repr(layer)}: the input has the shape {leaf.shape}, which has no axis {axis}.")
        sizes.add(leaf.shape[axis])
    if len(sizes) != 1:
        raise ValueError(
            f"{short_repr(layer)}: axis {axis} has the sizes {sorted(sizes)} in the input; its leaves must agree."
        )

    def drop(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        del shape[axis]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return sizes.pop(), jax.tree.map(drop, x)


def init_stacked(layer: Layer, rng: jax.Array, x: Any, times: int, *, in_host: bool = False) -> tuple[Tree, Tree]:
    """The variables of `times` calls of `layer.init`, each with an independent key, stacked under the name "stacked".

    Outside a trace each copy is created by itself and written into the stack, so that every compiled program is
    shared with the layer alone, and memory holds the stack and at most one copy. With `in_host` the trainables are
    stacked in host memory, inside a trace too, and the device holds at most one copy.
    """
    if isinstance(rng, Tracer):
        init = functools.partial(_init_copy, layer, x, rng)
        indices = jnp.arange(times, dtype=np.uint32)
        stack = lax.map(lambda index: _offload(init(index), in_host), indices) if in_host else jax.vmap(init)(indices)
        return name_stack(stack[0]), name_stack(stack[1])
    with error_scope(STACKED, x):
        shapes = variable_shapes(layer, x)
    stack = _create_stack(*shapes, times, in_host)
    for index in range(times):
        stack = _write_copy(stack, _init_copy(layer, x, rng, np.uint32(index)), np.uint32(index))
    return name_stack(stack[0]), name_stack(stack[1])


def unstack(tree: Any, times: int) -> list[Any]:
    """The slices along the leading axis; the gradient is one concatenation, where indexing's is a sum of `times`."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [[lax.squeeze(piece, (0,)) for piece in lax.split(leaf, (1,) * times)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=True)] or [tree] * times


def _init_copy(layer: Layer, x: Any, rng: jax.Array, index: Any) -> tuple[Tree, Tree]:
    return layer.init(fold_in(rng, index), x)


def _offload(variables: tuple[Tree, Tree], in_host: bool) -> tuple[Tree, Tree]:
    trainables, non_trainables = variables
    return to_host(trainables) if in_host else trainables, non_trainables


def _create_stack(trainables: Tree, non_trainables: Tree, times: int, in_host: bool) -> tuple[Tree, Tree]:
    leaves, treedef = jax.tree.flatten((trainables, non_trainables))
    return _stacked_zeros(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves), times, in_host)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _stacked_zeros(treedef: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...], times: int, in_host: bool) -> Any:
    def zeros(leading: tuple[int, ...]) -> Any:
        return treedef.unflatten([jnp.zeros((*leading, *shape), dtype) for shape, dtype in leaves])

    # a slice at a time, since XLA would create the whole stack on the device first
    return lax.map(lambda _: _offload(zeros(()), True), jnp.arange(times)) if in_host else zeros((times,))


@functools.partial(jax.jit, donate_argnums=0)
def _write_copy(stack: Any, copy: Any, index: int) -> Any:
    return write_slice(stack, jax.tree.map(lambda leaf: leaf[None], copy), index)
