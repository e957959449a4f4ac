"""No array is silently broadcast to another rank: everything works with `jax_numpy_rank_promotion="raise"`."""

import jax
import pytest

pytestmark = [pytest.mark.every_row, pytest.mark.gradients]


def test_nothing_is_promoted_in_rank(row):
    layer, x, *variables = row.init("float32")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, *variables))
    over = (1,) if row.integers else (0, 1)

    def loss(x, trainables, non_trainables, rng, inference_mode):
        y, _ = layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return sum(jax.lax.reduce_sum(leaf, range(leaf.ndim)) for leaf in jax.tree.leaves(y))

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(layer.init, jax.random.key(0), x)
        jax.eval_shape(lambda *given: loss(*given, inference_mode=True), *shapes, jax.random.key(1))
        jax.eval_shape(jax.grad(lambda *given: loss(*given, inference_mode=False), over), *shapes, jax.random.key(1))
