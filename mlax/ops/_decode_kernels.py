"""Kernels for one token of a transformer, in Pallas: a linear map with what surrounds it, and attention to a KV cache.

A token of a small batch is a chain of short kernels, whose starts cost more than their work, and cuBLAS does not fuse
a product with the norm before it or with the activation and the residual after it. These do, so that a block is five
kernels, and attention reads only the slots that are filled.

JAX deprecates the Triton backend of Pallas, and warns whenever it lowers a kernel. So each kernel is lowered once for
its shapes, without the warning, and called as an exported program; what it raises then is its refusal.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

COLUMNS = 16  # of the product that a program computes
PIECE = 256  # elements of a row that a program reads at once, at most
SLOTS = 64  # of the cache that a program reads at once
LOW = -1e30  # the score of an empty slot
TRITON_CALL = "__gpu$xla.gpu.triton"


def fused_linear(
    x: Any,
    kernel: Any,
    bias: Any,
    *,
    norm: tuple[Any, Any] | None = None,
    residual: Any = None,
    eps: float = 1e-5,
    gelu: bool = False,
    interpret: bool = False,
) -> Any:
    """`residual + gelu(layer_norm(x) @ kernel.T + bias)` in one kernel, of x (1, d) and the transposed kernel (f, d).

    `norm` is the scale and the shift (d,) of the layer norm. It is computed in float32 up to the result, but for the
    factors of the product, which are in the dtype of x.
    """
    arrays = (x, kernel, bias, norm, residual)
    return _call(_fused_linear, arrays, eps=eps, gelu=gelu, interpret=interpret)


def decode_attention(
    qkv: Any, keys: Any, values: Any, count: Any, *, heads: int, scale: float, interpret: bool = False
) -> tuple[Any, Any, Any]:
    """Attention of one token of each row to itself and to the `count` tokens before it: (y, keys, values).

    Its queries, keys and values are qkv (b, (h + 2 g) k), y is (b, h k), and the caches (b, g, s, k) are updated in
    place, at the slot `count` (b,), or (1,) for all rows. Only slots that are filled are read. A token without a slot
    gives NaN. The softmax is in float32.
    """
    return _call(_decode_attention, (qkv, keys, values, count), heads=heads, scale=scale, interpret=interpret)


def _call(kernel: Callable[..., Any], arrays: Any, **static: Any) -> Any:
    if static["interpret"]:
        return kernel(arrays, **static)
    leaves, tree = jax.tree.flatten(arrays)
    described = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return _export(kernel, tree, described, tuple(static.items())).call(*leaves)


@functools.lru_cache(maxsize=1024)
def _export(kernel: Callable[..., Any], tree: Any, described: Any, static: Any) -> Any:
    from jax import export

    def call(*leaves: Any) -> Any:
        return kernel(jax.tree.unflatten(tree, leaves), **dict(static))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend", category=DeprecationWarning)
        checks = [export.DisabledSafetyCheck.custom_call(TRITON_CALL)]
        return export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(*described)


def _fused_linear(arrays: Any, *, eps: float, gelu: bool, interpret: bool) -> Any:
    x, kernel, bias, norm, residual = arrays
    f = kernel.shape[0]
    columns = _largest_power(f, COLUMNS)
    body = functools.partial(_linear_body, columns=columns, eps=eps, gelu=gelu)
    body = functools.partial(body, has_norm=norm is not None, has_residual=residual is not None)
    inputs = [x, kernel, bias, *(norm or ()), *(() if residual is None else (residual,))]
    shape = jax.ShapeDtypeStruct((1, f), x.dtype)
    return _pallas_call(body, shape, (f // columns,), interpret)(*inputs)


def _pallas_call(body: Any, shapes: Any, grid: Any, interpret: bool, aliases: Any = None, **options: Any) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        body,
        out_shape=shapes,
        grid=grid,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(**{"num_warps": 4, "num_stages": 3, **options}),
    )


def _linear_body(
    x_ref: Any,
    kernel_ref: Any,
    bias_ref: Any,
    *refs: Any,
    columns: int,
    eps: float,
    gelu: bool,
    has_norm: bool,
    has_residual: bool,
) -> None:
    """A tile of columns of the product, as sums of products: a tensor core needs 16 rows, and there is one."""
    from jax.experimental import pallas as pl

    *others, y_ref = refs
    d, outputs = kernel_ref.shape[1], pl.ds(pl.program_id(0) * columns, columns)
    size = _largest_power(d, PIECE)
    pieces = [pl.ds(start, size) for start in range(0, d, size)]
    xs = [x_ref[0, piece].astype(np.float32) for piece in pieces]
    if has_norm:
        mean = sum(map(jnp.sum, xs)) / d
        inverse = lax.rsqrt(sum(jnp.sum((x - mean) * (x - mean)) for x in xs) / d + eps)
        affine = [[ref[piece].astype(np.float32) for ref in others[:2]] for piece in pieces]
        xs = [(x - mean) * inverse * scale + shift for x, (scale, shift) in zip(xs, affine, strict=True)]
        xs = [x.astype(x_ref.dtype).astype(np.float32) for x in xs]
    y = jnp.zeros((columns, size), np.float32)
    for x, piece in zip(xs, pieces, strict=True):
        y += kernel_ref[outputs, piece].astype(np.float32) * x[None]
    y = jnp.sum(y, axis=1) + bias_ref[outputs].astype(np.float32)
    y = _gelu(y) if gelu else y
    y = y + others[-1][0, outputs].astype(np.float32) if has_residual else y
    y_ref[0, outputs] = y.astype(y_ref.dtype)


def _decode_attention(arrays: Any, *, heads: int, scale: float, interpret: bool) -> Any:
    qkv, keys, values, count = arrays
    b, _, _, width = keys.shape
    y = jax.ShapeDtypeStruct((b, heads * width), qkv.dtype)
    cache = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    body = functools.partial(_attention_body, heads=heads, scale=scale)
    call = _pallas_call(body, [y, cache, cache], (b, heads), interpret, {1: 1, 2: 2}, num_stages=2)
    return tuple(call(qkv, keys, values, count))


def _attention_body(
    qkv_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    count_ref: Any,
    y_ref: Any,
    new_keys_ref: Any,
    new_values_ref: Any,
    *,
    heads: int,
    scale: float,
) -> None:
    """One head of one row. Each of SLOTS lanes has a softmax of its own, over each SLOTS-th slot."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    _, groups, capacity, width = keys_ref.shape
    row, head = pl.program_id(0), pl.program_id(1)
    group = head // (heads // groups)
    count = count_ref[row if count_ref.shape[0] > 1 else 0]
    query, key, value = (qkv_ref[row, pl.ds(at * width, width)] for at in (head, heads + group, heads + groups + group))
    query = query.astype(np.float32) * scale
    value = jnp.where(count < capacity, value, jnp.full_like(value, jnp.nan))
    lanes, filled = jnp.arange(SLOTS), jnp.minimum(count, capacity)

    def attend(i: Any, carry: Any) -> Any:
        top, total, y = carry
        slots, is_filled = pl.ds(i * SLOTS, SLOTS), i * SLOTS + lanes < filled

        def load(ref: Any) -> Any:
            tile = ref.at[row, group, slots, :]
            if capacity % SLOTS == 0:
                return tile[...].astype(np.float32)
            return triton.load(tile, mask=is_filled[:, None], other=0).astype(np.float32)

        scores = jnp.where(is_filled, jnp.sum(load(keys_ref) * query[None], axis=1), LOW)
        new_top = jnp.maximum(top, scores)
        old, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
        return new_top, total * old + weights, y * old[:, None] + weights[:, None] * load(values_ref)

    zeros = jnp.zeros(SLOTS, np.float32)
    carry = (zeros + LOW, zeros, jnp.zeros((SLOTS, width), np.float32))
    tops, totals, ys = lax.fori_loop(0, (filled + SLOTS - 1) // SLOTS, attend, carry)
    own = jnp.sum(query * key.astype(np.float32))
    top = jnp.maximum(jnp.max(tops), own)
    lane_weights, weight = jnp.where(tops > LOW, jnp.exp(tops - top), 0.0), jnp.exp(own - top)
    y = jnp.sum(ys * lane_weights[:, None], axis=0) + weight * value.astype(np.float32)
    y = y / (jnp.sum(totals * lane_weights) + weight)
    y_ref[row, pl.ds(head * width, width)] = y.astype(y_ref.dtype)

    @pl.when(head % (heads // groups) == 0)
    def _() -> None:
        slot = jnp.minimum(count, capacity - 1)
        new_keys_ref[row, group, slot, :] = key.astype(new_keys_ref.dtype)
        new_values_ref[row, group, slot, :] = value.astype(new_values_ref.dtype)


def _gelu(x: Any) -> Any:
    """`jax.nn.gelu`, whose tanh is a sigmoid here, which Triton has."""
    return x * jax.nn.sigmoid(2 * np.sqrt(2 / np.pi).astype(np.float32) * (x + 0.044715 * x * x * x))


def _largest_power(size: int, most: int) -> int:
    """The largest power of two that divides a size, up to `most`."""
    return min(size & -size, most)
