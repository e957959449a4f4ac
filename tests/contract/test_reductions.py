"""Sums over a million elements in float16 and bfloat16 are those of float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import dtypes

TOLERANCE = 16  # epsilons of the dtype, of the largest value of each array


@pytest.mark.gradients
# in float16 `make test` runs those of tests/nn/test_narrow.py
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
def test_sums_of_a_million_elements_in_a_narrow_dtype_are_those_of_float64(row, dtype):
    if row.no_sums or row.variant:
        pytest.skip(row.no_sums or "a variant of a row that is compared")
    x = row.large_x(dtype)
    wide = jax.eval_shape(lambda: dtypes.cast(x, "float32"))  # `init` needs only shapes
    trainables, state = cast(row.layer("float32").init(jax.random.key(0), wide), dtype)
    with jax.enable_x64(True):
        wanted = outputs_and_gradients(row.layer("float64"), *cast((x, trainables, state), "float64"))
    cotangents = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), dtype), wanted[0])
    found = outputs_and_gradients(row.layer(dtype), x, trainables, state, cotangents)
    leaves = zip(jax.tree.leaves_with_path(found[1:]), jax.tree.leaves(wanted[1:]), strict=True)
    errors = {jax.tree_util.keystr(path): error(leaf, exact) for (path, leaf), exact in leaves}
    assert all(each <= TOLERANCE for each in errors.values()), errors


def outputs_and_gradients(layer, x, trainables, state, cotangents=None):
    """The cotangents, the output, the gradients of the trainables and of a floating input, and the new state."""

    @jax.jit
    def run(x, trainables, state, cotangents):
        def fwd(trainables, x):
            return layer.fwd(x, trainables, state, rng=jax.random.key(1))

        y, gradients, new = jax.vjp(fwd, trainables, x, has_aux=True)
        cotangents = jax.tree.map(cotangent, y) if cotangents is None else cotangents
        return cotangents, y, gradients(cotangents), new

    return run(x, trainables, state, cotangents)


def cotangent(y):
    """Positive values, larger for positive outputs: neither their sum nor that of their products with y cancels out."""
    return (1.0 + (y > 0).astype(y.dtype)) / 1024


def cast(tree, dtype):
    """The floating leaves in another dtype: by NumPy, which compiles nothing."""

    def convert(leaf):
        return np.asarray(leaf).astype(jnp.dtype(dtype)) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(convert, tree)


def error(found, exact):
    """The largest difference, in epsilons of the dtype times the largest value; what float16 flushes to 0 is none."""
    if not jnp.issubdtype(found.dtype, jnp.floating):
        return 0.0
    limits, found, exact = jnp.finfo(found.dtype), np.asarray(found, np.float64), np.asarray(exact)
    differences = np.maximum(np.abs(found - exact) - float(limits.smallest_subnormal), 0)
    return float(differences.max(initial=0) / np.abs(exact).max(initial=1e-30) / float(limits.eps))
