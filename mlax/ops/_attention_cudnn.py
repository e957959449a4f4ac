"""Attention by cuDNN's fused kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from mlax._gpu import attention_kernel
from mlax._jax import cuda_branch, with_layer_form, with_vjp
from mlax.ops._attention_scores import ScoreInputs, ScoreSpec


@functools.cache
def cudnn_attention(
    spec: ScoreSpec, plain: Callable[..., Any], kernel_keys: int | None = None
) -> Callable[..., jax.Array]:
    """Attention of the primals (q, k, v, bias, sinks) and the consts `ScoreInputs`, as `plain` computes it.

    cuDNN computes the forward and the backward pass in programs for NVIDIA GPUs. `plain` computes what such a program
    runs on the CPU, and every other derivative, which cuDNN does not have. With `kernel_keys`, of `find_kernel_keys`,
    a kernel that takes slices of stacks computes the forward pass in a `layer_scan`.
    """

    def forward(primals: Any, consts: ScoreInputs) -> tuple[jax.Array, Any]:
        trees: list[Any] = []

        def attend(arrays: Any, lengths: Any) -> Any:
            """The output and those residuals that are neither it nor an array."""
            y, pull_back = jax.vjp(lambda *arrays: fused_attention(*arrays, lengths=lengths, spec=spec), *arrays)
            leaves, tree = jax.tree.flatten(pull_back)
            trees.append((tree, origins := _find_origins(arrays, lengths, spec)))  # trees of two traces are unequal
            return y, [leaf for leaf, origin in zip(leaves, origins, strict=True) if origin is None]

        def by_cudnn(primals: Any, consts: ScoreInputs) -> Any:
            attend_each = _vmap_kernel(attend, is_parallel=primals[3] is None)
            return attend_each(_without_none(primals), consts.key_limit)

        def by_kernel(primals: Any, consts: ScoreInputs) -> Any:
            q, k, v, *_ = primals
            y, lse = attention_kernel(q, k, v, scale=spec.scale, causal=spec.causal, length=kernel_keys)
            _, rest = by_cudnn(primals, consts)  # lengths; XLA removes the call
            return y, [lse if _is_lse(each, q) else each for each in rest]

        def by_xla(primals: Any, consts: ScoreInputs) -> Any:
            return plain(primals, consts), [jnp.zeros(each.shape, each.dtype) for each in shapes]

        def on_gpu(form: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: lax.platform_dependent(*args, cuda=cuda_branch(form), default=by_xla)

        _, shapes = jax.eval_shape(by_cudnn, primals, consts)
        has_kernel = kernel_keys is not None and sum(_is_lse(each, primals[0]) for each in shapes) == 1
        run = with_layer_form(on_gpu(by_cudnn), on_gpu(by_kernel)) if has_kernel else on_gpu(by_cudnn)
        y, rest = run(primals, consts)
        (tree, origins), others = trees[0], iter(rest)
        given = (*_without_none(primals), y)
        residuals = tree.unflatten([next(others) if origin is None else given[origin] for origin in origins])
        return _zero_without_keys(y, consts, spec), residuals

    def backward(residuals: Any, primals: Any, consts: ScoreInputs, grad: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(residuals)
        pull_back = _vmap_kernel(lambda leaves, grad: tree.unflatten(leaves)(grad), is_parallel=primals[3] is None)

        def by_cudnn(leaves: Any, primals: Any, consts: ScoreInputs, grad: jax.Array) -> Any:
            q_grad, k_grad, v_grad, *bias_grad = pull_back(leaves, _zero_without_keys(grad, consts, spec))
            return q_grad, k_grad, v_grad, bias_grad[0] if bias_grad else None, None

        def by_xla(leaves: Any, primals: Any, consts: ScoreInputs, grad: jax.Array) -> Any:
            (grads,) = jax.vjp(lambda primals: plain(primals, consts), primals)[1](grad)
            return grads

        return lax.platform_dependent(leaves, primals, consts, grad, cuda=cuda_branch(by_cudnn), default=by_xla)

    return with_vjp(plain, forward, backward)


def _without_none(primals: Any) -> tuple[Any, ...]:
    return tuple(x for x in primals[:4] if x is not None)


def _find_origins(arrays: Any, lengths: Any, spec: ScoreSpec) -> list[int | None]:
    """Which array each residual of cuDNN is, or the output, by the index that follows theirs; None for all others.

    So they are stored once, also where they are residuals of what comes before and after attention.
    """

    def both(arrays: Any, lengths: Any) -> list[Any]:
        y, pull_back = jax.vjp(lambda *arrays: fused_attention(*arrays, lengths=lengths, spec=spec), *arrays)
        return [y, *jax.tree.leaves(pull_back)]

    jaxpr = jax.make_jaxpr(both)(arrays, lengths).jaxpr
    y, *residuals = jaxpr.outvars
    given: list[Any] = [*jaxpr.invars[: len(arrays)], y]
    return [next((i for i, each in enumerate(given) if each is residual), None) for residual in residuals]


def _is_lse(residual: Any, q: Any) -> bool:
    """Whether it has the type of the logarithms of the sums of exponentials of scores, for q (b, t, h, k)."""
    b, t, h, _ = q.shape
    return residual.dtype == np.float32 and residual.shape == (b, h, t)


def _zero_without_keys(x: jax.Array, consts: ScoreInputs, spec: ScoreSpec) -> jax.Array:
    """`x` (b, t, h, k), but 0 in rows without keys, for which cuDNN is called with one."""
    if consts.key_limit is None or spec.has_keys:
        return x
    return jnp.where((consts.key_limit > 0)[:, None, None, None], x, jnp.zeros_like(x))


def fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None = None, *, lengths: Any, spec: ScoreSpec
) -> jax.Array:
    """The attention by cuDNN of q (b, t, h, k), k and v (b, s, g, k), to at least one key.

    Odd times are padded, since JAX refuses them.
    """
    t, s, query_lengths = q.shape[1], k.shape[1], None
    if lengths is not None:
        lengths = jnp.maximum(lengths, 1)  # cuDNN gives NaN for a row without keys
    if t % 2 or s % 2:
        q = _pad_time(q, t % 2)
        k, v = (_pad_time(x, s % 2) for x in (k, v))
        query_lengths = _fill_rows(q, t)
        lengths = _fill_rows(q, s) if lengths is None else lengths
    return jax.nn.dot_product_attention(
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
    )[:, :t]


def _fill_rows(x: jax.Array, value: int) -> jax.Array:
    """The value for each row of x; before JAX 0.11, which batches cuDNN only if all arguments are, a function of x."""
    values = jnp.full(x.shape[0], value, np.int32)
    if jax.__version_info__ >= (0, 11):
        return values
    is_never = lax.lt(x[:, 0, 0, 0], x[:, 0, 0, 0])
    return lax.select(is_never, values + 1, values)


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
        y = jax.vmap(kernel)(*arguments) if is_parallel else lax.map(lambda each: batched(*each), arguments)
        return y, jax.tree.map(lambda _: True, y)

    return batched
