"""summary lists shapes, variables and FLOPs by layer, without computing anything."""

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import inspect, nn
from mlax.inspect import scope_table

FLOAT = jnp.float32


def rows(model, shape, dtype=FLOAT, **options):
    return {row.path: row for row in inspect.summary(model, jax.ShapeDtypeStruct(shape, dtype), **options).rows}


@pytest.mark.parametrize(
    ("layer", "shape", "forward"),
    [
        (nn.Linear(6), (3, 4, 5), 2 * 3 * 4 * 5 * 6),
        (nn.Conv(16, (3, 3), strides=2), (2, 8, 8, 4), 2 * 2 * 4 * 4 * 16 * 3 * 3 * 4),
        (nn.Conv(8, (3, 3), groups=4), (2, 8, 8, 4), 2 * 2 * 8 * 8 * 8 * 3 * 3 * 1),
        (nn.MultiHeadAttention(2), (3, 7, 8), 4 * 2 * 3 * 7 * 8 * 8 + 2 * 2 * 3 * 7 * 7 * 8),
        (mlax.Recurrent(nn.LSTMCell(6)), (3, 7, 5), 7 * 2 * 3 * (5 + 6) * 4 * 6),
    ],
)
def test_flops_are_those_counted_by_hand(layer, shape, forward):
    found = rows(mlax.Series(first=nn.Scaler(), layer=layer), shape)["layer"]
    assert found.forward_flops == forward
    assert found.backward_flops == 2 * forward  # the gradients of the input and of the weights


@pytest.mark.parametrize("mode", ["scan", "unroll", "remat"])
def test_rows_are_in_the_order_of_the_model_and_sum_up(mode):
    block = mlax.Residual(mlax.Series(up=nn.Linear(32), act=jax.nn.gelu, down=nn.Linear(8)))
    model = mlax.Series(
        embed=nn.Embed(10, 8), blocks=mlax.Repeat(block, 3, mode=mode), norm=nn.BatchNorm(), head=nn.Linear(4)
    )
    found = rows(model, (2, 5), jnp.int32)
    assert list(found) == ["", *mlax.layers(model)]
    assert found["blocks/stacked/layer/up"].output == "float32[2, 5, 32]"
    assert found["blocks"].input == found["blocks/stacked"].output == "float32[2, 5, 8]"
    assert found["blocks/stacked/layer/up"].forward_flops == 3 * 2 * 2 * 5 * 8 * 32
    assert found[""].parameters == 10 * 8 + 3 * (8 * 32 + 32 + 32 * 8 + 8) + 2 * 8 + 8 * 4 + 4
    assert found["norm"].bytes == 4 * (4 * 8) and found["norm"].parameters == 16  # with mean and variance
    top = [row for path, row in found.items() if path and "/" not in path]
    for field in ("parameters", "bytes", "forward_flops"):
        assert getattr(found[""], field) == sum(getattr(row, field) for row in top)
    recomputed = found["blocks/stacked/layer/up"].forward_flops if mode == "remat" else 0  # the last one is not needed
    assert found["blocks"].backward_flops == 2 * found["blocks"].forward_flops + recomputed
    assert rows(model, (2, 5), jnp.int32, inference_mode=True)[""].backward_flops == 0


def test_the_table_is_readable_and_nothing_is_allocated():
    class_of = mlax.Series(up=nn.Linear(32), heads=mlax.Parallel(a=nn.Linear(2), b=nn.Linear(3)))
    before = len(jax.live_arrays())
    found = inspect.summary(class_of, jax.ShapeDtypeStruct((8, 16), FLOAT))
    assert len(jax.live_arrays()) == before
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "input", "output", "parameters", "bytes", "FLOPs", "backward", "share"]
    assert lines[2].split()[:2] == ["up:", "Linear(32)"]
    page = found._repr_html_()  # for notebooks
    assert page.count("<tr>") == 6 and "up: Linear(32)</td>" in page and "709 parameters" in page
    assert lines[-1] == "709 parameters, 2.77 KiB of variables, 10.8 k FLOPs forward, 13.3 k backward"
    with pytest.raises(TypeError, match=r"takes a model of mlax: summary\(model, x\)"):
        inspect.summary(jnp.tanh, 3)


def test_the_named_scopes_of_a_function_are_a_table_of_as_many_rows_as_fit():
    block = mlax.Residual(mlax.Series(up=nn.Linear(32), down=nn.Linear(8)))
    model = mlax.Series(embed=nn.Embed(10, 8), blocks=mlax.Repeat(block, 3, mode="scan"), head=nn.Linear(4))
    x = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), x)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda t, x: model.fwd(x, t)[0].sum()))(trainables, x)
    leaves = [(path, mlax.get(trainables, path)) for path in mlax.paths(trainables)]
    table = [line.split() for line in scope_table(jaxpr, leaves).splitlines()]
    assert [row[0] for row in table] == ["layer", "step", "embed", "blocks", "stacked", "layer", "up", "down", "head"]
    assert table[1] == ["step", "1,772", "31.4", "k", "62.7", "k", "100.0%"]
    short = scope_table(jaxpr, leaves, rows=4).splitlines()
    assert [line.split()[0] for line in short] == ["layer", "step", "embed", "blocks", "head"]
