"""`jax.export` takes a layer and its gradients with a symbolic batch size."""

import jax
import numpy as np
import pytest
from jax import export

pytestmark = pytest.mark.gradients


def export_gradients(row):
    """A function that returns the gradients and the output of the layer, and its export with a symbolic batch size."""
    layer, x, trainables, _ = row.init("float32")
    (b,) = export.symbolic_shape("b")
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((b, *leaf.shape[1:]), leaf.dtype), x)
    _, state = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(trainables, state, x):
        y, _ = layer.fwd(x, trainables, state, inference_mode=True)
        return sum((leaf * leaf).sum(dtype=leaf.dtype) for leaf in jax.tree.leaves(y)), y

    function = jax.jit(jax.grad(loss, has_aux=True))
    return function, export.export(function)(trainables, state, x)


def test_a_layer_and_its_gradients_can_be_exported_with_a_symbolic_batch_size(row):
    export_gradients(row)


@pytest.mark.thorough
def test_the_exported_program_computes_the_same(row, request):
    if row.no_exported_call:
        request.applymarker(pytest.mark.xfail(reason=row.no_exported_call, strict=True))
    function, exported = export_gradients(row)
    x = jax.tree.map(lambda *parts: np.concatenate(parts), row.x("float32"), row.x("float32", seed=1))
    trainables, state = row.layer("float32").init(jax.random.key(0), x)
    arguments = (trainables, state, x)
    for one, other in zip(*map(jax.tree.leaves, (exported.call(*arguments), function(*arguments))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
