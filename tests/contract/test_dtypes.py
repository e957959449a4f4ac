"""The dtype guarantee: every operation, forward and backward, is in the dtype of the input, and so is the output.

And no array is silently broadcast to another rank: everything works with `jax_numpy_rank_promotion="raise"`.
"""

import jax
import jax.numpy as jnp
import pytest

from mlax import dtypes

pytestmark = [pytest.mark.every_row, pytest.mark.every_dtype]


@pytest.fixture(autouse=True)
def without_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def loss(layer, inference_mode):
    def scalar(trainables, x, non_trainables, rng):
        y, _ = layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return sum(jax.lax.reduce_sum(leaf, range(leaf.ndim)) for leaf in jax.tree.leaves(y))

    return scalar


def test_every_operation_output_and_gradient_is_in_the_dtype_of_the_input_and_no_rank_is_promoted(row, dtype):
    layer, x, trainables, non_trainables = row.structs(dtype)
    arguments = (trainables, x, non_trainables, jax.random.key(1))
    assert dtypes.audit(loss(layer, inference_mode=True), *arguments, dtype=dtype) == ()
    over = (0,) if row.integers else (1,) if row.quantized else (0, 1)
    results = []

    def training(*given):
        results.append(jax.value_and_grad(loss(layer, inference_mode=False), over)(*given))
        return results[-1]

    assert dtypes.audit(training, *arguments, dtype=dtype) == ()
    value, grads = results[-1]
    assert value.dtype == dtype
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(grads)} <= {dtype}


def test_every_operation_of_init_is_in_the_dtype_of_the_input_and_no_rank_is_promoted(row, dtype):
    layer, x, _, _ = row.structs(dtype)
    assert dtypes.audit(layer.init, jax.random.key(0), x, dtype=dtype) == ()


def test_an_input_of_another_dtype_is_an_error_that_names_both(row):
    layer, x, trainables, non_trainables = row.init("float32")
    if row.integers or trainables is None or row.no_dtype_error:
        pytest.skip(row.no_dtype_error or "needs weights and a floating input")
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), x)
    with pytest.raises(TypeError, match=r"float16.*float32") as caught:
        layer.fwd(narrow, trainables, non_trainables, inference_mode=True)
    assert "mlax never casts implicitly" in str(caught.value)
