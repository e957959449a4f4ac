"""Kernels for one token of a transformer, in Pallas: what is around the products, and attention to a KV cache.

A token is a chain of short kernels, whose starts cost more than their work. XLA takes two kernels for a norm, six for
attention to a cache, and another to sum a split-K product. `sum_and_norm`, `decode_attention` and `rows_linear` do all
of that in one kernel each, for any number of rows, and attention reads only the slots that are filled. For one row
there is `fused_linear`, a product with the norm before it and the residual after it.

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

from mlax._gpu._export import KernelCall, read_or_export

# What is tuned here was measured on an H200 (docs/design/zoo.md).
COLUMNS = 8  # of the product of one row that a program computes
PIECE = 64  # of that row, at most, that a tile reads: fewer than threads, or Triton passes it by shared memory
ROW_TILE = {"slots": 128, "num_warps": 4, "num_stages": 3}  # of the cache that a program reads at once, with one row
TILE = {"slots": 64, "num_warps": 2, "num_stages": 2}  # with many
QUERIES = 16  # rows of a tensor core: all are the one query
TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 64, 32, 128  # of a product of many rows
TILES = 96  # of such a product, at least, by split-K if its depth allows: for most of the multiprocessors
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


def rows_linear(
    x: Any, kernel: Any, bias: Any = None, *, splits: int = 1, gelu: bool = False, interpret: bool = False
) -> Any:
    """`gelu(x @ kernel + bias)` in one kernel, of x (b, d) and the kernel (d, f), in the dtype of x.

    With several `splits` of d (split-K), it gives their partial sums (splits, b, f) in float32, without bias and GELU;
    `fastest_split` is how many are fastest. b is a multiple of 16, f of 32, and d of 16 in each split.
    """
    if splits > 1 and (bias is not None or gelu):
        raise ValueError(
            f"rows_linear: with splits={splits} whatever reduces the partial sums adds the bias and applies GELU."
        )
    return _call(_rows_linear, (x, kernel, bias), splits=splits, gelu=gelu, interpret=interpret)


def fastest_split(rows: int, d: int, f: int) -> int:
    """The splits of d for a product of few rows (split-K), so that it has tiles for a whole GPU."""
    tiles, splits = -(-rows // TILE_ROWS) * (f // TILE_COLUMNS), 1
    while splits * tiles < TILES and d % (2 * splits * 64) == 0:
        splits *= 2
    return splits


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
    interpret: bool = False,
) -> tuple[Any, Any, Any]:
    """Attention of one token of each row to itself and to the `count` tokens before it: (y, keys, values).

    Its queries, keys and values are qkv (b, (h + 2 g) k), or the partial sums (p, b, (h + 2 g) k) of a product with
    its `bias`. y is (b, h k), and the caches (b, g, s, k) are updated in place, at the slot `count` (b,), or (1,) for
    all rows. Only slots that are filled are read. A token without a slot gives NaN, and is not stored. The softmax is
    in float32.
    """
    return _call(_decode_attention, (qkv, keys, values, count, bias), heads=heads, scale=scale, interpret=interpret)


def _call(kernel: Callable[..., Any], arrays: Any, **static: Any) -> Any:
    if static["interpret"]:
        return kernel(arrays, **static)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The Pallas Triton backend", category=DeprecationWarning)
        call = KernelCall.describe(kernel, (arrays,), static)
        program = read_or_export(call, call.find_record(), TRITON_CALL)
    return program.call(*jax.tree.leaves(arrays))


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


def _rows_linear(arrays: Any, *, splits: int, gelu: bool, interpret: bool) -> Any:
    x, kernel, _ = arrays
    (b, d), f = x.shape, kernel.shape[1]
    rows, depth = _largest_power(b, TILE_ROWS), _largest_power(d // splits, TILE_DEPTH)
    shape = jax.ShapeDtypeStruct((b, f), x.dtype) if splits == 1 else jax.ShapeDtypeStruct((splits, b, f), np.float32)
    body = functools.partial(_product_body, splits=splits, rows=rows, depth=depth, gelu=gelu)
    grid = (b // rows, f // TILE_COLUMNS, splits)
    call = _pallas_call("rows_linear", _with_optional(body, arrays), shape, grid, interpret, num_stages=4)
    return call(*jax.tree.leaves(arrays))


def _product_body(refs: Any, y_ref: Any, *, splits: int, rows: int, depth: int, gelu: bool) -> None:
    """A tile of a product, or of one of its splits, by tensor cores."""
    from jax.experimental import pallas as pl

    x_ref, kernel_ref, bias_ref = refs
    split, size = pl.program_id(2), x_ref.shape[1] // splits
    own, columns = pl.ds(pl.program_id(0) * rows, rows), pl.ds(pl.program_id(1) * TILE_COLUMNS, TILE_COLUMNS)

    def add(index: Any, y: Any) -> Any:
        inner = pl.ds(split * size + index * depth, depth)
        return y + jnp.dot(x_ref[own, inner], kernel_ref[inner, columns], preferred_element_type=np.float32)

    y = lax.fori_loop(0, size // depth, add, jnp.zeros((rows, TILE_COLUMNS), np.float32))
    y = y if bias_ref is None else y + bias_ref[columns].astype(np.float32)[None]
    y = _gelu(y) if gelu else y
    y_ref[(own, columns) if splits == 1 else (split, own, columns)] = y.astype(y_ref.dtype)


def _fused_linear(arrays: Any, *, eps: float, gelu: bool, interpret: bool) -> Any:
    x, kernel, *others = arrays
    f, columns = kernel.shape[0], _largest_power(kernel.shape[0], COLUMNS)
    arrays = (x[0], kernel, *others)
    body = functools.partial(_linear_body, columns=columns, eps=eps, gelu=gelu, interpret=interpret)
    shape = jax.ShapeDtypeStruct((1, f), x.dtype)
    call = _pallas_call("fused_linear", _with_optional(body, arrays), shape, (f // columns,), interpret)
    return call(*jax.tree.leaves(arrays))


def _linear_body(refs: Any, y_ref: Any, *, columns: int, eps: float, gelu: bool, interpret: bool) -> None:
    """A tile of columns of the product, as sums of products: a tensor core needs 16 rows, and there is one."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    x_ref, kernel_ref, bias_ref, norm, residual_ref = refs
    d, outputs = kernel_ref.shape[1], pl.ds(pl.program_id(0) * columns, columns)
    size = _largest_power(d, PIECE)
    pieces = [pl.ds(start, size) for start in range(0, d, size)]
    tiles = [kernel_ref[outputs, piece] for piece in pieces]  # first: they arrive while the norm is computed
    if norm is None and not interpret:
        triton.debug_barrier()  # so that all are on their way; else the compiler loads them one after another
    mean, factor = (0.0, 1.0) if norm is None else _moments(_load_row(x_ref, d), d, eps)
    y = jnp.zeros((columns, size), np.float32)
    for tile, piece in zip(tiles, pieces, strict=True):
        x = x_ref[piece].astype(np.float32)
        if norm is not None:
            scale, shift = (ref[piece].astype(np.float32) for ref in norm)
            x = (x - mean) * factor * scale + shift
        y += tile.astype(np.float32) * x.astype(x_ref.dtype).astype(np.float32)[None]
    y = jnp.sum(y, axis=1) + bias_ref[outputs].astype(np.float32)
    y = _gelu(y) if gelu else y
    y = y if residual_ref is None else y + residual_ref[0, outputs].astype(np.float32)
    y_ref[0, outputs] = y.astype(y_ref.dtype)


def _load_row(ref: Any, d: int, *index: Any) -> Any:
    """A row of d elements in float32, padded with zeros to a power of two."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    columns = jnp.arange(pl.next_power_of_2(d))  # not a slice, which JAX 0.12 refuses beyond the end
    mask = None if columns.size == d else columns < d
    return triton.load(ref.at[(*index, columns)], mask=mask, other=None if mask is None else 0).astype(np.float32)


def _moments(x: Any, d: int, eps: float) -> tuple[Any, Any]:
    """The mean of a row of d elements, padded with zeros, and its inverse deviation."""
    mean = jnp.sum(x) / d
    centered = jnp.where(jnp.arange(x.size) < d, x - mean, 0.0)
    return mean, lax.rsqrt(jnp.sum(centered * centered) / d + eps)


def _sum_and_norm(arrays: Any, *, eps: float, interpret: bool) -> Any:
    x, scale, shift, partial, bias = arrays
    arrays = (x, scale, shift, None if partial is None else lax.collapse(partial, 0, 2), bias)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    body = _with_optional(functools.partial(_norm_body, eps=eps), arrays)
    shapes = [shape] if partial is None else [shape, shape]
    call = _pallas_call("sum_and_norm", body, shapes, x.shape[:1], interpret, num_warps=8)
    results = call(*jax.tree.leaves(arrays))
    return (x, results[0]) if partial is None else tuple(results)


def _norm_body(refs: Any, *outputs: Any, eps: float) -> None:
    """One row, in the registers of a program."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    x_ref, scale_ref, shift_ref, partial_ref, bias_ref = refs
    (rows, d), row = x_ref.shape, pl.program_id(0)

    def store(ref: Any, value: Any) -> None:
        columns = jnp.arange(value.size)
        triton.store(ref.at[row, columns], value.astype(ref.dtype), mask=None if columns.size == d else columns < d)

    x, scale, shift = _load_row(x_ref, d, row), _load_row(scale_ref, d), _load_row(shift_ref, d)
    if partial_ref is not None:
        partial = [_load_row(partial_ref, d, start + row) for start in range(0, partial_ref.shape[0], rows)]
        x = (x + (_load_row(bias_ref, d) + sum(partial))).astype(x_ref.dtype).astype(np.float32)
        store(outputs[0], x)
    mean, factor = _moments(x, d, eps)
    store(outputs[-1], (x - mean) * factor * scale + shift)


def _decode_attention(arrays: Any, *, heads: int, scale: float, interpret: bool) -> Any:
    _, keys, values, *_ = arrays
    b, _, _, width = keys.shape
    tile = ROW_TILE if b == 1 else TILE
    y = jax.ShapeDtypeStruct((b, heads * width), keys.dtype)
    caches = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (keys, values)]
    body = _with_optional(functools.partial(_attention_body, heads=heads, scale=scale, slots=tile["slots"]), arrays)
    options = {name: tile[name] for name in ("num_warps", "num_stages")}
    call = _pallas_call("decode_attention", body, [y, *caches], (b, heads), interpret, {1: 1, 2: 2}, **options)
    return tuple(call(*jax.tree.leaves(arrays)))


def _attention_body(
    refs: Any, y_ref: Any, new_keys_ref: Any, new_values_ref: Any, *, heads: int, scale: float, slots: int
) -> None:
    """One head of one row. Tensor cores compute rows of 16, so that the query is there 16 times."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    qkv_ref, keys_ref, values_ref, count_ref, bias_ref = refs
    _, groups, capacity, width = keys_ref.shape
    row, head = pl.program_id(0), pl.program_id(1)
    group = head // (heads // groups)
    count = count_ref[row if count_ref.shape[0] > 1 else 0]

    def project(at: Any) -> Any:
        columns = pl.ds(at * width, width)
        if bias_ref is None:
            return qkv_ref[row, columns]
        partial = sum(qkv_ref[split, row, columns] for split in range(qkv_ref.shape[0]))
        return (partial + bias_ref[columns].astype(np.float32)).astype(keys_ref.dtype)

    query, key, value = (project(at) for at in (head, heads + group, heads + groups + group))
    value = jnp.where(count < capacity, value, jnp.full_like(value, jnp.nan))
    queries, filled = jnp.broadcast_to(query[None], (QUERIES, width)), jnp.minimum(count, capacity)
    slot_numbers = jnp.arange(slots)

    def attend(i: Any, carry: Any) -> Any:
        top, total, y = carry
        is_filled = i * slots + slot_numbers < filled

        def load(ref: Any) -> Any:
            tile = ref.at[row, group, pl.ds(i * slots, slots), :]
            return tile[...] if capacity % slots == 0 else triton.load(tile, mask=is_filled[:, None], other=0)

        keys, values = load(keys_ref), load(values_ref)  # (s, k)
        scores = jnp.dot(queries, keys.T, preferred_element_type=np.float32) * scale
        scores = jnp.where(is_filled[None], scores, LOW)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        old, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
        added = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=np.float32)
        return new_top, total * old + jnp.sum(weights, axis=1), y * old[:, None] + added

    own = jnp.sum(query.astype(np.float32) * key.astype(np.float32)) * scale  # the token attends to itself, too
    ones = jnp.ones(QUERIES, np.float32)
    start = (own * ones, ones, value.astype(np.float32)[None] * ones[:, None])
    _, total, y = lax.fori_loop(0, (filled + slots - 1) // slots, attend, start)
    y = jnp.sum(y / total[:, None], axis=0) / QUERIES
    y_ref[row, pl.ds(head * width, width)] = y.astype(y_ref.dtype)

    @pl.when((head % (heads // groups) == 0) & (count < capacity))
    def _() -> None:
        new_keys_ref[row, group, count, :] = key.astype(new_keys_ref.dtype)
        new_values_ref[row, group, count, :] = value.astype(new_values_ref.dtype)


def _gelu(x: Any) -> Any:
    """`jax.nn.gelu`, whose tanh is a sigmoid here, which Triton has."""
    return x * jax.nn.sigmoid(2 * np.sqrt(2 / np.pi).astype(np.float32) * (x + 0.044715 * x * x * x))


def _largest_power(size: int, most: int) -> int:
    """The largest power of two that divides a size, up to `most`."""
    return min(size & -size, most)
