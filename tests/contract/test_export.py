"""A layer is exported once for batches of every size, and so are its gradients."""

import jax
import numpy as np
import pytest
from jax import export


def exported(row):
    """Its output and gradients as `jax.export` has them, the batch axis left open."""
    layer, x, trainables, _ = row.init("float32")
    (b,) = export.symbolic_shape("b")
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((b, *leaf.shape[1:]), leaf.dtype), x)
    _, state = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(trainables, state, x):
        y, _ = layer.fwd(x, trainables, state, inference_mode=True)
        return sum((leaf * leaf).sum(dtype=leaf.dtype) for leaf in jax.tree.leaves(y)), y

    function = jax.jit(jax.grad(loss, has_aux=True))
    return function, export.export(function)(trainables, state, x)


def test_a_layer_and_its_gradients_are_exported_for_batches_of_every_size(row):
    exported(row)


@pytest.mark.thorough
def test_what_is_exported_computes_the_same(row, request):
    if row.no_exported_call:
        request.applymarker(pytest.mark.xfail(reason=row.no_exported_call, strict=True))
    function, found = exported(row)
    x = jax.tree.map(lambda *parts: np.concatenate(parts), row.x("float32"), row.x("float32", seed=1))
    trainables, state = row.layer("float32").init(jax.random.key(0), x)
    arguments = (trainables, state, x)
    for one, other in zip(*map(jax.tree.leaves, (found.call(*arguments), function(*arguments))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
