"""Fifty steps of an optimizer from the weights and with the gradients of tests/references/optim.npz."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax.core import flatten_paths, unflatten_paths

TORCH = np.load(Path(__file__).parents[1] / "references" / "optim.npz")
LEAVES = ("dense/kernel", "dense/bias", "scale")
WEIGHTS = {leaf: TORCH[f"start/{leaf}"] for leaf in LEAVES}
GRADS = [{leaf: TORCH[f"grads/{leaf}"][step] for leaf in LEAVES} for step in range(50)]
TORCH_STEPS = [0, 1, 9, 49]  # the steps that optim.npz has
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
ALL = ("**",)


def stack_steps(steps):
    """A list of dicts, one for each step, as one dict of arrays with the steps first."""
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def to_tree(flat, dtype):
    """{"dense/bias": b} as {"dense": {"bias": b}}, in this dtype."""
    return unflatten_paths((name, jnp.asarray(np.asarray(leaf, dtype))) for name, leaf in flat.items())


def to_flat(tree):
    """{"dense": {"bias": b}} as {"dense/bias": b}, in NumPy."""
    return {name: np.asarray(leaf) for name, leaf in flatten_paths(tree).items()}


def trajectory(optimizer, dtype="float64", weights=WEIGHTS, grads=GRADS, averaged=False):
    """The weights after every step by path, steps first; with `averaged`, the averaged weights, too."""

    def step(carry, grads):
        trainables, state = optimizer.update(grads, carry[1], carry[0])
        return (trainables, state), (trainables, optimizer.eval_trainables(state, trainables) if averaged else None)

    @jax.jit
    def all_steps(trainables, grads):
        return lax.scan(step, (trainables, optimizer.init(trainables)), grads)[1]

    with jax.enable_x64(dtype == "float64"):
        found, average = all_steps(to_tree(weights, dtype), to_tree(stack_steps(grads), dtype))
        return (to_flat(found), to_flat(average)) if averaged else to_flat(found)


def torch_trajectory(case):
    return {leaf: TORCH[f"{case}/{leaf}"] for leaf in LEAVES}


def assert_follows(found, reference, tolerance):
    """Each leaf is within `tolerance` of the reference at every step, relative to its largest magnitude."""
    assert found.keys() == reference.keys()
    for name, leaf in reference.items():
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=tolerance * np.abs(leaf).max(), err_msg=name)


def stack_pairs(steps, index):
    """Like `stack_steps`, for leaves that are pairs: of each pair the element at `index`."""
    return stack_steps([{name: pair[index] for name, pair in step.items()} for step in steps])
