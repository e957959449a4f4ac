"""What PyTorch computes for norms, and what they are compared with."""

import functools
from pathlib import Path

import jax
import numpy as np

TORCH = np.load(Path(__file__).parents[1] / "references" / "norms.npz")


def torch(case):
    """The arrays of a case by name."""
    return {name.removeprefix(f"{case}/"): TORCH[name] for name in TORCH.files if name.startswith(f"{case}/")}


@functools.partial(jax.jit, static_argnums=(0,), static_argnames="inference_mode")
def differentiated(layer, x, trainables, non_trainables, g, *, inference_mode=False):
    """The output, the new state, and the gradients of sum(output * g) with respect to trainables and input."""

    def loss(trainables, x):
        y, new = layer.fwd(x, trainables, non_trainables, inference_mode=inference_mode)
        return (y * g).sum(), (y, new)

    grads, out = jax.grad(loss, (0, 1), has_aux=True)(trainables, x)
    return *out, *grads
