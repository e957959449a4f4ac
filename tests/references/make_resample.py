"""Write resample.npz, what PyTorch computes: `python tests/references/make_resample.py`, with PyTorch 2.13 on a CPU.

Every array is named `case/name`. Gradients are those of the sum of the outputs times `g`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

CASES = {
    "nearest_line": (nn.Upsample(scale_factor=3), (2, 3, 4)),
    "nearest_plane": (nn.Upsample(scale_factor=(2, 3)), (2, 3, 4, 5)),
    "nearest_volume": (nn.Upsample(scale_factor=2), (1, 2, 2, 3, 2)),
    "linear_line": (nn.Upsample(scale_factor=3, mode="linear"), (2, 3, 4)),
    "linear_plane": (nn.Upsample(scale_factor=(2, 3), mode="bilinear"), (2, 3, 4, 5)),
    "linear_aligned": (nn.Upsample(scale_factor=(2, 3), mode="bilinear", align_corners=True), (2, 3, 4, 5)),
    "linear_one": (nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), (2, 3, 1, 2)),
    "linear_volume": (nn.Upsample(scale_factor=2, mode="trilinear"), (1, 2, 2, 3, 2)),
    "shuffle": (nn.PixelShuffle(3), (2, 18, 2, 4)),
    "unshuffle": (nn.PixelUnshuffle(3), (2, 2, 6, 9)),
    "response_odd": (nn.LocalResponseNorm(3, alpha=0.5, beta=0.6, k=1.5), (2, 7, 3, 2)),
    "response_even": (nn.LocalResponseNorm(4), (2, 7, 3)),
}


def keep(found, case, **tensors):
    found.update({f"{case}/{name}": tensor.detach().numpy().copy() for name, tensor in tensors.items()})


def main():
    torch.manual_seed(0)
    found = {}
    for case, (module, shape) in CASES.items():
        x = torch.randn(*shape, requires_grad=True)
        y = module(x)
        g = torch.randn(*y.shape)
        (y * g).sum().backward()
        keep(found, case, x=x, y=y, g=g, d_x=x.grad)
    module = nn.BatchNorm1d(3, momentum=None)
    for step in range(3):
        x = torch.randn(5, 3) * (1.0 + step) + step
        module(x)
        keep(found, f"cumulative/{step}", x=x, mean=module.running_mean, var=module.running_var)
    np.savez_compressed(Path(__file__).with_name("resample.npz"), **found)


if __name__ == "__main__":
    main()
