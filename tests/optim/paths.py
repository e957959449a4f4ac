"""Fifty steps of an optimizer from the weights and by the gradients of tests/references/optim.npz."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TORCH = np.load(Path(__file__).parents[1] / "references" / "optim.npz")
LEAVES = ("dense/kernel", "dense/bias", "scale")
WEIGHTS = {leaf: TORCH[f"start/{leaf}"] for leaf in LEAVES}
GRADS = [{leaf: TORCH[f"grads/{leaf}"][step] for leaf in LEAVES} for step in range(50)]
KEPT = [0, 1, 9, 49]  # of the steps, those that optim.npz has
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
ALL = ("**",)


def tree(flat):
    """{"dense/bias": b} as {"dense": {"bias": b}}."""
    nested = {}
    for name, leaf in flat.items():
        *outer, last = name.split("/")
        inner = nested
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = jnp.asarray(leaf)
    return nested


def flat(nested):
    leaves, _ = jax.tree.flatten_with_path(nested)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def stacked(steps):
    """A list of dicts as one dict, steps first."""
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def in_dtype(dtype, flat):
    return tree({name: np.asarray(leaf, dtype) for name, leaf in flat.items()})


def run(optimizer, dtype="float64", weights=WEIGHTS, grads=GRADS, averaged=False):
    """The weights after every step by name, steps first; with `averaged`, the averaged ones too."""

    def step(carry, grads):
        trainables, state = optimizer.update(grads, carry[1], carry[0])
        return (trainables, state), (trainables, optimizer.eval_trainables(state, trainables) if averaged else None)

    @jax.jit
    def whole(trainables, grads):
        return lax.scan(step, (trainables, optimizer.init(trainables)), grads)[1]

    with jax.enable_x64(dtype == "float64"):
        path, average = whole(in_dtype(dtype, weights), in_dtype(dtype, stacked(grads)))
        return (flat(path), flat(average)) if averaged else flat(path)


def assert_follows(path, reference, tolerance):
    """Each leaf of `path` is within `tolerance` of the reference, relative to its largest magnitude."""
    assert path.keys() == reference.keys()
    for name, leaf in reference.items():
        np.testing.assert_allclose(path[name], leaf, rtol=0, atol=tolerance * np.abs(leaf).max(), err_msg=name)


def torch_path(case):
    return {leaf: TORCH[f"{case}/{leaf}"] for leaf in LEAVES}


def parts(steps, index):
    """Of steps whose leaves are pairs, one of each pair."""
    return stacked([{name: pair[index] for name, pair in step.items()} for step in steps])
