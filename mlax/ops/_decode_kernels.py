"""Kernels for one token of a transformer, in Pallas: what is around the products, and attention to a KV cache.

A token is a chain of short kernels, whose starts cost more than their work. XLA takes two kernels for a norm, six for
attention to a cache, and another to sum the parts of a product that it divides. `sum_and_norm` and `decode_attention`
do all of that in one kernel each, for any number of rows, and the latter reads only the slots that are filled. For one
row there is `fused_linear`, too, a product with the norm before it and the activation and the residual after it.

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
WARPS = 2  # of attention with many rows: six programs fit on a multiprocessor then, 792 on an H200; with 4 they are 660
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
    columns: int = COLUMNS,
    interpret: bool = False,
) -> Any:
    """`residual + gelu(layer_norm(x) @ kernel.T + bias)` in one kernel, of x (1, d) and the transposed kernel (f, d).

    `norm` is the scale and the shift (d,) of the layer norm. It is computed in float32 up to the result, but for the
    factors of the product, which are in the dtype of the kernel. x may also be what `decode_attention` returns with
    `splits`. Each program computes `columns` of the output.
    """
    arrays = (x, kernel, bias, norm, residual)
    return _call(_fused_linear, arrays, eps=eps, gelu=gelu, columns=columns, interpret=interpret)


def sum_and_norm(
    x: Any,
    scale: Any,
    shift: Any,
    partial: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    interpret: bool = False,
) -> tuple[Any, Any]:
    """The residual stream and its layer norm, (x, y), each (b, d) in the dtype of x, in one kernel.

    x (b, d) is returned as it is, or, with the `partial` sums (p, b, d) of a product and its `bias` (d,), with their
    sum added. Computed in float32.
    """
    arrays = (x, scale, shift, partial, bias)
    return _call(_sum_and_norm, arrays, eps=eps, interpret=interpret)


def decode_attention(
    qkv: Any,
    keys: Any,
    values: Any,
    count: Any,
    bias: Any = None,
    *,
    heads: int,
    scale: float,
    splits: int = 1,
    interpret: bool = False,
) -> tuple[Any, Any, Any]:
    """Attention of one token of each row to itself and to the `count` tokens before it: (y, keys, values).

    Its queries, keys and values are qkv (b, (h + 2 g) k), or the partial sums (p, b, (h + 2 g) k) of a product with
    its `bias`. y is (b, h k), and the caches (b, g, s, k) are updated in place, at the slot `count` (b,), or (1,) for
    all rows. Only slots that are filled are read. A token without a slot gives NaN. The softmax is in float32.

    With `splits`, a power of two, the slots of a head are divided among as many programs, and y is a pair for
    `fused_linear`: the outputs (splits, b, h k) and the log-sum-exp of the scores (splits, b, h), in float32.
    """
    arrays = (qkv, keys, values, count, bias)
    return _call(_decode_attention, arrays, heads=heads, scale=scale, splits=splits, interpret=interpret)


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


def _pallas_call(
    name: str, body: Any, shapes: Any, grid: Any, interpret: bool, aliases: Any = None, **options: Any
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        body,
        out_shape=shapes,
        grid=grid,
        input_output_aliases=aliases or {},
        interpret=interpret,
        name=name,
        compiler_params=triton.CompilerParams(**{"num_warps": 4, "num_stages": 3, **options}),
    )


def _with_optional(body: Callable[..., None], arrays: Any) -> Callable[..., None]:
    """`body` as a function of references to the leaves of `arrays` and to the results; None for what is None."""
    leaves, tree = jax.tree.flatten(arrays)
    return lambda *refs: body(jax.tree.unflatten(tree, refs[: len(leaves)]), *refs[len(leaves) :])


def _fused_linear(arrays: Any, *, eps: float, gelu: bool, columns: int, interpret: bool) -> Any:
    f, columns = arrays[1].shape[0], _largest_power(arrays[1].shape[0], columns)
    body = _with_optional(functools.partial(_linear_body, columns=columns, eps=eps, gelu=gelu), arrays)
    shape = jax.ShapeDtypeStruct((1, f), arrays[1].dtype)
    return _pallas_call("fused_linear", body, shape, (f // columns,), interpret)(*jax.tree.leaves(arrays))


def _linear_body(refs: Any, y_ref: Any, *, columns: int, eps: float, gelu: bool) -> None:
    """A tile of columns of the product, as sums of products: a tensor core needs 16 rows, and there is one."""
    from jax.experimental import pallas as pl

    x_ref, kernel_ref, bias_ref, norm, residual_ref = refs
    d, outputs = kernel_ref.shape[1], pl.ds(pl.program_id(0) * columns, columns)
    size = _largest_power(d, PIECE)
    pieces = [pl.ds(start, size) for start in range(0, d, size)]
    tiles = [kernel_ref[outputs, piece] for piece in pieces]  # first, so that they load while the norm is computed
    if isinstance(x_ref, tuple):
        y_refs, log_sums_ref = x_ref
        xs = [_combine_splits(y_refs, log_sums_ref, piece) for piece in pieces]
    else:
        xs = [x_ref[0, piece].astype(np.float32) for piece in pieces]
    if norm is not None:
        mean = sum(map(jnp.sum, xs)) / d
        inverse = lax.rsqrt(sum(jnp.sum((x - mean) * (x - mean)) for x in xs) / d + eps)
        affine = [[ref[piece].astype(np.float32) for ref in norm] for piece in pieces]
        xs = [(x - mean) * inverse * scale + shift for x, (scale, shift) in zip(xs, affine, strict=True)]
    xs = [x.astype(kernel_ref.dtype).astype(np.float32) for x in xs]
    y = sum(tile.astype(np.float32) * x[None] for x, tile in zip(xs, tiles, strict=True))
    y = jnp.sum(y, axis=1) + bias_ref[outputs].astype(np.float32)
    y = _gelu(y) if gelu else y
    y = y if residual_ref is None else y + residual_ref[0, outputs].astype(np.float32)
    y_ref[0, outputs] = y.astype(y_ref.dtype)


def _combine_splits(y_ref: Any, log_sum_ref: Any, piece: Any) -> Any:
    """The outputs of attention, in the columns of a piece, from those of the splits of its slots."""
    (splits, _, d), heads = y_ref.shape, log_sum_ref.shape[-1]
    head = (piece.start + jnp.arange(piece.size)) // (d // heads)
    log_sums = log_sum_ref[jnp.arange(splits)[:, None], 0, head[None]]
    weights = jnp.exp(log_sums - jnp.max(log_sums, axis=0)[None])
    return jnp.sum(weights * y_ref[:, 0, piece], axis=0) / jnp.sum(weights, axis=0)


def _sum_and_norm(arrays: Any, *, eps: float, interpret: bool) -> Any:
    x, scale, shift, partial, bias = arrays
    arrays = (x, scale, shift, None if partial is None else lax.collapse(partial, 0, 2), bias)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    body = _with_optional(functools.partial(_norm_body, eps=eps), arrays)
    shapes = [shape] if partial is None else [shape, shape]
    results = _pallas_call("sum_and_norm", body, shapes, x.shape[:1], interpret)(*jax.tree.leaves(arrays))
    return (x, results[0]) if partial is None else tuple(results)


def _norm_body(refs: Any, *outputs: Any, eps: float) -> None:
    """One row, in the registers of a program, padded with zeros to a power of two."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    x_ref, scale_ref, shift_ref, partial_ref, bias_ref = refs
    d, row = x_ref.shape[-1], pl.program_id(0)
    size = pl.next_power_of_2(d)
    columns = pl.ds(0, size)
    is_column = jnp.arange(size) < d

    def load(ref: Any) -> Any:
        if size == d:
            return ref[...].astype(np.float32)
        return triton.load(ref, mask=is_column, other=0).astype(np.float32)

    def store(ref: Any, value: Any) -> None:
        triton.store(ref, value.astype(x_ref.dtype), mask=None if size == d else is_column)

    x, scale, shift = load(x_ref.at[row, columns]), load(scale_ref.at[columns]), load(shift_ref.at[columns])
    if partial_ref is not None:
        rows = x_ref.shape[0]
        partial = [load(partial_ref.at[start + row, columns]) for start in range(0, partial_ref.shape[0], rows)]
        x = (x + (load(bias_ref.at[columns]) + sum(partial))).astype(x_ref.dtype).astype(np.float32)
        store(outputs[0].at[row, columns], x)
    centered = jnp.where(is_column, x - jnp.sum(x) / d, 0.0)
    factor = lax.rsqrt(jnp.sum(centered * centered) / d + eps)
    store(outputs[-1].at[row, columns], centered * factor * scale + shift)


def _decode_attention(arrays: Any, *, heads: int, scale: float, splits: int, interpret: bool) -> Any:
    _, keys, values, *_ = arrays
    b, _, _, width = keys.shape
    if splits == 1:
        outputs = (jax.ShapeDtypeStruct((b, heads * width), keys.dtype),)
    else:
        shapes = (splits, b, heads * width), (splits, b, heads)
        outputs = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    caches = tuple(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (keys, values))
    body = _with_optional(functools.partial(_attention_body, heads=heads, scale=scale, splits=splits), arrays)
    aliases, options = {1: len(outputs), 2: len(outputs) + 1}, {"num_warps": 4 if b == 1 else WARPS, "num_stages": 2}
    call = _pallas_call(
        "decode_attention", body, [*outputs, *caches], (b, heads, splits), interpret, aliases, **options
    )
    *y, keys, values = call(*jax.tree.leaves(arrays))
    return y[0] if splits == 1 else tuple(y), keys, values


def _attention_body(refs: Any, *outputs: Any, heads: int, scale: float, splits: int) -> None:
    """One head of one row, or a part of its slots. Each of SLOTS lanes has a softmax of its own."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    qkv_ref, keys_ref, values_ref, count_ref, bias_ref = refs
    *y_refs, new_keys_ref, new_values_ref = outputs
    _, groups, capacity, width = keys_ref.shape
    row, head, split = (pl.program_id(axis) for axis in range(3))
    group = head // (heads // groups)
    count = count_ref[row if count_ref.shape[0] > 1 else 0]

    def project(at: Any) -> Any:
        columns = pl.ds(at * width, width)
        if bias_ref is None:
            return qkv_ref[row, columns]
        partial = sum(qkv_ref[part, row, columns] for part in range(qkv_ref.shape[0]))
        return (partial + bias_ref[columns].astype(np.float32)).astype(keys_ref.dtype)

    query, key, value = (project(at) for at in (head, heads + group, heads + groups + group))
    query = query.astype(np.float32) * scale
    value = jnp.where(count < capacity, value, jnp.full_like(value, jnp.nan))
    lanes, filled = jnp.arange(SLOTS), jnp.minimum(count, capacity)

    def attend(i: Any, carry: Any) -> Any:
        top, total, y = carry
        start = (i * splits + split) * SLOTS
        is_filled = start + lanes < filled

        def load(ref: Any) -> Any:
            tile = ref.at[row, group, pl.ds(start, SLOTS), :]
            return tile[...] if capacity % SLOTS == 0 else triton.load(tile, mask=is_filled[:, None], other=0)

        keys, values = load(keys_ref), load(values_ref)  # both, before either is waited for
        scores = jnp.where(is_filled, jnp.sum(keys.astype(np.float32) * query[None], axis=1), LOW)
        new_top = jnp.maximum(top, scores)
        old, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
        return new_top, total * old + weights, y * old[:, None] + weights[:, None] * values.astype(np.float32)

    zeros = jnp.zeros(SLOTS, np.float32)
    carry = (zeros + LOW, zeros, jnp.zeros((SLOTS, width), np.float32))
    steps = (filled + SLOTS - 1) // SLOTS
    tops, totals, ys = lax.fori_loop(0, (steps + splits - 1 - split) // splits, attend, carry)
    own = jnp.where(split == 0, jnp.sum(query * key.astype(np.float32)), LOW)
    top = jnp.maximum(jnp.max(tops), own)
    lane_weights, weight = (jnp.where(each > LOW, jnp.exp(each - top), 0.0) for each in (tops, own))
    y = jnp.sum(ys * lane_weights[:, None], axis=0) + jnp.where(split == 0, weight * value.astype(np.float32), 0.0)
    total = jnp.sum(totals * lane_weights) + weight
    if splits == 1:
        y_refs[0][row, pl.ds(head * width, width)] = (y / total).astype(y_refs[0].dtype)
    else:
        y_refs[0][split, row, pl.ds(head * width, width)] = y / jnp.where(total > 0.0, total, 1.0)
        y_refs[1][split, row, head] = jnp.where(total > 0.0, top + jnp.log(total), LOW)

    @pl.when((split == 0) & (head % (heads // groups) == 0))
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
