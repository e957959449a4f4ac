"""The gradients of several products of one array, as kernels in Pallas (Mosaic GPU).

Products with kernels of 768 x 768, as the queries, keys and values of attention have, are too short for cuBLAS. To
concatenate their operands would cost more than one long product saves, so these kernels read each array where it is.

The kernels are warp-specialized, with the cooperative schedule of CUTLASS: a producer warpgroup copies tiles of both
operands into a pipeline in shared memory, and two consumer warpgroups multiply them, each the upper or lower half of a
tile of the result. The producer goes on with the next tile while the consumers write one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from mlax._gpu._backend import is_hopper, multiprocessors, pallas, prefers_kernels
from mlax._gpu._export import exported

TILE_M, TILE_N, TILE_K = 256, 128, 64  # rows and columns of a tile of the result, and of k that one step multiplies
HALF = TILE_M // 2  # rows of a consumer warpgroup
PATCH = 64  # rows and columns that are written at a time
STAGES = 4  # of the pipeline
PATCHES = 2  # in shared memory, for each warpgroup
SWIZZLE = 128  # bytes
MEASURED_WIDTH, MIN_ROWS = 768, 1 << 15  # what cuBLAS was measured to be slower for


def prefers_product_kernels(x: Any, kernels: Sequence[Any]) -> bool:
    """Whether the gradients of `x @ kernel` for each kernel are faster by kernels of this file than by cuBLAS."""
    shape = (MEASURED_WIDTH, MEASURED_WIDTH)
    is_measured = len(kernels) == 3 and all(kernel.shape == shape for kernel in kernels)
    if not is_measured or not is_hopper() or not prefers_kernels(x):
        return False
    rows = x.size // x.shape[-1]
    return rows >= MIN_ROWS and rows % TILE_M == 0


@exported
def sum_of_products(
    grads: Sequence[Float[Array, "r n"]], kernels: Sequence[Float[Array, "d n"]]
) -> Float[Array, "r d"]:
    """The sum of `grad @ kernel.T` over the pairs, rounded once."""
    pl, _ = pallas()
    (rows, n), width, number = grads[0].shape, kernels[0].shape[0], len(grads)
    columns, steps = width // TILE_N, n // TILE_K
    tiles, blocks = rows // TILE_M * columns, multiprocessors()

    def locate(block: Any, item: Any) -> tuple[Any, Any]:
        """Where a tile begins."""
        index = block + item * blocks
        return lax.div(index, columns) * TILE_M, lax.rem(index, columns) * TILE_N

    def load(refs: Any, block: Any, item: Any, step: Any, copy: Callable[[Any, Any], None]) -> None:
        row, column = locate(block, item)
        summed = pl.ds(lax.rem(step, steps) * TILE_K, TILE_K)
        for index in range(number):

            @pl.when(lax.div(step, steps) == index)
            def _(index: int = index) -> None:
                copy(refs[index].at[pl.ds(row, TILE_M), summed], refs[number + index].at[pl.ds(column, TILE_N), summed])

    def multiply(total_ref: Any, left: Any, right: Any, half: Any) -> None:
        _, plgpu = pallas()
        plgpu.wgmma(total_ref, left.at[half], right.transpose((1, 0)))

    def store(refs: Any, block: Any, item: Any, warpgroup: Any, total: Any, patches: Any) -> None:
        row, column = locate(block, item)
        _write_patches(total.astype(jnp.bfloat16), refs[-1], row + warpgroup * HALF, column, patches.at[warpgroup])

    (y,) = _cooperative_gemm(
        [*grads, *kernels],
        jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        _Gemm("sum_of_products", load, multiply, store, (TILE_M, TILE_K), (TILE_N, TILE_K)),
        lambda block: lax.div(tiles - block + blocks - 1, blocks),
        lambda block, item: number * steps,
    )
    return y


@exported
def kernel_gradients(x: Float[Array, "r d"], grads: Sequence[Float[Array, "r n"]]) -> list[Float[Array, "d n"]]:
    """`x.T @ grad` for each of the gradients, split over the rows that are summed."""
    pl, _ = pallas()
    (rows, width), n, number = x.shape, grads[0].shape[1], len(grads)
    per_grad, down = n // TILE_N, width // TILE_M
    split = SplitK.over(down * per_grad * number, rows // TILE_K, multiprocessors())

    def load(refs: Any, block: Any, item: Any, step: Any, copy: Callable[[Any, Any], None]) -> None:
        tile, first, _, _ = split.segment(block, item)
        column = lax.rem(tile, per_grad * number)
        summed = pl.ds((first + step) * TILE_K, TILE_K)
        left = refs[0].at[summed, pl.ds(lax.div(tile, per_grad * number) * TILE_M, TILE_M)]
        for index in range(number):

            @pl.when(lax.div(column, per_grad) == index)
            def _(index: int = index) -> None:
                copy(left, refs[1 + index].at[summed, pl.ds(lax.rem(column, per_grad) * TILE_N, TILE_N)])

    def multiply(total_ref: Any, left: Any, right: Any, half: Any) -> None:
        _, plgpu = pallas()
        plgpu.wgmma(total_ref, left.at[:, half].transpose((1, 0)), right)

    def store(refs: Any, block: Any, item: Any, warpgroup: Any, total: Any, patches: Any) -> None:
        _, _, _, place = split.segment(block, item)
        refs[-1].at[place, pl.ds(warpgroup * HALF, HALF)][...] = total

    (partial,) = _cooperative_gemm(
        [x, *grads],
        jax.ShapeDtypeStruct((split.sums, TILE_M, TILE_N), np.float32),
        _Gemm("kernel_gradients", load, multiply, store, (TILE_K, TILE_M), (TILE_K, TILE_N)),
        split.items,
        lambda block, item: split.segment(block, item)[2],
    )
    tiles = split.reduce(partial).astype(jnp.bfloat16).reshape(down, number, per_grad, TILE_M, TILE_N)
    return list(tiles.transpose(1, 0, 3, 2, 4).reshape(number, width, n))


class SplitK(NamedTuple):
    """How the main loops of tiles, `depth` steps each, are split over blocks: split-K, with a remainder by Stream-K.

    The first `splits * tiles` blocks have one tile each, and `length` of its steps, so that most read the same rows at
    a time. The others, `rest` of them, divide the steps that remain evenly, in the order of the tiles
    (https://arxiv.org/abs/2301.03598).
    """

    tiles: int
    depth: int
    splits: int
    length: int
    rest: int

    @classmethod
    def over(cls, tiles: int, depth: int, blocks: int) -> "SplitK":
        splits = blocks // tiles
        rest = blocks - splits * tiles
        length = min(-(-tiles * depth // blocks), depth // splits) if splits else 0
        return cls(tiles, depth, splits, length, rest)

    @property
    def dedicated(self) -> int:
        """Blocks with one tile."""
        return self.splits * self.tiles

    @property
    def remaining(self) -> int:
        """Steps of a tile that its dedicated blocks leave."""
        return self.depth - self.splits * self.length

    @property
    def sums(self) -> int:
        """Partial sums."""
        return self.dedicated + (self.rest + self.tiles - 1 if self.remaining else 0)

    def bounds(self, index: Any) -> tuple[Any, Any]:
        """The steps of one of the other blocks, counted over all tiles."""
        whole = self.tiles * self.remaining
        return index * whole // max(self.rest, 1), (index + 1) * whole // max(self.rest, 1)

    def items(self, block: Any) -> Any:
        """How many tiles a block has a part of."""
        if not self.remaining:
            return jnp.where(block < self.dedicated, 1, 0)
        start, stop = self.bounds(jnp.maximum(block - self.dedicated, 0))
        number = lax.div(stop + self.remaining - 1, self.remaining) - lax.div(start, self.remaining)
        return jnp.where(block < self.dedicated, 1, number)

    def segment(self, block: Any, item: Any) -> tuple[Any, Any, Any, Any]:
        """A tile, the first step of it, the number of steps, and the index of their partial sum."""
        split, tile = lax.div(block, self.tiles), lax.rem(block, self.tiles)
        if not self.remaining:
            return tile, split * self.length, jnp.int32(self.length), block
        index = jnp.maximum(block - self.dedicated, 0)
        start, stop = self.bounds(index)
        other = lax.div(start, self.remaining) + item
        first = jnp.maximum(start - other * self.remaining, 0)
        last = jnp.minimum(stop - other * self.remaining, self.remaining)
        is_dedicated = block < self.dedicated
        return (
            jnp.where(is_dedicated, tile, other),
            jnp.where(is_dedicated, split * self.length, self.splits * self.length + first),
            jnp.where(is_dedicated, self.length, last - first),
            jnp.where(is_dedicated, block, self.dedicated + index + other),
        )

    def reduce(self, partial: Float[Array, "sums m n"]) -> Float[Array, "tiles m n"]:
        """The sum of each tile, always in the same order."""
        members = [[split * self.tiles + tile for split in range(self.splits)] for tile in range(self.tiles)]
        for index in range(self.rest if self.remaining else 0):
            start, stop = self.bounds(index)
            for tile in range(start // self.remaining, -(-stop // self.remaining)):
                members[tile].append(self.dedicated + index + tile)
        most = max(map(len, members))
        table = np.array([each + [-1] * (most - len(each)) for each in members])
        terms = (jnp.where(column[:, None, None] >= 0, partial[np.maximum(column, 0)], 0.0) for column in table.T)
        return sum(terms, start=jnp.zeros((), np.float32))


class _Gemm(NamedTuple):
    """What a product does at each step of k and with each tile; `refs` are those of the arrays and of the result."""

    name: str  # in a profile
    load: Callable[..., None]  # (refs, block, item, step, copy): calls copy(left, right)
    multiply: Callable[..., None]  # (total_ref, left, right, half)
    store: Callable[..., None]  # (refs, block, item, warpgroup, total, patches)
    left: tuple[int, int]  # shape of the tile of an operand
    right: tuple[int, int]


def _cooperative_gemm(
    arrays: list[Any],
    out_type: Any,
    gemm: _Gemm,
    count_items: Callable[[Any], Any],  # of a block
    count_steps: Callable[[Any, Any], Any],  # of a block and one of its items
) -> list[Array]:
    """Run a persistent kernel: one block per multiprocessor, which computes its items, tiles or parts of them."""
    pl, plgpu = pallas()
    transforms = plgpu.TilingTransform((8, SWIZZLE // 2)), plgpu.SwizzleTransform(SWIZZLE)

    def body(*refs: Any) -> None:
        def run(left: Any, right: Any, patches: Any, is_full: Any, is_empty: Any) -> None:
            warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

            @pl.when(warpgroup == 2)
            def _() -> None:
                plgpu.set_max_registers(40, action="decrease")
                produce(block, left, right, is_full, is_empty)

            @pl.when(warpgroup < 2)
            def _() -> None:
                plgpu.set_max_registers(232, action="increase")
                consume(block, warpgroup, left, right, patches, is_full, is_empty)
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        def produce(block: Any, left: Any, right: Any, is_full: Any, is_empty: Any) -> None:
            def copy_item(item: Any, start: Any) -> Any:
                def copy_step(step: Any, number: Any) -> Any:
                    slot = lax.rem(number, STAGES)

                    @pl.when(number >= STAGES)
                    def _() -> None:
                        plgpu.barrier_wait(is_empty.at[slot])

                    def copy(left_ref: Any, right_ref: Any) -> None:
                        plgpu.copy_gmem_to_smem(left_ref, left.at[slot], is_full.at[slot])
                        plgpu.copy_gmem_to_smem(right_ref, right.at[slot], is_full.at[slot])

                    gemm.load(refs, block, item, step, copy)
                    return number + 1

                return lax.fori_loop(0, count_steps(block, item), copy_step, start)

            total = lax.fori_loop(0, count_items(block), copy_item, jnp.int32(0))

            def drain(number: Any, _: None) -> None:  # each barrier is waited for as often as it is reached
                plgpu.barrier_wait(is_empty.at[lax.rem(number, STAGES)])

            lax.fori_loop(jnp.maximum(total - STAGES, 0), total, drain, None)

        def consume(
            block: Any, warpgroup: Any, left: Any, right: Any, patches: Any, is_full: Any, is_empty: Any
        ) -> None:
            half = pl.ds(warpgroup * HALF, HALF)

            def compute_item(item: Any, start: Any) -> Any:
                steps = count_steps(block, item)

                def accumulate(total_ref: Any) -> Any:
                    def multiply_step(step: Any, _: None) -> None:
                        slot = lax.rem(start + step, STAGES)
                        plgpu.barrier_wait(is_full.at[slot])
                        gemm.multiply(total_ref, left.at[slot], right.at[slot], half)
                        plgpu.wgmma_wait(1)  # so that the step before this one has been read

                        @pl.when(step >= 1)
                        def _() -> None:
                            plgpu.barrier_arrive(is_empty.at[lax.rem(start + step - 1, STAGES)])

                    lax.fori_loop(0, steps, multiply_step, None)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(is_empty.at[lax.rem(start + steps - 1, STAGES)])
                    return total_ref[...]

                total = pl.run_scoped(accumulate, plgpu.ACC((HALF, TILE_N), np.float32))
                gemm.store(refs, block, item, warpgroup, total, patches)
                return start + steps

            lax.fori_loop(0, count_items(block), compute_item, jnp.int32(0))

        pl.run_scoped(
            run,
            left=plgpu.SMEM((STAGES, *gemm.left), jnp.bfloat16, transforms=transforms),
            right=plgpu.SMEM((STAGES, *gemm.right), jnp.bfloat16, transforms=transforms),
            patches=plgpu.SMEM((2, PATCHES, PATCH, PATCH), jnp.bfloat16, transforms=transforms),
            is_full=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),  # by the copies of both operands
            is_empty=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),  # by both consumers
            collective_axes="warpgroup",
        )

    body.__name__ = gemm.name
    return plgpu.kernel(
        body,
        out_type=[out_type],
        grid=(multiprocessors(),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*arrays)


def _write_patches(total: Any, out_ref: Any, row: Any, column: Any, patches: Any) -> None:
    """Write the part of a warpgroup through shared memory, while the patch before is still being copied."""
    pl, plgpu = pallas()
    places = [(down, right) for down in range(0, HALF, PATCH) for right in range(0, TILE_N, PATCH)]
    for index, (down, right) in enumerate(places):
        patch = patches.at[index % PATCHES]
        plgpu.wait_smem_to_gmem(PATCHES - 1, wait_read_only=True)
        patch[...] = total[down : down + PATCH, right : right + PATCH]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(patch, out_ref.at[pl.ds(row + down, PATCH), pl.ds(column + right, PATCH)])
