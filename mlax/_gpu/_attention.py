"""Attention on Hopper GPUs in Pallas (Mosaic GPU): the forward pass, with the residual of cuDNN's backward pass.

The kernel is warp-specialized: a producer warpgroup copies tiles of keys and values into a pipeline in shared memory,
and each of several consumer warpgroups computes 64 queries. Scores never leave the registers (Algorithm 1 of
https://arxiv.org/abs/2407.08608). Unlike cuDNN's call, this one reads and writes slices of stacks in place.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._gpu._backend import device_obstacle, is_hopper, pallas
from mlax._gpu._export import exported

MEASURED_WIDTH = 64  # of a head
ROWS = 64  # queries of a consumer warpgroup: the rows of a wgmma
LOWEST = -1e30  # in place of minus infinity, whose differences are NaN
SWIZZLE = 128  # bytes: a row of 64 elements
# the fastest of what was measured on an H200, for 1,024 tokens, causal, and for 197
WARPGROUPS = 4  # consumers
KEYS = 64  # of a tile
STAGES = 4  # of the pipeline: tiles of keys and of values
REGISTERS = (112, 24)  # of a thread of a consumer, and of the producer
GROUP = 48  # heads of all batch elements whose keys and values are read together


def prefers_attention_kernel(q: Any, k: Any, v: Any) -> bool:
    """Whether the kernel takes these arrays: heads of the measured width, and as many queries as keys."""
    (_, t, _, width), s = q.shape, k.shape[1]
    return (
        is_hopper()
        and device_obstacle(q, k, v) is None
        and all(x.dtype == jnp.bfloat16 for x in (q, k, v))
        and width == v.shape[-1] == MEASURED_WIDTH
        and t == s
        and t % 2 == 0  # or cuDNN's backward pass takes padded arrays
    )


@exported
def attention_kernel(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g k"],
    *,
    scale: float,
    causal: bool,
    length: int | None = None,
) -> tuple[Float[Array, "b t h k"], Float[Array, "b h t"]]:
    """The attention of q to k and v, and the logsumexp of each row of scores in float32.

    Keys from the index `length` on, if it is given, are padding in all batch elements.
    """
    pl, plgpu = pallas()
    (b, t, h, width), repeats = q.shape, q.shape[2] // k.shape[2]
    s = k.shape[1] if length is None else length  # keys that count
    tile_rows, dtype = ROWS * WARPGROUPS, q.dtype
    tiles, group = -(-t // tile_rows), math.gcd(GROUP, b * h)
    has_mask = causal or s % KEYS != 0
    factor = scale * math.log2(math.e)  # of scores, as exponents of two

    def attend(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, lse_ref: Any) -> None:
        buffers = [_buffer((WARPGROUPS, ROWS), width, dtype), *[_buffer((STAGES, KEYS), width, dtype)] * 2]
        loaded = [plgpu.Barrier(num_barriers=WARPGROUPS), *[plgpu.Barrier(num_barriers=STAGES)] * 2]
        consumed = [plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES)] * 2
        pl.run_scoped(
            lambda *scoped: run(q_ref, k_ref, v_ref, o_ref, lse_ref, *scoped),
            buffers,
            plgpu.SMEM((WARPGROUPS, ROWS), np.float32),
            loaded,
            consumed,
            collective_axes="warpgroup",
        )

    def run(
        q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, lse_ref: Any,
        buffers: Any, lse_buffer: Any, loaded: Any, consumed: Any,
    ) -> None:  # fmt: skip
        batch, head, tile = locate(lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")
        (q_view, q_tiles), (k_view, k_tiles), (v_view, v_tiles) = buffers
        (q_loaded, k_loaded, v_loaded), (k_consumed, v_consumed) = loaded, consumed
        steps = count_tiles((tile + 1) * tile_rows)  # of the block; a warpgroup may need fewer

        @pl.when(warpgroup == WARPGROUPS)
        def copy() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            for index in range(WARPGROUPS):
                rows = pl.ds(tile * tile_rows + index * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], q_view.at[index], q_loaded.at[index])

            def load(step: Any, is_first: bool) -> None:
                slot = step % STAGES
                rows = pl.ds((steps - 1 - step) * KEYS, KEYS)
                pairs = [(k_ref, k_view, k_loaded, k_consumed), (v_ref, v_view, v_loaded, v_consumed)]
                for ref, view, ready, free in pairs:
                    if not is_first:
                        plgpu.barrier_wait(free.at[slot])
                    plgpu.copy_gmem_to_smem(ref.at[batch, rows, head // repeats], view.at[slot], ready.at[slot])

            lax.fori_loop(0, jnp.minimum(STAGES, steps), lambda step, _: load(step, True), None)
            lax.fori_loop(STAGES, jnp.maximum(STAGES, steps), lambda step, _: load(step, False), None)

        @pl.when(warpgroup < WARPGROUPS)
        def compute() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            first_row = tile * tile_rows + warpgroup * ROWS
            own_q = q_tiles.at[warpgroup]
            own_steps = count_tiles(first_row + ROWS)
            # keys that every query of this warpgroup attends to
            unmasked = (jnp.minimum(first_row + 1, s) if causal else s) // KEYS
            skipped = steps - own_steps

            def skip(step: Any, _: None) -> None:
                slot = step % STAGES
                plgpu.barrier_wait(k_loaded.at[slot])
                plgpu.barrier_wait(v_loaded.at[slot])
                plgpu.barrier_arrive(k_consumed.at[slot])
                plgpu.barrier_arrive(v_consumed.at[slot])

            def mask(scores: Any, step: Any) -> Any:
                row, column = (
                    plgpu.broadcasted_iota(np.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
                )
                start = (steps - 1 - step) * KEYS
                if causal:
                    scores = jnp.where(column - row <= first_row - start, scores, LOWEST)
                if s % KEYS:
                    scores = jnp.where(column < s - start, scores, LOWEST)
                return scores

            def exponentiate(scores: Any, top: Any, total: Any) -> Any:
                """Weights of the tile, the new maximum and sum, and what to multiply earlier results by."""
                new_top = jnp.maximum(top, scores.max(1))
                shift = new_top * factor
                decay = jnp.exp2(top * factor - shift)
                weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(shift, scores.shape, [0]))
                return weights.astype(dtype), new_top, total * decay + weights.sum(1), decay

            def rescale(acc: Any, decay: Any) -> Any:
                return acc * lax.broadcast_in_dim(decay, acc.shape, [0])

            def multiply_keys(step: Any, is_masked: bool) -> Any:
                slot = step % STAGES
                plgpu.barrier_wait(k_loaded.at[slot])

                def product(scores_ref: Any) -> Any:
                    plgpu.wgmma(scores_ref, own_q, k_tiles.at[slot].transpose((1, 0)))
                    return scores_ref[...]

                scores = pl.run_scoped(product, plgpu.ACC((ROWS, KEYS), np.float32))
                plgpu.barrier_arrive(k_consumed.at[slot])
                return mask(scores, step) if is_masked else scores

            def multiply_values(step: Any, acc: Any, weights: Any) -> Any:
                slot = step % STAGES
                plgpu.barrier_wait(v_loaded.at[slot])
                acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v_tiles.at[slot]))(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_consumed.at[slot])
                return acc

            def advance(step: Any, carry: Any, is_masked: bool) -> Any:
                """Multiply the keys of this step, and the values of the one before, whose weights are carried."""
                acc, weights, top, total = carry
                slot, last_slot = step % STAGES, (step - 1) % STAGES
                plgpu.barrier_wait(k_loaded.at[slot])
                plgpu.barrier_wait(v_loaded.at[last_slot])

                def products(scores_ref: Any, acc_ref: Any) -> Any:
                    acc_ref[...] = acc
                    # in this order, else the compiler waits for the first product before it prepares the weights
                    plgpu.wgmma(acc_ref, weights, v_tiles.at[last_slot])
                    plgpu.wgmma(scores_ref, own_q, k_tiles.at[slot].transpose((1, 0)))
                    return acc_ref[...], scores_ref[...]

                accumulators = plgpu.ACC((ROWS, KEYS), np.float32), plgpu.ACC((ROWS, width), np.float32)
                acc, scores = pl.run_scoped(products, *accumulators)
                plgpu.barrier_arrive(k_consumed.at[slot])
                plgpu.barrier_arrive(v_consumed.at[last_slot])
                weights, top, total, decay = exponentiate(mask(scores, step) if is_masked else scores, top, total)
                return rescale(acc, decay), weights, top, total

            row_layout = plgpu.Layout.WGMMA.reduce(1)
            top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, np.float32), row_layout)
            total = plgpu.layout_cast(jnp.zeros((ROWS,), np.float32), row_layout)
            acc = plgpu.layout_cast(jnp.zeros((ROWS, width), np.float32), plgpu.Layout.WGMMA)
            plgpu.barrier_wait(q_loaded.at[warpgroup])
            lax.fori_loop(0, skipped, skip, None)
            first_unmasked = steps - jnp.minimum(unmasked, own_steps)
            weights, top, total, _ = exponentiate(multiply_keys(skipped, has_mask), top, total)
            start, carry = skipped + 1, (acc, weights, top, total)
            first_unmasked = jnp.maximum(start, first_unmasked)
            if has_mask:
                carry = lax.fori_loop(start, first_unmasked, lambda i, c: advance(i, c, True), carry)
            acc, weights, top, total = lax.fori_loop(first_unmasked, steps, lambda i, c: advance(i, c, False), carry)
            acc = multiply_values(steps - 1, acc, weights)

            q_tiles[warpgroup] = rescale(acc, 1.0 / total).astype(dtype)
            lse_buffer[warpgroup] = top * scale + jnp.log(total)
            plgpu.commit_smem()
            rows = pl.ds(first_row, ROWS)
            plgpu.copy_smem_to_gmem(q_view.at[warpgroup], o_ref.at[batch, rows, head])
            plgpu.copy_smem_to_gmem(lse_buffer.at[warpgroup], lse_ref.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)

    def count_tiles(rows: Any) -> Any:
        """The tiles of keys that the queries before `rows` attend to."""
        return (jnp.minimum(rows, s) + KEYS - 1) // KEYS if causal else jnp.int32(-(-s // KEYS))

    def locate(block: Any) -> tuple[Any, Any, Any]:
        """The batch element, head and tile of queries of a block: in a group of heads, longest rows of scores first."""
        index, place = block // (group * tiles), block % (group * tiles)
        row = index * group + place % group
        return row // h, row % h, tiles - 1 - place // group

    # A contiguous copy to global memory ends with the array, not with the row, so the rows of lse are whole tiles.
    lse_type = jax.ShapeDtypeStruct((b, h, tiles * tile_rows), np.float32)
    out_types = [jax.ShapeDtypeStruct(q.shape, dtype), lse_type]
    o, lse = plgpu.kernel(
        attend,
        out_type=out_types,
        grid=(b * h * tiles,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
    )(q, k, v)
    return o, lse[:, :, :t]


def _buffer(rows: tuple[int, ...], width: int, dtype: Any) -> Any:
    """Shared memory for tiles of rows, as the copies and as the tensor cores address it.

    A row of 64 elements makes both the same bytes. The copies' view has no tiles of 8 rows, so that the number of rows
    in global memory need not be a multiple of 8.
    """
    _, plgpu = pallas()
    swizzle = plgpu.SwizzleTransform(SWIZZLE)
    tiled = plgpu.SMEM((*rows, width), dtype, transforms=(plgpu.TilingTransform((8, SWIZZLE // 2)), swizzle))
    return plgpu.RefUnion(plgpu.SMEM((*rows, width), dtype, transforms=(swizzle,)), tiled)
