"""`describe` counts the bytes that a state will have, before it has any."""

import jax
import pytest

from tests.catalogue.optimizers import ROWS, tree


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROWS)
def test_the_bytes_are_those_of_the_state(name, dtype):
    optimizer, trainables = ROWS[name].optimizer, tree(dtype)
    state = optimizer.init(trainables)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert optimizer.describe(trainables).splitlines()[-1] == f"the state: {total:,} bytes"


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.no_slot_declarations])
def test_every_slot_and_scalar_has_a_line_for_each_of_its_dtypes(name):
    optimizer, trainables = ROWS[name].optimizer, tree("bfloat16")
    lines = {tuple(line.split()[:2]) for line in optimizer.describe(trainables).splitlines()[1:]}
    for field, value in optimizer.init(trainables)._asdict().items():
        there = [leaf for leaf in jax.tree.leaves(value) if leaf.size]
        assert {(field, leaf.dtype.name) for leaf in there} <= lines


@pytest.mark.parametrize("name", ROWS)
def test_shapes_and_dtypes_are_enough(name):
    trainables = tree("bfloat16")
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), trainables)
    assert ROWS[name].optimizer.describe(structs) == ROWS[name].optimizer.describe(trainables)
