"""compare finds the layer at which two models part; dtypes lists the dtypes by layer."""

import jax
import pytest

import mlax
from mlax import dtypes, inspect, nn

X = jax.random.normal(jax.random.key(1), (8, 16))
MODEL = mlax.Series(
    up=nn.Linear(32), blocks=mlax.Repeat(mlax.Residual(nn.Linear(32)), 3), norm=nn.LayerNorm(), head=nn.Linear(4)
)


@pytest.fixture(scope="module")
def trainables():
    return MODEL.init(jax.random.key(0), X)[0]


def test_mixed_precision_differs_by_its_rounding_in_every_layer(trainables):
    found = inspect.compare(MODEL, dtypes.mixed_bfloat16(MODEL), X, trainables)
    assert [row.path for row in found.rows] == ["", *mlax.layers(MODEL)]
    assert all(1e-4 < row.relative < 2e-2 for row in found.rows)
    assert found.rows[1].dtypes == "float32 and bfloat16"
    assert found.first_above(0.1) is None and found.worst().relative < 2e-2
    assert "float32 and bfloat16" in str(found)


def test_the_first_layer_that_differs_is_found(trainables):
    other = mlax.replace(MODEL, "norm", nn.LayerNorm(eps=1.0))
    found = inspect.compare(MODEL, other, X, trainables)
    assert found.first_above(1e-6).path == "norm"
    assert all(row.relative == 0 for row in found.rows if row.path.startswith(("up", "blocks")))
    changed = mlax.replace(trainables, "head/bias", trainables["head"]["bias"] + 1)
    found = inspect.compare(MODEL, MODEL, X, trainables, second_variables=(changed, None))
    assert found.first_above(0.0).path == "head" and found.worst().path in ("", "head")


def test_layers_that_only_one_model_has_are_listed(trainables):
    shorter = mlax.Series(up=nn.Linear(32), tail=nn.LayerNorm())
    variables = shorter.init(jax.random.key(0), X)
    found = inspect.compare(MODEL, shorter, X, trainables, second_variables=variables)
    assert found.only_second == ("tail",) and "norm" in found.only_first
    assert found.rows[0].relative == float("inf")  # outputs of other shapes


def test_a_part_without_an_output_does_not_differ():
    @mlax.frozen
    class Silent(mlax.Composite):
        def parts(self):
            return {"up": nn.Linear(4), "note": mlax.F(lambda x: None)}

        def wire(self, sub, x):
            y = sub.up(x)
            sub.note(y)
            return y

    variables, _ = Silent().init(jax.random.key(0), X)
    found = inspect.compare(Silent(), Silent(), X, variables)
    assert [row.path for row in found.rows] == ["", "up", "note"] and found.worst().relative == 0


def test_dtypes_are_counted_by_layer_and_pass(trainables):
    mixed = dtypes.mixed_bfloat16(MODEL)
    found = inspect.dtypes(jax.grad(lambda trainables: mixed.fwd(X, trainables)[0].sum()), trainables)
    rows = {(row.path, row.is_backward): dict(row.counts) for row in found.rows}
    assert max(rows["up", False], key=rows["up", False].get) == "bfloat16"
    assert rows["norm", False]["float32"] > 0  # its statistics
    assert ("head", True) in rows and "in bfloat16" in str(found)
