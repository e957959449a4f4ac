"""Every number that an optimizer permits gives finite updates, alone, as a schedule, frozen in part and in groups."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import optim
from mlax.core import with_fields
from mlax.optim import ConstantSchedule, Schedule, number_fields, train_only
from tests.asserts import assert_close
from tests.catalogue.optimizers import ROWS, tree

pytestmark = pytest.mark.every_row

FIXED = "dense/bias"  # what is frozen, or has a group of its own


def ends(number):
    """The ends of the range of a field: numbers, and schedules where it takes one."""
    low, limit = number.range.minimum, number.range.limit
    if number.types == (int,):
        return [int(low)]
    highest = [] if limit == math.inf else [float(np.nextafter(limit, 0))]
    in_float32 = [] if limit == math.inf else [float(np.nextafter(np.float32(limit), np.float32(0)))]
    takes_schedules = Schedule in number.types
    return [low, *highest, *(ConstantSchedule(end) for end in (low, *in_float32) if takes_schedules)]


def variants(optimizer, thorough):
    """Changes of fields to ends of their ranges: one at a time or, where each costs a compilation, all at once."""
    numbers = number_fields(type(optimizer))
    each = [{name: end} for name, number in numbers.items() for end in ends(number)]
    if optimizer.elementwise or thorough:
        return each
    hyperparams = {name: ends(number) for name, number in numbers.items() if Schedule in number.types}
    return [{name: some[index % len(some)] for name, some in hyperparams.items()} for index in range(2)]


def steps(optimizer, row, dtype="float32", scales=(0.0, 1.0)):
    """The trainables and the state after some updates, the first by gradients of zero."""
    trainables = tree(dtype)
    state = optimizer.init(trainables)
    update = functools.partial(optimizer.update, **row.arguments)
    update = update if optimizer.elementwise else jax.jit(update)  # eagerly, control flow is compiled in each step
    for seed, scale in enumerate(scales, 1):
        grads = jax.tree.map(lambda g, scale=scale: g * jnp.asarray(scale, g.dtype), tree(dtype, seed))
        trainables, state = update(grads, state, trainables)
    return trainables, state


def test_the_ends_of_every_range_give_finite_updates(row, thorough):
    if row.variant and any(
        type(row.optimizer) is type(other.optimizer) for other in ROWS.values() if not other.variant
    ):
        pytest.skip("another row has the same numbers")
    for changes in variants(row.optimizer, thorough):
        try:
            optimizer = with_fields(row.optimizer, **changes)
        except ValueError:  # two fields contradict each other
            continue
        trainables, state = steps(optimizer, row)
        shown = optimizer.eval_trainables(state, trainables)
        bounded = {field: leaf for field, leaf in state._asdict().items() if field not in row.unbounded_slots}
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((trainables, shown, bounded))), changes


@pytest.mark.one_dtype
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-4), ("bfloat16", 2e-2)])
def test_a_schedule_for_every_number_gives_the_updates_of_the_numbers(row, dtype, tolerance):
    """All arithmetic is in that dtype, in which bfloat16 would round most betas to 1."""
    fields = {
        name: getattr(row.optimizer, name)
        for name, number in number_fields(type(row.optimizer)).items()
        if Schedule in number.types
    }
    if not fields or (row.ambiguous_slots and dtype == "float32"):
        pytest.skip("has no numbers, or eigenvectors of which float32 has few digits")
    optimizer = row.optimizer
    if dtype == "bfloat16":
        try:
            optimizer = with_fields(optimizer, accum_dtype=dtype)
        except (TypeError, ValueError):
            pytest.skip("a wrapper, or one that decomposes matrices, for which JAX needs float32")
    constant = {name: ConstantSchedule(value) for name, value in fields.items() if isinstance(value, int | float)}
    with jax.enable_x64(dtype == "float64"):
        found, _ = steps(with_fields(optimizer, **constant), row, dtype, (1.0, 1.0))
        wanted, _ = steps(optimizer, row, dtype, (1.0, 1.0))
        assert_close(found, wanted, tolerance, tolerance / 10)


def test_a_frozen_leaf_has_empty_slots(row):
    trainables = tree("float32")
    optimizer = train_only(row.optimizer, (f"!{FIXED}",))
    state = optimizer.init(trainables)
    _, after = jax.eval_shape(functools.partial(optimizer.update, **row.arguments), trainables, state, trainables)
    structure = jax.tree.structure(trainables)
    slots = [field for field in (*state, *after) if jax.tree.structure(field) == structure]
    assert all(slot["dense"]["bias"].size == 0 for slot in slots)


@pytest.mark.plain_rows
def test_a_frozen_leaf_is_as_one_in_a_group_that_does_not_move(row):
    frozen, state = steps(train_only(row.optimizer, (f"!{FIXED}",)), row)
    np.testing.assert_array_equal(frozen["dense"]["bias"], tree("float32")["dense"]["bias"])
    assert state.step == 2
    if not row.no_slot_declarations:
        grouped, _ = steps(optim.Groups((FIXED, optim.SGD(0.0)), ("**", row.optimizer)), row)
        assert_close(frozen, grouped, 1e-5, 1e-6)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "loss" in row.arguments])
def test_a_scaled_loss_gives_the_updates_of_the_loss(name):
    row = ROWS[name]
    trainables, grads = tree("float32"), tree("float32", 1)
    state = row.optimizer.init(trainables)
    plain, scaled = (
        row.optimizer.update(grads, state, trainables, loss_scale=scale, **row.arguments)[0]
        for scale in (None, jnp.float32(2.0**12))
    )
    assert_close(plain, scaled, 1e-5, 1e-6)
