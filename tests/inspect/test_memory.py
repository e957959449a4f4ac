"""memory finds when a compiled function needs most memory, and which layers hold it."""

import jax
import jax.numpy as jnp
import pytest

import mlax
from mlax import inspect, nn

BATCH = 512


def train_memory(mode, batch=BATCH):
    """The memory of a training step by gradient descent."""
    block = mlax.Residual(mlax.Series(norm=nn.LayerNorm(), up=nn.Linear(256), act=jax.nn.gelu, down=nn.Linear(64)))
    model = mlax.Series(embed=nn.Linear(64), blocks=mlax.Repeat(block, 4, mode=mode), head=nn.Linear(10))
    x = jax.ShapeDtypeStruct((batch, 32), jnp.float32)
    trainables, _ = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(trainables, x):
        grads = jax.grad(lambda trainables: jnp.square(model.fwd(x, trainables)[0]).mean())(trainables)
        return jax.tree.map(lambda w, g: w - 0.1 * g, trainables, grads)

    return inspect.memory(jax.jit(step, donate_argnums=0), trainables, x, batch=batch)


@pytest.mark.parametrize("mode", ["scan", pytest.param("unroll", marks=pytest.mark.thorough)])
def test_the_peak_is_that_of_xla_and_its_layers_are_named(mode):
    found = train_memory(mode)
    allocated = found.temporaries + found.results - found.reused
    assert found.peak.bytes == pytest.approx(allocated, rel=0.1)
    assert sum(each.bytes for each in found.at_peak) == found.peak.bytes == max(each.bytes for each in found.timeline)
    kept = sum(each.bytes for each in found.at_peak if each.kind == "activations" and each.path.startswith("blocks"))
    assert kept > 0.75 * found.peak.bytes
    assert "rematerializing blocks" in str(found) and "half the batch" in str(found)
    saved = found.temporaries - train_memory("remat").temporaries
    assert kept > 0.7 * saved
    halved = found.temporaries - train_memory(mode, BATCH // 2).temporaries
    assert found.batched / 2 == pytest.approx(halved, rel=0.15)


def test_arguments_and_results_are_counted_and_a_plain_function_is_jitted():
    found = inspect.memory(lambda x: x + 1, jax.ShapeDtypeStruct((1000,), jnp.float32))
    assert (found.arguments, found.results, found.reused, found.batched) == (4000, 4000, 0, None)
    assert found.total == 8000 + found.temporaries
    assert "half the batch" not in str(found)
