"""Every optimizer of the catalogue in a step: dtypes are preserved, with a loss scale and in float64 too."""

import jax
import jax.numpy as jnp
import pytest

from mlax import optim, train
from tests.catalogue.optimizers import ROWS, loss, tree


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    noise = jax.random.normal(rng, batch["x"].shape, batch["x"].dtype)
    mean = non_trainables["mean"] * 0.5 + jnp.mean(batch["x"] + noise) * 0.5
    return loss(trainables), {"mean": mean, "count": non_trainables["count"] + 1}


def dtypes_of(state):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.thorough if row.variant and dtype == "float64" else ())
        for name, row in ROWS.items()
        for dtype in ("float16", "float64")
    ],
)
def test_a_step_of_every_optimizer_preserves_shapes_and_dtypes(name, dtype):
    optimizer = ROWS[name].optimizer
    options = {} if optimizer.estimate_every() is None else {"sampled": objective}
    if dtype == "float16":
        options |= {"scaling": train.DynamicLossScale(), "accumulate": 2}
    with jax.enable_x64(dtype == "float64"):
        step = train.step(objective, optim.Average(optimizer) if name == "SAM" else optimizer, **options)
        statistics = {"mean": jnp.zeros((), dtype), "count": jnp.zeros((), jnp.int32)}
        state = jax.eval_shape(step.init, jax.random.key(0), tree(dtype), statistics)
        given = {"x": jax.ShapeDtypeStruct((4,), dtype)}
        new, metrics = jax.eval_shape(step.advance, state, given)
        assert dtypes_of(new) == dtypes_of(state)
        wide = jnp.float32 if dtype == "float16" else jnp.float64
        assert metrics.packed.dtype == wide
        if "rate" in metrics and name != "Muon":
            jax.eval_shape(lambda *args: step.advance(*args, rate=jnp.ones(())), state, given)
