"""Attention by cuDNN's fused kernel, and the question whether cuDNN computes it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from mlax._jax import with_vjp
from mlax.ops._attention_scores import ScoreInputs, ScoreSpec


@functools.cache
def cudnn_attention(spec: ScoreSpec, plain: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Attention of the primals (q, k, v, bias, sinks) and the consts `ScoreInputs`, as `plain` computes it.

    cuDNN computes the forward and the backward pass, and `plain` every other derivative, which cuDNN does not have.
    """

    def forward(primals: Any, consts: ScoreInputs) -> tuple[jax.Array, Any]:
        q, k, v, bias, _ = primals
        arrays = (q, k, v) if bias is None else (q, k, v, bias)

        trees: list[Any] = []

        def attend(arrays: Any, lengths: Any) -> Any:
            y, pull_back = jax.vjp(lambda *arrays: fused_attention(*arrays, lengths=lengths, spec=spec), *arrays)
            residuals, tree = jax.tree.flatten(pull_back)
            trees.append(tree)  # not returned, since trees of two traces compare unequal
            return y, residuals

        y, residuals = _vmap_kernel(attend, is_parallel=bias is None)(arrays, consts.key_limit)
        return y, trees[0].unflatten(residuals)

    def backward(residuals: Any, primals: Any, consts: ScoreInputs, grad: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(residuals)
        pull_back = _vmap_kernel(lambda leaves, grad: tree.unflatten(leaves)(grad), is_parallel=primals[3] is None)
        q_grad, k_grad, v_grad, *bias_grad = pull_back(leaves, grad)
        return q_grad, k_grad, v_grad, bias_grad[0] if bias_grad else None, None

    return with_vjp(plain, forward, backward)


def fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, *, lengths: Any, spec: ScoreSpec
) -> jax.Array:
    """The attention by cuDNN of q (b, t, h, k), k and v (b, s, g, k). Odd times are padded, since JAX refuses them."""
    (b, t), s = q.shape[:2], k.shape[1]
    query_lengths = None
    has_keys = None if lengths is None else (lengths > 0)[:, None, None, None]
    if lengths is not None:
        lengths = jnp.maximum(lengths, 1)  # cuDNN gives NaN for a row without keys
    if t % 2 or s % 2:
        q = _pad_time(q, t % 2)
        k, v = (_pad_time(x, s % 2) for x in (k, v))
        query_lengths = jnp.full(b, t, np.int32)
        lengths = jnp.full(b, s, np.int32) if lengths is None else lengths
    y = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        scale=spec.scale,
        is_causal=spec.causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=None if lengths is None else lengths.astype(np.int32),
        local_window_size=None if spec.window is None else (spec.window - 1, 0),
        implementation="cudnn",
    )
    y = y[:, :t]
    return y if has_keys is None else jnp.where(has_keys, y, jnp.zeros_like(y))


def _pad_time(x: jax.Array, more: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) if more else x


def _vmap_kernel(kernel: Callable[..., Any], *, is_parallel: bool) -> Callable[..., Any]:
    """`kernel` with a batching rule that works whichever arguments are batched; cuDNN's needs all of them to be.

    If not `is_parallel` the kernel is called once for each element: a bias has no batch axis to merge them into.
    """
    batched = custom_vmap(kernel)

    @batched.def_vmap
    def _(size: int, is_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        def broadcast(x: Any, has_axis: bool) -> Any:
            return x if has_axis else jnp.broadcast_to(x[None], (size, *x.shape))

        arguments = jax.tree.map(broadcast, arguments, tuple(is_batched))
        y = jax.vmap(kernel)(*arguments) if is_parallel else lax.map(lambda each: kernel(*each), arguments)
        return y, jax.tree.map(lambda _: True, y)

    return batched


def find_refusal(q: Any, k: Any, v: Any, bias: Any, lengths: Any, spec: ScoreSpec) -> str | None:
    """What cuDNN answers if it refuses the forward or the backward pass of arrays of these shapes; None if it accepts.

    JAX and cuDNN check while tracing, lowering and compiling, by rules that change with their versions, so the answer
    is found by compiling both passes once.
    """
    described = [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, bias)]
    limits = None if lengths is None else jax.ShapeDtypeStruct(lengths.shape, np.int32)
    return _find_refusal(*described, limits, spec)


@functools.lru_cache(maxsize=1024)
def _find_refusal(q: Any, k: Any, v: Any, bias: Any, lengths: Any, spec: ScoreSpec) -> str | None:
    arrays = [x for x in (q, k, v, bias) if x is not None]

    def both_passes(arrays: Any, lengths: Any) -> Any:
        y, pull_back = jax.vjp(lambda *arrays: fused_attention(*arrays, lengths=lengths, spec=spec), *arrays)
        return y, pull_back(y)

    try:
        jax.jit(both_passes).lower(arrays, lengths).compile()
    except Exception as error:  # whatever it raises, another backend can compute this attention
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None
