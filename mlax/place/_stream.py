"""Stream: a Repeat whose weights are in host memory, each layer's prefetched to the device."""

import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from mlax._jax import is_typed_key, partition_inexact, slice_to_device, to_host, to_memory_of, write_slice
from mlax.core import (
    STACKED,
    Repeat,
    Tree,
    Wrapper,
    error_scope,
    frozen,
    get_stack,
    init_stacked,
    name_stack,
    short_repr,
    signature,
    with_fields,
)


class LayerInputs(NamedTuple):
    """What the layers get besides x and their weights; each leaf has a leading axis of layers."""

    non_trainables: Tree
    keys: jax.Array | None
    mode: Any = None  # inference_mode, if it is traced


@frozen
class Stream(Wrapper):
    """Offloading: `Stream(Repeat(layer, 36))` computes what the `Repeat` does, with its weights in host memory.

    `init` creates the trainables there. While one layer is computed, the weights of the next are prefetched, so the
    device holds two layers at a time. For the backward pass only each layer's input is stored, as by `mode="remat"`,
    with `inputs_in_host` in host memory too; gradients go to host memory layer by layer. Optimizers keep the slots
    with the weights and update both in chunks. Trainables that are on the device are used there. Output and variables
    are those of the `Repeat`.

    On a GPU, set XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing after the sign): inside a CUDA graph XLA does
    not overlap copies with computation. Pinned memory is limited to XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, by default 64.
    """

    needs_repeat: ClassVar[bool] = True

    layer: Repeat  # a Repeat
    inputs_in_host: bool = False  # whether each layer's input is in host memory, too

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Repeat):
            raise TypeError(
                f"Stream: {short_repr(self.layer)} is not a Repeat; write Stream(mlax.Repeat(layer, times))."
            )
        if self.layer.mode == "unroll":
            raise ValueError("Stream: an unrolled Repeat has all of its weights on the device; pass mode='scan'.")

    def init(self, rng, x):
        return init_stacked(self.layer.layer, rng, x, self.layer.times, in_host=True)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        self.layer.check_variables(x, trainables, non_trainables)
        if self.layer.has_constants(x, trainables, non_trainables, rng, inference_mode):
            stream = with_fields(self, layer=self.layer.carry_constants())
            (y, *_), new = stream.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
            return y, new
        keys = None if rng is None else jax.random.split(rng, self.layer.times)
        static_mode = inference_mode if isinstance(inference_mode, bool) else None
        mode = jnp.broadcast_to(inference_mode, (self.layer.times,)) if static_mode is None else None
        inputs = LayerInputs(get_stack(non_trainables), keys, mode)
        with error_scope(STACKED, x):
            out: tuple[Any, Tree] = _stream(self, static_mode, x, get_stack(trainables), inputs)
        return out[0], name_stack(out[1])

    def run_layer(self, static_mode: bool | None, x: Any, weights: Tree, inputs: LayerInputs) -> tuple[Any, Tree]:
        """One layer with its own weights and inputs."""
        mode: Any = inputs.mode if static_mode is None else static_mode
        y, new = self.layer.layer.fwd(x, weights, inputs.non_trainables, rng=inputs.keys, inference_mode=mode)
        if signature(y) != signature(x):
            raise ValueError(
                f"{short_repr(self)}: the layer maps {signature(x)} to {signature(y)}, but the output of each layer is "
                "the input of the next; make them alike."
            )
        return y, new


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stream(stream: Stream, mode: bool | None, x: Any, trainables: Tree, inputs: LayerInputs) -> tuple[Any, Tree]:
    return _run_layers(stream, mode, x, trainables, inputs, None)[0]


def _run_layers(
    stream: Stream, mode: bool | None, x: Any, trainables: Tree, inputs: LayerInputs, buffer: Any
) -> tuple[Any, Any]:
    """The output with the new state, and `buffer` with each layer's x written to it, if there is one.

    The last layer is outside the loop, so that the index to prefetch is the loop's counter plus a constant.
    """
    last = stream.layer.times - 1

    def store(buffer: Any, x: Any, index: Any) -> Any:
        return None if buffer is None else write_slice(buffer, _add_axis(x), index)

    def step(carry: Any, inputs: LayerInputs) -> tuple[Any, Any]:
        index, x, weights, buffer = carry
        next_weights = _fetch(trainables, index + 1)
        y, new = stream.run_layer(mode, x, weights, inputs)
        return (index + 1, y, next_weights, store(buffer, x, index)), new

    start = (jnp.int32(0), x, _fetch(trainables, 0), buffer)
    (_, x, weights, buffer), news = lax.scan(step, start, _take(inputs, slice(0, last)), length=last)
    y, new = stream.run_layer(mode, x, weights, _take(inputs, last))
    news = jax.tree.map(lambda stack, one: jnp.concatenate([stack, one[None]]), news, new)
    return (y, news), store(buffer, x, last)


def _stream_fwd(stream: Stream, mode: bool | None, *primals: Any) -> tuple[Any, Any]:
    """The output, and what the backward pass needs; weights that are not differentiated are apart from the others."""
    x, trainables, inputs = custom_vjp_primal_tree_values(primals)
    live, frozen = (
        jax.tree.map(lambda leaf, keep=keep: leaf.value if leaf.perturbed is keep else None, primals[1])
        for keep in (True, False)
    )
    buffer = jax.tree.map(lambda leaf: _empty_stack(stream.layer.times, leaf), x)
    buffer = to_host(buffer) if stream.inputs_in_host else buffer
    out, xs = _run_layers(stream, mode, x, trainables, inputs, buffer)
    return out, (xs, live, frozen, inputs, out[1])


def _stream_bwd(stream: Stream, mode: bool | None, residuals: Any, cotangents: Any) -> tuple[Any, Tree, Any]:
    """The gradients, layer by layer from the last; those of the weights in the memory of the weights."""
    xs, live, frozen, inputs, news = residuals
    last = stream.layer.times - 1
    like = _fetch(xs, last), news
    dy, dnews = (partition_inexact(cotangent)[0] for cotangent in jax.tree.map(_materialize, cotangents, like))

    def layer_vjp(x: Any, weights: tuple[Tree, Tree], inputs: LayerInputs, dy: Any, dnew: Tree) -> Any:
        """The gradients of one layer, whose forward pass is recomputed."""
        live, frozen = weights
        x_leaves, combine_x = partition_inexact(x)
        state_leaves, combine_state = partition_inexact(inputs.non_trainables)

        def run(x_leaves: Any, live: Tree, state_leaves: Any) -> Any:
            weights = jax.tree.map(lambda a, b: b if a is None else a, live, frozen, is_leaf=lambda leaf: leaf is None)
            own = inputs._replace(non_trainables=combine_state(state_leaves))
            y, new = stream.run_layer(mode, combine_x(x_leaves), weights, own)
            return partition_inexact(y)[0], partition_inexact(new)[0]

        return jax.vjp(run, x_leaves, live, state_leaves)[1]((dy, dnew))

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        index, dx, (x, weights), grads = carry
        inputs, dnew = slices
        previous = _fetch((xs, (live, frozen)), index - 1)
        dx, dweights, dstate = layer_vjp(x, weights, inputs, dx, dnew)
        return (index - 1, dx, previous, write_slice(grads, _add_axis(dweights), index)), dstate

    zeros = to_memory_of(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), live), live)
    slices = _take((inputs, dnews), slice(1, None))
    start = (jnp.int32(last), dy, _fetch((xs, (live, frozen)), last), zeros)
    (_, dx, (x, weights), grads), dstates = lax.scan(step, start, slices, length=last, reverse=True)
    dx, dweights, dstate = layer_vjp(x, weights, _take(inputs, 0), dx, _take(dnews, 0))
    grads = write_slice(grads, _add_axis(dweights), 0)
    dstates = jax.tree.map(lambda one, stack: jnp.concatenate([one[None], stack]), dstate, dstates)
    _, combine_x = partition_inexact(x)
    _, combine_states = partition_inexact(inputs.non_trainables)
    return combine_x(dx, None), grads, LayerInputs(combine_states(dstates, None), None)


_stream.defvjp(_stream_fwd, _stream_bwd, symbolic_zeros=True)


def _materialize(cotangent: Any, like: jax.Array) -> Any:
    return jnp.zeros_like(like) if isinstance(cotangent, SymbolicZero) else cotangent


def _fetch(stacks: Tree, index: Any) -> Tree:
    """One layer's slice of stacked arrays, copied to the device."""
    return jax.tree.map(lambda leaf: lax.squeeze(leaf, (0,)), slice_to_device(stacks, index))


def _empty_stack(times: int, leaf: jax.Array) -> jax.Array:
    """A stack of `times` arrays to write to; keys have no zeros, so theirs holds copies."""
    return jnp.broadcast_to(leaf if is_typed_key(leaf) else jnp.zeros_like(leaf), (times, *leaf.shape))


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _take(tree: Any, index: int | slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
