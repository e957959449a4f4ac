"""Makes conv.npz: what PyTorch computes for the cases in it. Run with a Python that has torch and numpy."""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

CONVS = {  # batch, channels, sizes, features, window; the rest as PyTorch's
    "conv_line": ((2, 3, (9,)), 4, (3,), {"stride": 2, "padding": 1}),
    "conv_plane": ((2, 3, (7, 5)), 4, (3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
    "conv_groups": ((2, 4, (5, 6)), 6, (3, 3), {"padding": 2, "groups": 2}),
    "conv_depthwise": ((1, 3, (6, 1)), 6, (3, 1), {"groups": 3}),
    "conv_volume": ((2, 2, (3, 4, 5)), 3, (2, 3, 2), {"stride": (1, 2, 2), "padding": (0, 1, 1)}),
    "conv_empty": ((0, 2, (4, 4)), 3, (2, 2), {}),
    "transpose_line": ((2, 3, (5,)), 4, (4,), {"stride": 3, "padding": 1, "output_padding": 2}),
    "transpose_plane": ((2, 3, (4, 3)), 4, (3, 2), {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 2)}),
    "transpose_groups": ((2, 4, (3, 3)), 6, (3, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    "transpose_volume": ((1, 2, (2, 3, 2)), 3, (2, 2, 2), {"stride": 2}),
    "transpose_one": ((2, 3, (1, 1)), 4, (2, 2), {"stride": 2}),
}

POOLS = {
    "max_line": ("max", (2, 3, (9,)), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "max_plane": ("max", (2, 3, (7, 5)), {"kernel_size": 2}),
    "max_overlap": ("max", (2, 3, (7, 6)), {"kernel_size": 3, "stride": (2, 1), "padding": 1}),
    "max_dilated": ("max", (1, 2, (7, 8)), {"kernel_size": (3, 2), "stride": 1, "dilation": (2, 3)}),
    "max_ceil": ("max", (2, 2, (6, 7)), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "max_volume": ("max", (1, 2, (4, 3, 5)), {"kernel_size": (2, 1, 3), "stride": (2, 1, 2)}),
    "max_wide": ("max", (1, 1, (90,)), {"kernel_size": 34, "stride": 3, "padding": 17}),
    "max_apart": ("max", (1, 1, (80,)), {"kernel_size": 36}),
    "max_empty": ("max", (0, 2, (4, 4)), {"kernel_size": 2}),
    "mean_line": ("avg", (2, 3, (9,)), {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    "mean_plane": ("avg", (2, 3, (7, 5)), {"kernel_size": (3, 2), "padding": (1, 1), "count_include_pad": True}),
    "mean_ceil": ("avg", (2, 2, (6, 7)), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    "mean_volume": ("avg", (1, 2, (4, 3, 5)), {"kernel_size": 2, "stride": 1}),
    "mean_wide": ("avg", (1, 1, (80,)), {"kernel_size": 34, "stride": 3}),
}

ADAPTIVE = {
    "adaptive_mean": ("avg", (2, 3, (7, 5)), (3, 2)),
    "adaptive_even": ("avg", (2, 3, (6, 4)), (3, 2)),
    "adaptive_larger": ("avg", (1, 2, (3, 4)), (5, 4)),
    "adaptive_max": ("max", (2, 3, (7, 5)), (3, 4)),
    "adaptive_max_line": ("max", (2, 3, (11,)), (4,)),
    "adaptive_max_volume": ("max", (1, 2, (3, 5, 4)), (2, 3, 1)),
}


def main() -> None:
    """Write the file beside this script."""
    draws = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}

    def tensor(*shape: int, ties: bool = False) -> torch.Tensor:
        values = draws.integers(-1, 2, shape) if ties else draws.normal(size=shape)
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    def keep(case: str, inputs: dict[str, torch.Tensor], y: torch.Tensor) -> None:
        weight = torch.tensor(draws.normal(size=y.shape))
        found[f"{case}/y"], found[f"{case}/weight"] = y.detach().numpy(), weight.numpy()
        grads = torch.autograd.grad((y * weight).sum(), list(inputs.values()))
        for (name, value), grad in zip(inputs.items(), grads, strict=True):
            found[f"{case}/{name}"], found[f"{case}/d_{name}"] = value.detach().numpy(), grad.numpy()

    for case, ((batch, channels, sizes), features, window, options) in CONVS.items():
        kind = "conv_transpose" if case.startswith("transpose") else "conv"
        groups = options.get("groups", 1)
        if kind == "conv":
            kernel = tensor(features, channels // groups, *window)
        else:
            kernel = tensor(channels, features // groups, *window)
        inputs = {"x": tensor(batch, channels, *sizes), "kernel": kernel, "bias": tensor(features)}
        keep(case, inputs, getattr(functional, f"{kind}{len(sizes)}d")(*inputs.values(), **options))
    for case, (kind, (batch, channels, sizes), options) in POOLS.items():
        x = tensor(batch, channels, *sizes, ties=kind == "max")
        keep(case, {"x": x}, getattr(functional, f"{kind}_pool{len(sizes)}d")(x, **options))
    for case, (kind, (batch, channels, sizes), size) in ADAPTIVE.items():
        x = tensor(batch, channels, *sizes, ties=kind == "max")
        keep(case, {"x": x}, getattr(functional, f"adaptive_{kind}_pool{len(sizes)}d")(x, size))
    x = tensor(2, 3, 6, 5)
    keep("unfold", {"x": x}, functional.unfold(x, (3, 2), dilation=(1, 2), padding=(1, 0), stride=(2, 1)))
    for mode in ("circular", "reflect", "replicate"):
        x = tensor(2, 3, 5, 4)
        keep(f"pad_{mode}", {"x": x}, functional.pad(x, (2, 1, 3, 0), mode))
    np.savez_compressed(Path(__file__).with_name("conv.npz"), **found)


if __name__ == "__main__":
    main()
