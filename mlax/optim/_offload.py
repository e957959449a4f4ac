"""The update of leaves in host memory: fetched to the device in chunks, updated and written back."""

import dataclasses
from typing import Any

import jax

from mlax._jax import map_chunks_inplace, plan_chunks, sum_chunks, to_device, to_memory_of
from mlax.optim._update import LeafArrays, Update


def apply_offloaded(update: Update, arrays: LeafArrays) -> tuple[LeafArrays, dict[str, Any]]:
    """`update.apply(arrays)`, each array staying in its memory.

    The first pass over the chunks sums what the optimizer needs of all leaves, global norms say; the second updates.
    Leaves that are small, or that the optimizer does not update row by row, go to the device whole.
    """
    chunkable = [path for path in arrays.weights if update.optimizer.is_chunkable(path)]
    plan = plan_chunks({path: _all_arrays(arrays, path) for path in chunkable})
    chunked = {path for paths, _ in plan for path in paths}
    rest = arrays.subset(path for path in arrays.weights if path not in chunked)
    groups = [(arrays.subset(paths), number) for paths, number in plan]
    totals = _sum_totals(update, to_device(rest), groups) if groups else []
    new, scalars, _ = _apply(update, to_device(rest), totals, chunked=bool(groups))
    new = to_memory_of(new, rest._replace(grads=new.grads))
    for group, number in groups:
        weights, slots = _apply_chunks(update, group, number, totals)
        new.weights.update(weights)
        for name, slot in slots.items():
            new.slots[name].update(slot)
    return new, scalars


def _sum_totals(update: Update, rest: LeafArrays, groups: list[tuple[LeafArrays, int]]) -> list[jax.Array]:
    """The sums over all leaves that the optimizer asks `context.global_sum` for, in that order.

    The second may depend on the first, as with nested clipping, so each is summed in its own pass over the chunks.
    What the passes compute besides the sum is dead code, which XLA removes.
    """
    totals: list[jax.Array] = []

    def amount(arrays: LeafArrays) -> jax.Array:
        *_, amounts = _apply(update, arrays, totals)
        if len(amounts) <= len(totals):
            raise TypeError(
                f"{update.layout.tree.owner}: how often it calls `context.global_sum` depends on the leaves; call it "
                "equally often for any of them."
            )
        return amounts[len(totals)]

    count = len(jax.eval_shape(lambda rest: _apply(update, rest, [])[-1], rest))
    for _ in range(count):
        total = amount(rest)
        for group, number in groups:
            total = sum_chunks(amount, group, number, total)
        totals.append(total)
    return totals


def _apply_chunks(update: Update, group: LeafArrays, number: int, totals: list[jax.Array]) -> Any:
    def step(row: Any, written: Any, grads: Any) -> Any:
        new, _, _ = _apply(update, LeafArrays(grads, *written), totals, row)
        return new.weights, new.slots

    return map_chunks_inplace(step, (group.weights, group.slots), group.grads, number)


def _apply(
    update: Update, arrays: LeafArrays, totals: list[jax.Array], row: Any = 0, chunked: bool = True
) -> tuple[LeafArrays, dict[str, Any], list[jax.Array]]:
    """`update.apply` given the totals known so far, and what these leaves add to each."""
    amounts: list[jax.Array] = []

    def global_sum(amount: jax.Array) -> jax.Array:
        amounts.append(amount)
        return totals[len(amounts) - 1] if len(amounts) <= len(totals) else amount

    context = dataclasses.replace(update.context, global_sum=global_sum, chunked=chunked)
    return *dataclasses.replace(update, context=context).apply(arrays, row), amounts


def _all_arrays(arrays: LeafArrays, path: str) -> list[Any]:
    """All arrays of a leaf, its weights first."""
    slots = [slot[path] for slot in arrays.slots.values() if path in slot]
    return [arrays.weights[path], arrays.grads[path], *slots]
