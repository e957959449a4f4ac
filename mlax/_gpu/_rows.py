"""Kernels over rows, in Pallas (Mosaic GPU): norms, GELU and the cross-entropy in one pass over memory.

XLA takes several passes. A block is one warpgroup: it reads a row into its registers, reduces it, writes what depends
on the result, and goes on to another row.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Integer

from mlax._gpu._backend import THREADS, kernel_obstacle, multiprocessors, pallas, prefers_kernels
from mlax._gpu._export import exported

MAX_WIDTH = 4096  # elements of a row that fit in the registers of a warpgroup
MAX_RESIDUAL_WIDTH = 3072  # of the gradient of a residual norm, which holds more rows
FORWARD_BLOCKS, BACKWARD_BLOCKS = 16, 8  # for each multiprocessor; each block of a backward pass writes partial sums
CHUNK = 1024  # elements of a long row that are read at a time: 16 bytes for each thread
GELU_BLOCKS = 5  # for each multiprocessor, and for each chunk of columns
GELU_SCALE, GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # of x + cube * x ** 3, in the form by a sigmoid
ERFC_SCALE, HALF_ERFC = 0.3275911, (0.5307027145, -0.7265760135, 0.7107068705, -0.142248368, 0.127414796)
LOG2_E = math.log2(math.e)
LOWEST = -1e30  # in place of minus infinity, whose differences are NaN
FAR = 60.0  # difference of logits up to which sums of exponentials are in the range of float32


def prefers_norm_kernel(x: Any, scale: Any, axes: tuple[int, ...], accum_dtype: Any) -> bool:
    """Whether to compute a layer or RMS norm by a kernel (benchmarks/gpu_kernels.py)."""
    is_row_norm = axes == (x.ndim - 1,) and scale is not None and scale.ndim == 1 and x.shape[-1] <= MAX_WIDTH
    return is_row_norm and kernel_obstacle(x, accum_dtype) is None


def prefers_residual_norm_kernel(x: Any, scale: Any, axes: tuple[int, ...], accum_dtype: Any) -> bool:
    """Whether a kernel computes all gradients of a norm before a residual branch."""
    return x.shape[-1] <= MAX_RESIDUAL_WIDTH and prefers_norm_kernel(x, scale, axes, accum_dtype)


def prefers_gelu_kernel(x: Any) -> bool:
    """Whether to add a bias and apply GELU by a kernel (benchmarks/gpu_kernels.py); XLA, too, fuses them in float32."""
    return prefers_kernels(x)


def prefers_loss_kernel(logits: Any, classes: int, accum_dtype: Any) -> bool:
    """Whether to reduce the rows of the logits of a cross-entropy by a kernel (benchmarks/gpu_kernels.py)."""
    return classes >= CHUNK and kernel_obstacle(logits, accum_dtype) is None


def norm_kernel(
    x: Float[Array, "*n d"], scale: Float[Array, " d"], shift: Float[Array, " d"] | None, *, eps: float, centered: bool
) -> tuple[Array, Array | None, Array]:
    """Layer norm, or RMS norm if not `centered`: y, the mean of each row, if it is, and the inverse deviation.

    These two are (..., 1) in float32.
    """
    return _normalize(x, scale, shift, None, eps=eps, centered=centered)[1:]


def residual_norm_kernel(
    x: Float[Array, "*n d"],
    scale: Float[Array, " d"],
    shift: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    *,
    eps: float,
    centered: bool,
) -> tuple[Array, Array, Array | None, Array]:
    """`x + bias`, which is x itself without a bias, and the results of `norm_kernel`, in one pass over x."""
    stream, *results = _normalize(x, scale, shift, bias, eps=eps, centered=centered)
    return x if stream is None else stream, *results


@exported
def _normalize(x: Any, scale: Any, shift: Any, bias: Any, *, eps: float, centered: bool) -> tuple[Any, Any, Any, Any]:
    """`x + bias`, if there is a bias, y, the mean if `centered`, and the inverse deviation."""
    rows, width, blocks = x.size // x.shape[-1], x.shape[-1], FORWARD_BLOCKS * multiprocessors()
    load, has_stream = _row_loader(width), bias is not None

    def norm(x_ref: Any, scale_ref: Any, *refs: Any) -> None:
        is_present = (shift is not None, has_stream, has_stream, True, centered, True)
        shift_ref, bias_ref, stream_ref, y_ref, mean_ref, factor_ref = _fill_gaps(refs, *is_present)
        wide_scale = load(scale_ref)
        wide_shift, wide_bias = (None if ref is None else load(ref) for ref in (shift_ref, bias_ref))

        def normalize(row: Any, _: None) -> None:
            wide = load(x_ref.at[row])
            if has_stream:
                stream_ref[row] = (wide + wide_bias).astype(x.dtype)
            if centered:
                mean_ref[row] = mean = jnp.sum(wide) / width
                wide = wide - mean
            factor_ref[row] = factor = lax.rsqrt(jnp.sum(wide * wide) / width + eps)
            y = wide * factor * wide_scale
            y_ref[row] = (y if wide_shift is None else y + wide_shift).astype(x.dtype)

        _for_each_row(normalize, rows, blocks, None)

    row_type, statistic = jax.ShapeDtypeStruct((rows, width), x.dtype), jax.ShapeDtypeStruct((rows,), np.float32)
    vectors = [each for each in (scale, shift, bias) if each is not None]
    out_types = [row_type] * (1 + has_stream) + [statistic] * (1 + centered)
    results = _launch(norm, out_types, (blocks,), x.reshape(rows, width), *vectors)
    stream, y, mean, factor = _fill_gaps(results, has_stream, True, centered, True)
    mean, factor = (None if each is None else each.reshape(*x.shape[:-1], 1) for each in (mean, factor))
    return None if stream is None else stream.reshape(x.shape), y.reshape(x.shape), mean, factor


@exported
def norm_gradient_kernel(
    x: Float[Array, "*n d"],
    mean: Float[Array, "*n 1"] | None,
    factor: Float[Array, "*n 1"],
    scale: Float[Array, " d"],
    dy: Float[Array, "*n d"],
    stream_grad: Float[Array, "*n d"] | None = None,
    *,
    has_shift: bool,
) -> tuple[Float[Array, "*n d"], Float[Array, "k d"]]:
    """The gradient of `norm_kernel` with respect to x, and, in float32, to scale and to shift, if it has one, as rows.

    With the cotangent of x that goes around the norm, the first includes it, and its sum over tokens is the last row.
    An RMS norm has no mean.
    """
    _, plgpu = pallas()
    rows, width, has_stream = x.size // x.shape[-1], x.shape[-1], stream_grad is not None
    load, count = _row_loader(width), 1 + has_shift + has_stream
    # as many as run at once: a multiprocessor has 512 registers for each thread of a block, which takes about so many
    resident = 512 // (24 + width // 16) if has_stream else BACKWARD_BLOCKS
    blocks = min(resident, BACKWARD_BLOCKS) * multiprocessors()

    def norm_gradient(x_ref: Any, dy_ref: Any, scale_ref: Any, factor_ref: Any, *refs: Any) -> None:
        mean_ref, stream_ref, dx_ref, sums_ref = _fill_gaps(refs, mean is not None, has_stream, True, True)
        wide_scale = load(scale_ref)

        def differentiate(row: Any, sums: Any) -> Any:
            wide, wide_dy, factor = load(x_ref.at[row]), load(dy_ref.at[row]), factor_ref[row]
            stream = [load(stream_ref.at[row])] if has_stream else []
            y = (wide if mean is None else wide - mean_ref[row]) * factor
            dot = wide_dy * wide_scale
            dx = dot - y * (jnp.sum(dot * y) / width)
            dx = factor * (dx if mean is None else dx - jnp.sum(dot) / width)
            dx_ref[row] = (dx + stream[0] if has_stream else dx).astype(x.dtype)
            terms = [wide_dy * y, *[wide_dy] * has_shift, *stream]
            return tuple(total + term for total, term in zip(sums, terms, strict=True))

        zeros = plgpu.layout_cast(jnp.zeros((width,), np.float32), _row_layout(width))
        sums = _for_each_row(differentiate, rows, blocks, (zeros,) * count)
        for index, total in enumerate(sums):
            sums_ref[lax.axis_index("block"), index] = total

    out_types = [jax.ShapeDtypeStruct((rows, width), x.dtype), jax.ShapeDtypeStruct((blocks, count, width), np.float32)]
    arrays = [x.reshape(rows, width), dy.reshape(rows, width), scale, factor.reshape(rows)]
    arrays += [] if mean is None else [mean.reshape(rows)]
    arrays += [] if stream_grad is None else [stream_grad.reshape(rows, width)]
    dx, sums = _launch(norm_gradient, out_types, (blocks,), *arrays)
    return dx.reshape(x.shape), sums.sum(0)


@exported
def gelu_kernel(x: Float[Array, "*n d"], bias: Float[Array, " d"], *, approximate: bool) -> Float[Array, "*n d"]:
    """`gelu(x + bias)`."""
    rows, width, blocks, size = x.size // x.shape[-1], x.shape[-1], FORWARD_BLOCKS * multiprocessors(), _chunk_size(x)
    pl, _ = pallas()
    load = _row_loader(size)

    def bias_gelu(x_ref: Any, bias_ref: Any, y_ref: Any) -> None:
        columns = pl.ds(lax.axis_index("column") * size, size)
        wide_bias = load(bias_ref.at[columns])

        def activate(row: Any, _: None) -> None:
            wide = load(x_ref.at[row, columns]) + wide_bias
            y_ref[row, columns] = gelu_of(wide, approximate).astype(x.dtype)

        _for_each_row(activate, rows, blocks, None)

    out_type = jax.ShapeDtypeStruct((rows, width), x.dtype)
    (y,) = _launch(bias_gelu, [out_type], (blocks, width // size), x.reshape(rows, width), bias)
    return y.reshape(x.shape)


@exported
def gelu_gradient_kernel(
    x: Float[Array, "*n d"], bias: Float[Array, " d"], dy: Float[Array, "*n d"], *, approximate: bool
) -> tuple[Float[Array, "*n d"], Float[Array, " d"]]:
    """The gradients of `gelu_kernel` with respect to x, and to the bias in float32."""
    rows, width, blocks, size = x.size // x.shape[-1], x.shape[-1], GELU_BLOCKS * multiprocessors(), _chunk_size(x)
    pl, plgpu = pallas()
    load = _row_loader(size)

    def bias_gelu_gradient(x_ref: Any, bias_ref: Any, dy_ref: Any, dx_ref: Any, dbias_ref: Any) -> None:
        columns = pl.ds(lax.axis_index("column") * size, size)
        wide_bias = load(bias_ref.at[columns])

        def differentiate(row: Any, total: Any) -> Any:
            wide = load(x_ref.at[row, columns]) + wide_bias
            dx = load(dy_ref.at[row, columns]) * gelu_slope_of(wide, approximate)
            dx_ref[row, columns] = dx.astype(x.dtype)
            return total + dx

        zeros = plgpu.layout_cast(jnp.zeros((size,), np.float32), _row_layout(size))
        dbias_ref[lax.axis_index("block"), columns] = _for_each_row(differentiate, rows, blocks, zeros)

    out_types = [jax.ShapeDtypeStruct((rows, width), x.dtype), jax.ShapeDtypeStruct((blocks, width), np.float32)]
    flat = x.reshape(rows, width), bias, dy.reshape(rows, width)
    dx, dbias = _launch(bias_gelu_gradient, out_types, (blocks, width // size), *flat)
    return dx.reshape(x.shape), dbias.sum(0)


def gelu_of(x: Any, approximate: bool) -> Any:
    """GELU of float32, in a kernel."""
    cdf, _ = _gelu_cdf(x, approximate)
    return x * cdf


def gelu_slope_of(x: Any, approximate: bool) -> Any:
    """The derivative of GELU of float32, in a kernel."""
    cdf, exponential = _gelu_cdf(x, approximate)
    if approximate:
        slope = GELU_SCALE * (3 * GELU_CUBE) * (x * x) + GELU_SCALE
        return x * (cdf - cdf * cdf) * slope + cdf  # in this order, or it is infinity times 0 for large x
    return (x * (1 / math.sqrt(2 * math.pi))) * exponential + cdf


def _gelu_cdf(x: Any, approximate: bool) -> tuple[Any, Any]:
    """GELU over `x`, the distribution function of the normal distribution or its approximation, and an exponential.

    The reciprocals are squares of `rsqrt`, one instruction. The exact form is 7.1.26 of Abramowitz and Stegun, Handbook
    of Mathematical Functions, whose absolute error is 1e-7; the exponential is that of its density.
    """
    if approximate:
        exponential = jnp.exp2(x * ((x * x) * (-LOG2_E * GELU_SCALE * GELU_CUBE) + (-LOG2_E * GELU_SCALE)))
        root = lax.rsqrt(1.0 + exponential)
        return root * root, exponential
    exponential = jnp.exp2((x * x) * (-0.5 * LOG2_E))
    root = lax.rsqrt(jnp.abs(x) * (ERFC_SCALE * math.sqrt(0.5)) + 1.0)
    t = root * root
    tail = functools.reduce(lambda total, factor: total * t + factor, HALF_ERFC) * t * exponential
    return jnp.where(x >= 0.0, 1.0 - tail, tail), exponential


@exported
def softmax_statistics_kernel(
    logits: Float[Array, "n v"], labels: Integer[Array, " n"], *, classes: int
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The largest logit of each row, and the sum of `exp(logit - largest)` but for the label's, in float32.

    Columns from `classes` on do not count.
    """
    _, plgpu = pallas()
    chunks, read_columns, layout = classes // CHUNK, _column_reader(classes), _row_layout(CHUNK)

    def cross_entropy(logits_ref: Any, labels_ref: Any, top_ref: Any, others_ref: Any) -> None:
        row = lax.axis_index("block")
        label = labels_ref[row]

        def read(start: Any, size: int) -> tuple[Any, Any]:
            """The logits, and 1 for each other class than the label."""
            x, column, is_class = read_columns(logits_ref.at[row], start, size)
            is_other = column != label
            if size == CHUNK:  # of classes alone
                return jnp.maximum(x, LOWEST), jnp.where(is_other, 1.0, 0.0)
            return jnp.where(is_class, jnp.maximum(x, LOWEST), LOWEST), jnp.where(is_class & is_other, 1.0, 0.0)

        def add_chunk(index: Any, sums: Any, reference: Any) -> Any:
            """The largest logit and the sum of exponentials of each column of the chunks so far."""
            x, is_other = read(index * CHUNK, CHUNK)
            return jnp.maximum(sums[0], x), sums[1] + is_other * jnp.exp(x - reference)

        def add_rest(top: Any, others: Any, reference: Any) -> tuple[Any, Any]:
            for start in range(chunks * CHUNK, classes, THREADS):
                x, is_other = read(start, THREADS)
                top, others = jnp.maximum(top, jnp.max(x)), others + jnp.sum(is_other * jnp.exp(x - reference))
            return top, others

        def add_all(count: Any, reference: Any) -> tuple[Any, Any]:
            start = tuple(plgpu.layout_cast(jnp.full(CHUNK, value, np.float32), layout) for value in (LOWEST, 0.0))
            tops, sums = lax.fori_loop(0, count, lambda index, sums: add_chunk(index, sums, reference), start)
            return add_rest(jnp.max(tops), jnp.sum(sums), reference)

        # exponentials relative to the first chunk's largest logit, not to a running maximum: half as many of them
        reference = jnp.max(read(0, CHUNK)[0])
        top, others = add_all(chunks, reference)
        is_far = top - reference > FAR  # then the sum may have overflowed, and is computed again
        _, again = add_all(jnp.where(is_far, chunks, 0), top)
        top_ref[row], others_ref[row] = top, jnp.where(is_far, again, others * jnp.exp(reference - top))

    rows = logits.shape[0]
    statistic = jax.ShapeDtypeStruct((rows,), np.float32)
    top, others = _launch(cross_entropy, [statistic, statistic], (rows,), logits, labels)
    return top, others


@exported
def softmax_gradient_kernel(
    logits: Float[Array, "n v"],
    labels: Integer[Array, " n"],
    is_valid: Bool[Array, " n"] | None,
    top: Float[Array, " n"],
    log_sum: Float[Array, " n"],
    factors: tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]],
    *,
    classes: int,
) -> Float[Array, "n v"]:
    """`a * exp(logits - top - log_sum) - b - c * is_label`, for factors (a, b, c), in place of the logits.

    It is 0 in columns from `classes` on, and in rows that are not valid.
    """
    chunks, read_columns = logits.shape[-1] // CHUNK, _column_reader(classes)

    def cross_entropy_gradient(logits_ref: Any, labels_ref: Any, top_ref: Any, sum_ref: Any, *refs: Any) -> None:
        row = lax.axis_index("block")
        *factor_refs, valid_ref = _fill_gaps(refs, True, True, True, is_valid is not None)
        by_softmax, by_class, by_label = (ref[row] for ref in factor_refs)
        label, top, log_sum = labels_ref[row], top_ref[row], sum_ref[row]

        def replace(start: Any, size: int) -> None:
            pl, _ = pallas()
            x, column, is_class = read_columns(logits_ref.at[row], start, size)
            gradient = by_softmax * jnp.exp((x - top) - log_sum) - by_class
            gradient = jnp.where(column == label, gradient - by_label, gradient)
            keep = is_class if valid_ref is None else is_class & (valid_ref[row] != 0)
            logits_ref[row, pl.ds(start, size)] = jnp.where(keep, gradient, 0.0).astype(logits.dtype)

        lax.fori_loop(0, chunks, lambda index, _: replace(index * CHUNK, CHUNK), None)
        for start in range(chunks * CHUNK, logits.shape[-1], THREADS):
            replace(start, THREADS)

    reference = jax.new_ref(logits)
    valid = [] if is_valid is None else [is_valid.astype(np.int32)]
    _launch(cross_entropy_gradient, [], (logits.shape[0],), reference, labels, top, log_sum, *factors, *valid)
    return jax.freeze(reference)


def _launch(body: Callable[..., None], out_types: list[Any], grid: tuple[int, ...], *arrays: Any) -> list[Array]:
    """Run `body` with references to the arrays and to the results, in global memory."""
    _, plgpu = pallas()
    # no memory is both read and written, so that a block needs no barriers but those of its reductions
    parameters = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
    )
    names = ("block", "column")[: len(grid)]
    return plgpu.kernel(body, out_type=out_types, grid=grid, grid_names=names, compiler_params=parameters)(*arrays)


def _chunk_size(x: Array) -> int:
    """The columns of a wide row that a block reads."""
    return next(size for size in (CHUNK, CHUNK // 2, CHUNK // 4, THREADS) if x.shape[-1] % size == 0)


def _row_layout(width: int) -> Any:
    """A row over the threads of the block, with as many neighboring elements for each as it can read at once."""
    _, plgpu = pallas()
    neighbors = next(size for size in (8, 4, 2, 1) if width % (size * THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((width,), vec_size=neighbors)


def _row_loader(width: int) -> Callable[[Any], Any]:
    """A function that reads a row of so many elements into the registers of the block, in float32."""
    _, plgpu = pallas()
    layout = _row_layout(width)
    return lambda ref: plgpu.load(ref, layout=layout).astype(np.float32)


def _column_reader(classes: int) -> Callable[[Any, Any, int], tuple[Any, Any, Any]]:
    """A function from a row, a start and a size to its elements, their columns, and which of these are classes."""
    pl, plgpu = pallas()

    def read(row_ref: Any, start: Any, size: int) -> tuple[Any, Any, Any]:
        column = start + plgpu.broadcasted_iota(np.int32, (size,), 0, layout=_row_layout(size))
        return _row_loader(size)(row_ref.at[pl.ds(start, size)]), column, column < classes

    return read


def _for_each_row(function: Callable[[Any, Any], Any], rows: int, blocks: int, carry: Any) -> Any:
    """`carry = function(row, carry)` for the rows of this block: every one of `blocks`."""
    block = lax.axis_index("block")
    # `//` takes the sign of a number, for which Mosaic GPU runs ptxas once more while the kernel is lowered, 6 ms
    count = lax.div(rows - block + blocks - 1, blocks)
    return lax.fori_loop(0, count, lambda index, carry: function(block + index * blocks, carry), carry)


def _fill_gaps(refs: Sequence[Any], *is_present: bool) -> list[Any]:
    """The references in order, with None for each that is not present."""
    remaining = iter(refs)
    return [next(remaining) if present else None for present in is_present]
