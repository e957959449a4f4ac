"""Compare a layer with a case of experts.npz: the output, and its gradients with respect to input and weights."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mlax
from tests.asserts import assert_close_to_scale


@functools.cache
def arrays():
    with np.load(Path(__file__).with_name("experts.npz")) as file:
        return dict(file)


def cases(prefix):
    """The names of the cases with this prefix."""
    return sorted({name.split("/")[0] for name in arrays() if name.startswith(prefix)})


def under(prefix):
    return {name.removeprefix(prefix): array for name, array in arrays().items() if name.startswith(prefix)}


def assert_agrees_with_torch(case, layer):
    """In float32, within 1e-5 of the largest magnitude of each array."""
    x, probe = jnp.asarray(arrays()[f"{case}/x"]), jnp.asarray(arrays()[f"{case}/probe"])
    weights = {path: jnp.asarray(weight) for path, weight in under(f"{case}/w/").items()}
    made, state = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert {path: mlax.get(made, path).shape for path in mlax.paths(made)} == {k: v.shape for k, v in weights.items()}
    trainables = mlax.rename({str(i): w for i, w in enumerate(weights.values())}, dict(zip_paths(weights)))

    @jax.jit
    def run(trainables, x):
        def total(trainables, x):
            out, _ = layer.fwd(x, trainables, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state))
            y, extra = out if isinstance(out, tuple) else (out, {})
            return (y * probe).sum() + sum(loss.sum() for loss in extra.values()), (y, extra)

        return jax.value_and_grad(total, (0, 1), has_aux=True)(trainables, x)

    (_, (y, extra)), (dw, dx) = run(trainables, x)
    assert_close_to_scale(y, arrays()[f"{case}/y"])
    assert_close_to_scale(dx, arrays()[f"{case}/dx"])
    for path, gradient in under(f"{case}/dw/").items():
        assert_close_to_scale(mlax.get(dw, path), gradient)
    assert extra.keys() == under(f"{case}/extra/").keys()
    for name, loss in under(f"{case}/extra/").items():
        assert_close_to_scale(extra[name], loss)


def zip_paths(weights):
    return ((str(i), path) for i, path in enumerate(weights))
