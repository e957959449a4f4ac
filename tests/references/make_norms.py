"""Write norms.npz, what PyTorch computes: `python tests/references/make_norms.py`, with PyTorch 2.13 on a CPU.

Every array is named `case/name`. Gradients are those of the sum of the outputs times `g`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

ARRAYS = {}


def keep(case, **tensors):
    ARRAYS.update({f"{case}/{name}": value.detach().numpy().copy() for name, value in tensors.items()})


def draw(*shape, mean=0.0, std=1.0):
    return torch.randn(*shape) * std + mean


def set_weights(module):
    """Replace the ones and zeros of the initial weights."""
    for weight in module.parameters():
        weight.data = draw(*weight.shape, mean=0.5)


def gradients(module, x, name, case):
    """The output, and the gradients of sum(output * g) with respect to the input and to each weight."""
    x = x.requires_grad_()
    module.zero_grad()
    y = module(x)
    g = draw(*y.shape)
    (y * g).sum().backward()
    weights = {f"d_{weight_name}": weight.grad for weight_name, weight in module.named_parameters()}
    keep(f"{case}/{name}", x=x, y=y, g=g, d_x=x.grad, **weights)


def plain(case, module, *shape):
    set_weights(module)
    keep(case, **dict(module.named_parameters()))
    gradients(module, draw(*shape, mean=0.7, std=2.0), "0", case)


def batch_norm(case, module, *shape, steps=3):
    set_weights(module)
    keep(case, **dict(module.named_parameters()))
    for step in range(steps):
        gradients(module, draw(*shape, mean=step - 0.5, std=1.0 + step), str(step), case)
        keep(f"{case}/{step}", running_mean=module.running_mean, running_var=module.running_var)
    gradients(module.eval(), draw(*shape, mean=0.3), "eval", case)


def weight_norm(case, module, dim, *shape):
    nn.utils.parametrizations.weight_norm(module, dim=dim)
    set_weights(module)
    pair = module.parametrizations.weight
    keep(case, magnitude=pair.original0, direction=pair.original1, bias=module.bias)
    gradients(module, draw(*shape), "0", case)


def spectral_norm(case, module, *shape, iterations=1, steps=3):
    nn.utils.parametrizations.spectral_norm(module, n_power_iterations=iterations)
    vectors, kernel = module.parametrizations.weight[0], module.parametrizations.weight.original
    keep(case, left=vectors._u, right=vectors._v)
    for step in range(steps):
        kernel.data = draw(*kernel.shape)  # reading module.weight here would be a step of the power iteration
        keep(f"{case}/{step}", **dict(module.named_parameters()))
        gradients(module, draw(*shape), str(step), case)
        keep(f"{case}/{step}", left=vectors._u, right=vectors._v)
    module.eval()
    keep(f"{case}/eval", kernel=module.weight)


def alpha_dropout(rate):
    """The two values that 0 can become, and the two that 1 can."""
    values = [nn.functional.alpha_dropout(torch.full((1000,), x), rate, training=True).unique() for x in (0.0, 1.0)]
    keep(f"alpha_dropout {rate}", of_0=values[0], of_1=values[1])


torch.manual_seed(0)

batch_norm("batch_norm flat", nn.BatchNorm1d(6), 5, 6)
batch_norm("batch_norm image", nn.BatchNorm2d(3, momentum=0.3, eps=1e-3), 4, 3, 5, 2)
batch_norm("batch_norm narrow", nn.BatchNorm1d(3), 7, 3, 1)
batch_norm("batch_norm volume", nn.BatchNorm3d(2), 2, 2, 3, 1, 4)

plain("layer_norm", nn.LayerNorm(7), 3, 5, 7)
plain("layer_norm two axes", nn.LayerNorm((5, 7), eps=1e-3), 3, 5, 7)
plain("rms_norm", nn.RMSNorm(7, eps=1e-6), 3, 5, 7)
plain("rms_norm two axes", nn.RMSNorm((5, 7), eps=1e-3), 3, 5, 7)
plain("group_norm 1", nn.GroupNorm(1, 6), 3, 6, 5)
plain("group_norm 2", nn.GroupNorm(2, 6, eps=1e-3), 3, 6, 5, 3)
plain("group_norm 3 flat", nn.GroupNorm(3, 6), 4, 6)
plain("group_norm 6", nn.GroupNorm(6, 6), 2, 6, 1, 3, 2)
plain("instance_norm line", nn.InstanceNorm1d(5, affine=True), 3, 5, 7)
plain("instance_norm image", nn.InstanceNorm2d(5, affine=True, eps=1e-3), 3, 5, 1, 4)

weight_norm("weight_norm linear", nn.Linear(6, 5), 0, 4, 6)
weight_norm("weight_norm linear inputs", nn.Linear(6, 5), 1, 4, 6)
weight_norm("weight_norm conv", nn.Conv2d(3, 4, (2, 3)), 0, 2, 3, 5, 5)

spectral_norm("spectral_norm linear", nn.Linear(6, 5), 4, 6)
spectral_norm("spectral_norm linear twice", nn.Linear(6, 5), 4, 6, iterations=2)
spectral_norm("spectral_norm conv", nn.Conv2d(3, 4, (2, 3)), 2, 3, 5, 5, steps=2)

for rate in (0.1, 0.5, 0.9):
    alpha_dropout(rate)

np.savez_compressed(Path(__file__).with_name("norms.npz"), **ARRAYS)
