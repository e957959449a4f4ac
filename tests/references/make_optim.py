"""Write optim.npz, trajectories of PyTorch's optimizers: `python tests/references/make_optim.py`, PyTorch 2.13, CPU.

`start/leaf` are the initial weights and `grads/leaf` the gradients of 50 steps, the same for every case; `case/leaf`
are the weights after steps 1, 2, 10 and 50. All is float64.
"""

from pathlib import Path

import numpy as np
import torch
from torch import optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

STEPS, KEPT = 50, (1, 2, 10, 50)
SHAPES = {"dense/kernel": (4, 3), "dense/bias": (3,), "scale": ()}
ARRAYS = {}

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

START = {leaf: torch.randn(shape) for leaf, shape in SHAPES.items()}
START["dense/bias"].zero_()  # a leaf whose norm is zero

GRADS = {leaf: torch.randn(STEPS, *shape) for leaf, shape in SHAPES.items()}
for leaf, grads in GRADS.items():
    magnitudes = 10 ** (4 * torch.rand(STEPS) - 3)
    magnitudes[0] = 1.0
    grads *= magnitudes.reshape(STEPS, *(1 for _ in SHAPES[leaf]))
GRADS["scale"][0] = 0.0
GRADS["dense/bias"][4:6] = 0.0
GRADS["dense/kernel"][20] = 0.0


def case(name, make, clip=None):
    """Run the optimizer that `make` builds for a list of weights; `clip` clips their gradients before each step."""
    weights = {leaf: value.clone().requires_grad_() for leaf, value in START.items()}
    optimizer = make(list(weights.values()))
    kept = {leaf: [] for leaf in weights}
    for step in range(STEPS):
        for leaf, weight in weights.items():
            weight.grad = GRADS[leaf][step].clone()
        if clip:
            clip(list(weights.values()))
        optimizer.step()
        for leaf, weight in weights.items():
            if step + 1 in KEPT:
                kept[leaf].append(weight.detach().numpy().copy())
    ARRAYS.update({f"{name}/{leaf}": np.stack(values) for leaf, values in kept.items()})


ARRAYS.update({f"start/{leaf}": value.numpy() for leaf, value in START.items()})
ARRAYS.update({f"grads/{leaf}": value.numpy() for leaf, value in GRADS.items()})

case("sgd", lambda w: optim.SGD(w, lr=0.1))
case("sgd_momentum", lambda w: optim.SGD(w, lr=0.1, momentum=0.9))
case("sgd_nesterov", lambda w: optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True))
case("adagrad", lambda w: optim.Adagrad(w, lr=0.1))
case("adagrad_start", lambda w: optim.Adagrad(w, lr=0.1, initial_accumulator_value=0.1))
case("rmsprop", lambda w: optim.RMSprop(w, lr=0.01))
case("rmsprop_centred", lambda w: optim.RMSprop(w, lr=0.01, centered=True))
case("rmsprop_momentum", lambda w: optim.RMSprop(w, lr=0.01, momentum=0.9))
case("adadelta", lambda w: optim.Adadelta(w, lr=1.0))
case("adam", lambda w: optim.Adam(w, lr=0.01))
case("amsgrad", lambda w: optim.Adam(w, lr=0.01, amsgrad=True))
case("adamw", lambda w: optim.AdamW(w, lr=0.01, weight_decay=0.1))
case("nadam", lambda w: optim.NAdam(w, lr=0.01))
case("radam", lambda w: optim.RAdam(w, lr=0.01))
case("adamax", lambda w: optim.Adamax(w, lr=0.01))
case("rprop", lambda w: optim.Rprop(w, lr=0.01))
case("adafactor", lambda w: optim.Adafactor(w))
case("adafactor_decay", lambda w: optim.Adafactor(w, lr=0.3, weight_decay=0.1))
case("l2", lambda w: optim.Adam(w, lr=0.01, weight_decay=0.1))
case("clip_global", lambda w: optim.Adam(w, lr=0.01), clip=lambda w: clip_grad_norm_(w, 1.0))
case("clip_value", lambda w: optim.Adam(w, lr=0.01), clip=lambda w: clip_grad_value_(w, 0.5))

np.savez_compressed(Path(__file__).with_name("optim.npz"), **ARRAYS)
