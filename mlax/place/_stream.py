"""Stream: a repeated layer whose weights wait in host memory, each fetched to the device ahead of its use."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mlax._jax import slice_to_device, to_host, to_memory_of, write_slice
from mlax.core import Repeat, Tree, Wrapper, frozen, init_stacked, short_repr, signature
from mlax.place._inexact import split_inexact


class LayerInputs(NamedTuple):
    """What the layers are given beside their weights, each leaf with a leading axis of `times`."""

    non_trainables: Tree
    keys: jax.Array | None
    mode: Any = None  # inference_mode, where it is traced


@frozen
class Stream(Wrapper):
    """`Stream(Repeat(layer, 36))` computes what the `Repeat` does, with its weights in host memory.

    `init` makes the trainables there, and while one layer is computed the weights of the next are on their way to
    the device, which holds two layers at a time. For the backward pass only each layer's input is stored, as by
    `mode="remat"`, with `inputs_in_host` in host memory too; gradients go there layer by layer. Optimizers keep the
    slots beside the weights and update both piece by piece. Where the trainables are on the device, nothing is moved.
    Output and variables: those of the `Repeat`.

    On a GPU, set XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing after the sign): inside of a CUDA graph XLA
    copies and computes by turns. Pinned memory is limited to XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, 64 unless set.
    """

    layer: Repeat
    inputs_in_host: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Repeat):
            raise TypeError(f"Stream: {short_repr(self.layer)} is no Repeat; write Stream(mlax.Repeat(layer, times)).")
        if self.layer.mode == "unroll":
            raise ValueError("Stream: an unrolled Repeat has all of its weights on the device; pass mode='scan'.")

    def init(self, rng, x):
        return init_stacked(self.layer.layer, rng, x, self.layer.times, in_host=True)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        self.layer.check_variables(x, trainables, non_trainables)
        keys = None if rng is None else jax.random.split(rng, self.layer.times)
        known = inference_mode if isinstance(inference_mode, bool) else None
        mode = jnp.broadcast_to(inference_mode, (self.layer.times,)) if known is None else None
        given = LayerInputs(non_trainables, keys, mode)
        return _stream(self, known, x, trainables, given)

    def once(self, known: bool | None, x: Any, weights: Tree, given: LayerInputs) -> tuple[Any, Tree]:
        """One layer, given its own."""
        mode: Any = given.mode if known is None else known
        y, new = self.layer.layer.fwd(x, weights, given.non_trainables, rng=given.keys, inference_mode=mode)
        if signature(y) != signature(x):
            raise ValueError(
                f"{short_repr(self)}: the layer turns {signature(x)} into {signature(y)}, but each time is fed with "
                "the "
                "output of the time before; its output must be like its input."
            )
        return y, new


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stream(stream: Stream, known: bool | None, x: Any, trainables: Tree, given: LayerInputs) -> tuple[Any, Tree]:
    return _run_layers(stream, known, x, trainables, given, None)[0]


def _run_layers(stream: Stream, known: Any, x: Any, trainables: Tree, given: LayerInputs, room: Any) -> tuple[Any, Any]:
    """The output and the new state; and the inputs of all layers, written to `room` if there is any.

    The last layer is outside of the loop, so that what is fetched ahead is a multiple of the loop's counter.
    """
    last = stream.layer.times - 1

    def kept(inputs: Any, x: Any, time: Any) -> Any:
        return None if inputs is None else write_slice(inputs, _add_axis(x), time)

    def step(carried: Any, given: LayerInputs) -> tuple[Any, Any]:
        time, x, weights, inputs = carried
        following = _fetch(trainables, time + 1)
        y, new = stream.once(known, x, weights, given)
        return (time + 1, y, following, kept(inputs, x, time)), new

    start = (jnp.int32(0), x, _fetch(trainables, 0), room)
    (_, x, weights, inputs), news = lax.scan(step, start, _slice_rows(given, slice(0, last)), length=last)
    y, new = stream.once(known, x, weights, _take_row(given, last))
    news = jax.tree.map(lambda rows, row: jnp.concatenate([rows, row[None]]), news, new)
    return (y, news), kept(inputs, x, last)


def _stream_fwd(stream: Stream, known: bool | None, x: Any, trainables: Tree, given: LayerInputs) -> tuple[Any, Any]:
    room = jax.tree.map(lambda leaf: _empty_stack(stream.layer.times, leaf), x)
    room = to_host(room) if stream.inputs_in_host else room
    out, inputs = _run_layers(stream, known, x, trainables, given, room)
    return out, (inputs, trainables, given)


def _stream_bwd(stream: Stream, known: bool | None, saved: Any, cotangents: Any) -> tuple[Any, Tree, Any]:
    """The gradients, layer by layer from the last; those of the weights in the memory where the weights lie."""
    inputs, trainables, given = saved
    last = stream.layer.times - 1
    dy, dnews = cotangents

    def pulled(x: Any, weights: Tree, given: LayerInputs, dy: Any, dnew: Tree) -> Any:
        """The gradients of one layer, which is computed again."""
        (xs, x_of), (states, state_of) = split_inexact(x), split_inexact(given.non_trainables)

        def layer(xs: Any, weights: Tree, states: Any) -> Any:
            y, new = stream.once(known, x_of(xs), weights, given._replace(non_trainables=state_of(states)))
            return split_inexact(y)[0], split_inexact(new)[0]

        return jax.vjp(layer, xs, weights, states)[1]((dy, dnew))

    def step(carried: Any, own: Any) -> tuple[Any, Any]:
        time, dx, (x, weights), grads = carried
        following = _fetch((inputs, trainables), time - 1)
        given, dnew = own
        dx, dweights, dstate = pulled(x, weights, given, dx, dnew)
        return (time - 1, dx, following, write_slice(grads, _add_axis(dweights), time)), dstate

    dy, dnews = split_inexact(dy)[0], split_inexact(dnews)[0]
    room = to_memory_of(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), trainables), trainables)
    rows = (_slice_rows(given, slice(1, None)), _slice_rows(dnews, slice(1, None)))
    start = (jnp.int32(last), dy, _fetch((inputs, trainables), last), room)
    (_, dx, (x, weights), grads), dstates = lax.scan(step, start, rows, length=last, reverse=True)
    dx, dweights, dstate = pulled(x, weights, _take_row(given, 0), dx, _take_row(dnews, 0))
    grads = write_slice(grads, _add_axis(dweights), 0)
    dstates = jax.tree.map(lambda row, rows: jnp.concatenate([row[None], rows]), dstate, dstates)
    return (
        split_inexact(x)[1](dx, None),
        grads,
        LayerInputs(split_inexact(given.non_trainables)[1](dstates, None), None),
    )


_stream.defvjp(_stream_fwd, _stream_bwd)


def _fetch(trainables: Tree, time: Any) -> Tree:
    return jax.tree.map(lambda leaf: lax.squeeze(leaf, (0,)), slice_to_device(trainables, time))


def _empty_stack(times: int, leaf: jax.Array) -> jax.Array:
    """A stack of as many; no zeros where there are none, as among keys."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jnp.broadcast_to(leaf if is_key else jnp.zeros_like(leaf), (times, *leaf.shape))


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _slice_rows(tree: Any, rows: slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def _take_row(tree: Any, row: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[row], tree)
