"""Matrix products with an epilogue, as kernels in Pallas (Mosaic GPU): a bias and GELU, or the gradient of GELU.

The kernels are warp-specialized, with the ping-pong schedule of CUTLASS: a producer warpgroup copies tiles of both
operands into a pipeline in shared memory, and of two consumer warpgroups one multiplies while the other computes the
epilogue of its own tile of the result.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._gpu._backend import is_hopper, multiprocessors, pallas, prefers_kernels
from mlax._gpu._export import exported
from mlax._gpu._rows import gelu_of, gelu_slope_of

TILE, TILE_K = 128, 64  # rows and columns of a tile of the result, and of k that one step multiplies
PATCH = 64  # rows that an epilogue writes at a time
PATCHES = TILE // PATCH
STAGES = 5  # of the pipeline
SWIZZLE = 128  # bytes
MEASURED_SHAPE, MIN_ROWS = (768, 3072), 1 << 15  # what cuBLAS and kernels over rows were measured to be slower for


def prefers_mlp_kernels(x: Any, up: Any, down: Any) -> bool:
    """Whether `gelu(x @ up + bias) @ down` and its gradients are faster by kernels of this file."""
    is_measured = (up.shape, down.shape) == (MEASURED_SHAPE, MEASURED_SHAPE[::-1])
    if not is_measured or not is_hopper() or not prefers_kernels(x):
        return False
    rows = x.size // x.shape[-1]
    return rows >= MIN_ROWS and rows % TILE == 0


@exported
def gelu_product_kernel(
    x: Float[Array, "r d"], kernel: Float[Array, "d f"], bias: Float[Array, " f"], *, approximate: bool
) -> tuple[Float[Array, "r f"], Float[Array, "r f"]]:
    """`h = x @ kernel + bias`, and `gelu(h)`, computed before h is rounded."""
    h, y = _biased_product("product_gelu", x, kernel, bias, [lambda h: h, lambda h: gelu_of(h, approximate)])
    return h, y


@exported
def biased_product_kernel(
    x: Float[Array, "r d"], kernel: Float[Array, "d f"], bias: Float[Array, " f"]
) -> Float[Array, "r f"]:
    """`x @ kernel + bias`. Unlike that of cuBLAS with a bias, its result may be a slice of a stack."""
    (y,) = _biased_product("biased_product", x, kernel, bias, [lambda y: y])
    return y


def _biased_product(
    name: str, x: Array, kernel: Array, bias: Array, functions: list[Callable[[Any], Any]]
) -> list[Array]:
    """Each function of `x @ kernel + bias`, in the dtype of x."""
    pl, plgpu = pallas()
    (rows, width), features = x.shape, kernel.shape[1]

    def prefetch(refs: Any, tile: _Tile, buffers: Any, loaded: Any) -> None:
        plgpu.copy_gmem_to_smem(refs[2].at[tile.columns], buffers[0], loaded)

    def epilogue(refs: Any, tile: _Tile, total: Any, buffers: Any) -> None:
        bias_buffer, *patches = buffers
        layout = plgpu.Layout.WGMMA.reduce(0)
        bias = plgpu.load(bias_buffer, layout=layout, optimized=False).astype(np.float32)
        for start in range(0, TILE, PATCH):
            wide = total[start : start + PATCH] + lax.broadcast_in_dim(bias, (PATCH, TILE), [1])
            values = [function(wide).astype(x.dtype) for function in functions]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for patch, value in zip(patches, values, strict=True):
                patch[...] = value
            plgpu.commit_smem()
            for patch, ref in zip(patches, refs[3:], strict=True):
                plgpu.copy_smem_to_gmem(patch, ref.at[pl.ds(tile.row + start, PATCH), tile.columns])

    results = [jax.ShapeDtypeStruct((rows, features), x.dtype)] * len(functions)
    gemm = _Gemm(name, (rows, features), width // TILE_K, False, prefetch, epilogue, copies=1)
    return _ping_pong_gemm([x, kernel, bias], results, gemm, [_columns(), *[_patch()] * len(functions)])


@exported
def gelu_product_gradient_kernel(
    grad: Float[Array, "r d"], kernel: Float[Array, "f d"], h: Float[Array, "r f"], *, approximate: bool
) -> tuple[Float[Array, "r f"], Float[Array, " f"]]:
    """The gradient of `gelu(h) @ kernel` with respect to h, and its sum over rows, the bias gradient, in float32."""
    pl, plgpu = pallas()
    (rows, features), width = h.shape, grad.shape[1]

    def prefetch(refs: Any, tile: _Tile, buffers: Any, loaded: Any) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before, from the same buffers
        for index, patch in enumerate(buffers):
            plgpu.copy_gmem_to_smem(refs[2].at[pl.ds(tile.row + index * PATCH, PATCH), tile.columns], patch, loaded)

    def epilogue(refs: Any, tile: _Tile, total: Any, patches: Any) -> None:
        half = TILE // 2  # of the columns at a time: all of them take more registers than there are
        for start in range(0, TILE, half):
            terms = []
            for index, patch in enumerate(patches):
                part = patch.at[:, pl.ds(start, half)]
                wide = plgpu.load(part, layout=plgpu.Layout.WGMMA).astype(np.float32)
                place = slice(index * PATCH, (index + 1) * PATCH), slice(start, start + half)
                terms.append(total[place] * gelu_slope_of(wide, approximate))
                part[...] = terms[-1].astype(h.dtype)
            if start == 0:  # both warpgroups use the same memory to add up what their warps have
                tile.wait_for_turn()
            refs[4].at[lax.div(tile.row, TILE), pl.ds(tile.column + start, half)][...] = functools.reduce(
                lax.add, terms
            ).sum(0)
        tile.end_turn()
        plgpu.commit_smem()
        for index, patch in enumerate(patches):
            plgpu.copy_smem_to_gmem(patch, refs[3].at[pl.ds(tile.row + index * PATCH, PATCH), tile.columns])

    sums = jax.ShapeDtypeStruct((rows // TILE, features), np.float32)
    name, steps = "product_gelu_gradient", width // TILE_K
    gemm = _Gemm(name, (rows, features), steps, True, prefetch, epilogue, copies=PATCHES, has_turns=True)
    dh, sums = _ping_pong_gemm([grad, kernel, h], [h, sums], gemm, [_patch()] * PATCHES)
    return dh, sums.sum(0)


class _Tile(NamedTuple):
    """A tile of the result."""

    row: Any  # the first one
    column: Any
    columns: Any  # a slice
    wait_for_turn: Callable[[], None]
    end_turn: Callable[[], None]


class _Gemm(NamedTuple):
    """The product of the first two arrays of a kernel, and its epilogue; `refs` are those of all arrays and results."""

    name: str  # in a profile
    shape: tuple[int, int]  # of the product
    steps: int  # along k, for each tile
    is_transposed: bool  # whether the second array is (columns, k), not (k, columns)
    prefetch: Callable[..., None]  # (refs, tile, buffers, loaded): copies what `epilogue` reads, during the main loop
    epilogue: Callable[..., None]  # (refs, tile, total, buffers)
    copies: int  # that `prefetch` starts
    has_turns: bool = False  # whether `epilogue` waits for the turn of its warpgroup, once for each tile


def _ping_pong_gemm(arrays: list[Any], results: list[Any], gemm: _Gemm, buffers: list[Any]) -> list[Array]:
    """Run a persistent kernel: one block per multiprocessor, whose consumer warpgroups take its tiles in turn."""
    pl, plgpu = pallas()
    rows, columns = (size // TILE for size in gemm.shape)
    blocks = multiprocessors()
    right_tile = (TILE, TILE_K) if gemm.is_transposed else (TILE_K, TILE)

    def next_slot(slot: Any) -> Any:
        return jnp.where(slot == STAGES - 1, 0, slot + 1)

    def body(*refs: Any) -> None:
        block = lax.axis_index("block")
        count = lax.div(rows * columns - block + blocks - 1, blocks)  # of the tiles of this block

        def locate(item: Any) -> tuple[Any, Any]:
            index = block + item * blocks
            return lax.div(index, columns) * TILE, lax.rem(index, columns) * TILE

        def run(left: Any, right: Any, buffers: Any, is_full: Any, is_empty: Any, loaded: Any, turns: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")

            @pl.when(warpgroup == 2)
            def _() -> None:
                plgpu.set_max_registers(40, action="decrease")
                produce(left, right, is_full, is_empty)

            @pl.when(warpgroup < 2)
            def _() -> None:
                plgpu.set_max_registers(232, action="increase")
                own = [buffer.at[warpgroup] for buffer in buffers]
                consume(warpgroup, left, right, own, is_full, is_empty, loaded.at[warpgroup], turns)
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        def produce(left: Any, right: Any, is_full: Any, is_empty: Any) -> None:
            def copy_item(item: Any, slot: Any) -> Any:
                row, column = locate(item)

                def copy_step(step: Any, slot: Any) -> Any:
                    # a barrier for each warpgroup, which waits for every phase of its own
                    is_copied = is_full.at[lax.rem(item, 2) * STAGES + slot]

                    @pl.when(item * gemm.steps + step >= STAGES)
                    def _() -> None:
                        plgpu.barrier_wait(is_empty.at[slot])

                    summed, across = pl.ds(step * TILE_K, TILE_K), pl.ds(column, TILE)
                    source = refs[1].at[across, summed] if gemm.is_transposed else refs[1].at[summed, across]
                    plgpu.copy_gmem_to_smem(refs[0].at[pl.ds(row, TILE), summed], left.at[slot], is_copied)
                    plgpu.copy_gmem_to_smem(source, right.at[slot], is_copied)
                    return next_slot(slot)

                return lax.fori_loop(0, gemm.steps, copy_step, slot)

            lax.fori_loop(0, count, copy_item, jnp.int32(0))

            def drain(number: Any, _: None) -> None:  # each barrier is waited for as often as it is reached
                plgpu.barrier_wait(is_empty.at[lax.rem(number, STAGES)])

            total = count * gemm.steps
            lax.fori_loop(jnp.maximum(total - STAGES, 0), total, drain, None)

        def consume(
            warpgroup: Any, left: Any, right: Any, own: Any, is_full: Any, is_empty: Any, loaded: Any, turns: Any
        ) -> None:
            def compute_item(index: Any, _: None) -> None:
                item = 2 * index + warpgroup
                row, column = locate(item)
                tile = _Tile(
                    row,
                    column,
                    pl.ds(column, TILE),
                    lambda: plgpu.barrier_wait(turns.at[warpgroup]),
                    lambda: plgpu.barrier_arrive(turns.at[1 - warpgroup]),
                )
                gemm.prefetch(refs, tile, own, loaded)

                def accumulate(total_ref: Any) -> Any:
                    def multiply_step(step: Any, slots: Any) -> Any:
                        slot, before = slots
                        plgpu.barrier_wait(is_full.at[warpgroup * STAGES + slot])
                        operand = right.at[slot].transpose((1, 0)) if gemm.is_transposed else right.at[slot]
                        plgpu.wgmma(total_ref, left.at[slot], operand)
                        plgpu.wgmma_wait(1)  # so that the step before this one has been read

                        @pl.when(step >= 1)
                        def _() -> None:
                            plgpu.barrier_arrive(is_empty.at[before])

                        return next_slot(slot), slot

                    first = lax.rem(item * gemm.steps, STAGES)
                    _, last = lax.fori_loop(0, gemm.steps, multiply_step, (first, first))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(is_empty.at[last])
                    return total_ref[...]

                total = pl.run_scoped(accumulate, plgpu.ACC((TILE, TILE), np.float32))
                plgpu.barrier_wait(loaded)
                gemm.epilogue(refs, tile, total, own)

            @pl.when(gemm.has_turns & (warpgroup == 1))
            def _() -> None:
                plgpu.barrier_arrive(turns.at[0])

            lax.fori_loop(0, lax.div(count - warpgroup + 1, 2), compute_item, None)

            @pl.when(gemm.has_turns & (lax.rem(count, 2) == warpgroup))  # a turn that no tile is left for
            def _() -> None:
                plgpu.barrier_wait(turns.at[warpgroup])

        pl.run_scoped(
            run,
            left=plgpu.SMEM((STAGES, TILE, TILE_K), jnp.bfloat16, transforms=_transforms()),
            right=plgpu.SMEM((STAGES, *right_tile), jnp.bfloat16, transforms=_transforms()),
            buffers=buffers,
            is_full=plgpu.Barrier(num_arrivals=2, num_barriers=2 * STAGES),  # by the copies of both operands
            is_empty=plgpu.Barrier(num_barriers=STAGES),
            loaded=plgpu.Barrier(num_arrivals=gemm.copies, num_barriers=2),
            turns=plgpu.Barrier(num_barriers=2),
            collective_axes="warpgroup",
        )

    body.__name__ = gemm.name
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
    )(*arrays)


def _transforms() -> tuple[Any, Any]:
    _, plgpu = pallas()
    return plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE)


def _patch() -> Any:
    """Shared memory for some rows of a tile of the result, for each consumer warpgroup."""
    _, plgpu = pallas()
    return plgpu.SMEM((2, PATCH, TILE), jnp.bfloat16, transforms=_transforms())


def _columns() -> Any:
    """Shared memory for one row of a tile, for each consumer warpgroup."""
    _, plgpu = pallas()
    return plgpu.SMEM((2, TILE), jnp.bfloat16)
