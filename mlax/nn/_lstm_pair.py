"""Two LSTM layers in one scan, in which the second is one time step behind the first."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlax import ops
from mlax._jax import ScanStep, batched_grad_scan, is_narrow
from mlax.core import Tree

WIDEST, MOST_EXAMPLES = 512, 64  # up to which it was measured
CLOSED = -1e4  # a gate before its activation, which is then 0 to the last bit in every dtype


def is_pair_faster(x: jax.Array, features: int, trainables: Tree) -> bool:
    """Whether `lstm_pair` is faster than two scans for x (t, b, d): on a GPU, for small layers in 16 bits.

    On an H200 two layers of 512 features took 5.6 ms for 256 steps of 64 examples in bfloat16, forward and backward,
    and 7.3 by two scans: half as many kernels have to wait for one another. Wider layers and larger batches, which keep
    the device busy either way, are not measured; one scan multiplies by a third more.
    """
    small = features <= WIDEST and isinstance(x.shape[1], int) and x.shape[1] <= MOST_EXAMPLES and is_narrow(x.dtype)
    unsharded = all(jax.typeof(leaf).sharding.mesh.empty for leaf in (x, *jax.tree.leaves(trainables)))
    return jax.default_backend() == "gpu" and small and unsharded


def lstm_pair(x: jax.Array, first: Any, second: Any, *, precision: Any = None, unroll: int | None = None) -> jax.Array:
    """The outputs (t, b, f) of the second of two LSTM layers, whose carries start at zero, for x (t, b, d).

    `first` and `second` are the trainables of two `nn.LSTMCell`s of f features. A step of the scan computes the first
    layer at time s and the second at time s - 1, both from the carries of the step before, by one product:

        (h1, h2) @ ((recurrent 1, input 2), (0, recurrent 2))

    So there are t + 1 steps that depend on each other instead of 2 t.
    """
    width = first["recurrent"]["kernel"].shape[0]
    times, batch, _ = x.shape
    unroll = unroll or best_unroll(times + 1)
    idle = -(times + 1) % unroll  # steps at the end, so that the scan has no remainder
    ahead = ops.linear(x, first["input"]["kernel"], _bias(first), precision=precision)
    ahead = jnp.concatenate([ahead, jnp.zeros((1 + idle, *ahead.shape[1:]), x.dtype)])
    bias = jnp.zeros((4 * width,), x.dtype) if (found := _bias(second)) is None else found
    behind = jnp.broadcast_to(bias, (times + idle, *ahead.shape[1:]))
    behind = jnp.concatenate([jnp.full((1, *ahead.shape[1:]), CLOSED, x.dtype), behind])
    recurrent, kernel = second["recurrent"]["kernel"], second["input"]["kernel"]
    rows = [(first["recurrent"]["kernel"], kernel), (jnp.zeros_like(recurrent), recurrent)]
    block = jnp.concatenate([jnp.concatenate(row, 1) for row in rows])  # (2 f, 8 f)

    def feedback(weights: dict[str, Any], carry_and_key: Any) -> jax.Array:
        (h, _), _ = carry_and_key
        return ops.linear(h, weights["block"], precision=precision)

    def step(_: Any, carry: Any, gates: jax.Array, __: Any) -> Any:
        c, h = ops.lstm(gates.reshape(batch, 2, 4 * width), carry[1])
        h = h.reshape(batch, 2 * width)
        return (h, c), h

    zeros = jnp.zeros((batch, 2 * width), x.dtype)
    _, h = batched_grad_scan(
        ScanStep(feedback, step),
        (zeros, zeros.reshape(batch, 2, width)),
        jnp.concatenate([ahead, behind], -1),
        (None, None, None),
        {"block": block},
        unroll=unroll,
    )
    return lax.slice(h, (1, 0, width), (times + 1, batch, 2 * width))


def best_unroll(steps: int) -> int:
    """How many steps of a scan to compute in one iteration: eight, or fewer where that leaves many steps idle.

    A step takes 19 microseconds, and the loop 16 for each iteration: 6.0 ms by four and 5.6 by eight, see above.
    """
    return min((8, 4, 2, 1), key=lambda unroll: -(-steps // unroll) * (19 * unroll + 16))


def _bias(trainables: Any) -> jax.Array | None:
    """The bias of the input and, if there is one, of the recurrent part."""
    found = [part["bias"] for part in (trainables["input"], trainables["recurrent"]) if "bias" in part]
    return functools.reduce(lax.add, found) if found else None
