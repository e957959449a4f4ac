"""The selective scan of state-space models, and the causal depthwise convolution before it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mlax._jax import broadcast_like, expand_last, is_static, pcast_like, reduce_sum, shard_like, sums_precisely
from mlax.core import check_is_dtype
from mlax.ops._checks import check_same_dtype


def selective_scan(
    x: Float[Array, "b t c"],
    step: Float[Array, "b t c"],
    log_rate: Float[Array, "c n"],
    write: Float[Array, "b t n"],
    read: Float[Array, "b t n"],
    skip: Float[Array, " c"],
    state: Float[Array, "b c n"] | None = None,
    *,
    chunk: int = 32,
    accum_dtype: Any = None,
) -> tuple[Float[Array, "b t c"], Float[Array, "b c n"]]:
    """The selective scan of Mamba: run a linear recurrence over time whose coefficients depend on the input: its
    outputs, and the last state.

        state = exp(-step * exp(log_rate)) * state + step * write * x
        y     = sum(read * state) + skip * x

    from `state`, or from 0, in the dtype of `x`, or in `accum_dtype` if given; then the state has that dtype too. The
    time steps of one chunk are computed in parallel (associative scan), the chunks one after the other. Each chunk is
    recomputed in the backward pass, so that memory holds `chunk` states of each row, and one for each chunk.
    https://arxiv.org/abs/2312.00752, equations 2 and 4 and algorithm 2.
    """
    check_is_dtype("selective_scan", accum_dtype=accum_dtype)
    check_same_dtype("selective_scan", x=x, step=step, log_rate=log_rate, write=write, read=read, skip=skip)
    b, t, c = x.shape
    dtype = x.dtype if accum_dtype is None else jnp.dtype(accum_dtype)
    wide = [lax.convert_element_type(array, dtype) for array in (x, step, write, read)]
    rate = -jnp.exp(lax.convert_element_type(log_rate, dtype))
    zeros = jnp.zeros((b, c, rate.shape[-1]), dtype)
    last: Any = shard_like(zeros, x) if state is None else pcast_like(state, x)
    chunk = max(1, min(chunk, t)) if is_static(t) else chunk
    chunks = [_split_chunks(array, chunk) for array in wide]

    def scan_chunk(state: jax.Array, arrays: Any) -> tuple[jax.Array, jax.Array]:
        rows, own_rate = arrays
        return _scan_chunk(state, rate if own_rate is None else own_rate, *rows)

    if is_static(t) and t <= chunk:
        last, y = scan_chunk(last, ([array[0] for array in chunks], None))
    else:
        rates = None
        if not sums_precisely(rate):  # one for each chunk, or the gradient would be rounded after each
            rates = broadcast_like(rate[None], jnp.zeros((chunks[0].shape[0], *rate.shape), dtype))
        last, y = lax.scan(jax.checkpoint(scan_chunk, prevent_cse=False), last, (chunks, rates))
        y = jnp.moveaxis(y, 0, 1).reshape(b, y.shape[0] * chunk, c)[:, :t]
    y = y + expand_last(lax.convert_element_type(skip, dtype), y) * wide[0]
    return lax.convert_element_type(y, x.dtype), last


def causal_filter(
    x: Float[Array, "b t c"],
    kernel: Float[Array, "w c"],
    bias: Float[Array, " c"] | None = None,
    before: Float[Array, "b v c"] | None = None,
) -> tuple[Float[Array, "b t c"], Float[Array, "b v c"]]:
    """Convolve each channel with its own kernel over the current time step (its last row) and those before it.

    Also returns the last `w - 1` inputs, to be passed as `before` with the next time steps; None means zeros.
    It is a sum of shifted products: for a small kernel that is faster than a grouped convolution.
    """
    check_same_dtype("causal_filter", x=x, kernel=kernel, bias=bias)
    (b, t, c), w = x.shape, kernel.shape[0]
    first = shard_like(jnp.zeros((b, w - 1, c), x.dtype), x) if before is None else before
    history = jnp.concatenate([first, x], axis=1)  # (b, w - 1 + t, c)
    y = jnp.zeros_like(x) if bias is None else jnp.broadcast_to(expand_last(bias, x), x.shape)
    for row in range(w):
        y = y + history[:, row : row + t] * expand_last(kernel[row], x)
    return y, history[:, t:]


def _split_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """(b, t, ...) as (chunks, b, chunk, ...), padded with zeros: a step of 0 leaves the state unchanged."""
    b, t, *rest = x.shape
    count = max(1, -(-t // chunk)) if is_static(t) else (t + chunk - 1) // chunk
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, count * chunk - t, 0), *((0, 0, 0) for _ in rest)])
    return jnp.moveaxis(x.reshape(b, count, chunk, *rest), 1, 0)


def _scan_chunk(
    state: jax.Array, rate: jax.Array, x: jax.Array, step: jax.Array, write: jax.Array, read: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state after one chunk, and the output at each of its time steps, in parallel."""
    decay = jnp.exp(_product("blc,cn->blcn", step, rate))
    added = _product("blc,bln->blcn", step * x, write)
    decay, added = lax.associative_scan(_compose, (decay, added), axis=1)
    states = decay * state[:, None] + added
    return states[:, -1], _product("blcn,bln->blc", states, read)


def _compose(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return first[0] * then[0], then[0] * first[1] + then[1]


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum over axes b, l, c and n: elementwise, which XLA fuses, unless it would round every addition."""
    if not sums_precisely(a):
        return jnp.einsum(subscripts, a, b)
    inputs, result = subscripts.split("->")
    a, b = (
        lax.expand_dims(each, [axis for axis, letter in enumerate("blcn") if letter not in letters])
        for each, letters in zip((a, b), inputs.split(","), strict=True)
    )
    return reduce_sum(a * b, tuple(axis for axis, letter in enumerate("blcn") if letter not in result))
