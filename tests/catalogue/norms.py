"""Rows of the norms and of the dropouts."""

import jax
import numpy as np

import mlax
from mlax import nn
from tests.catalogue.core import normed
from tests.catalogue.row import LayerRow


def grouped(x, w, groups):
    """Of (b, ..., c), over all but the batch and the group."""
    parts = np.moveaxis(x, -1, 1).reshape(x.shape[0], groups, -1)
    y = np.moveaxis(normed(parts).reshape(x.shape[0], x.shape[-1], *x.shape[1:-1]), 1, -1)
    return y * w.get("scale", 1) + w.get("shift", 0)


def first(values):
    """Channels first, for a (c,) weight and an input of four axes."""
    return values[:, None, None]


def spectral(kernel):
    return kernel / np.linalg.svd(kernel, compute_uv=False)[0]


AFFINE = {"scale": (6,), "shift": (6,)}
RUNNING = {"mean": (6,), "var": (6,)}

ROWS = {
    "BatchNorm": LayerRow(
        lambda dtype: nn.BatchNorm(),
        (5, 3, 6),
        (AFFINE, RUNNING),
        lambda x, w: x / np.sqrt(1 + 1e-5) * w["scale"] + w["shift"],
        tolerance=3e-6,
    ),
    "BatchNorm corrected": LayerRow(
        lambda dtype: nn.BatchNorm(axis=1, corrected=True, shift=False),
        (5, 6, 3, 2),
        ({"scale": (6,)}, {**RUNNING, "count": ()}),
        lambda x, w: x / np.sqrt(1 + 1e-5) * first(w["scale"]),
        tolerance=3e-6,
        variant=True,
    ),
    "BatchNorm cumulative": LayerRow(
        lambda dtype: nn.BatchNorm(momentum=None, scale=False),
        (5, 3, 6),
        ({"shift": (6,)}, {**RUNNING, "count": ()}),
        lambda x, w: x / np.sqrt(1 + 1e-5) + w["shift"],
        variant=True,
    ),
    "BatchNorm activation": LayerRow(
        lambda dtype: nn.BatchNorm(activation=jax.nn.relu),
        (5, 3, 6),
        (AFFINE, RUNNING),
        lambda x, w: np.maximum(x / np.sqrt(1 + 1e-5) * w["scale"] + w["shift"], 0),
        tolerance=3e-6,
        variant=True,
    ),
    "BatchNorm frozen": LayerRow(
        lambda dtype: nn.BatchNorm(frozen=True, scale=False, shift=False),
        (5, 3, 6),
        ({}, RUNNING),
        lambda x, w: x / np.sqrt(1 + 1e-5),
        variant=True,
    ),
    "LayerNorm": LayerRow(
        lambda dtype: nn.LayerNorm(),
        (4, 3, 6),
        ({"scale": (6,), "shift": (6,)}, {}),
        lambda x, w: normed(x, w["scale"], w["shift"]),
        tolerance=3e-6,
        large=(2, 2, 2**18),
    ),
    "RMSNorm": LayerRow(
        lambda dtype: nn.RMSNorm(),
        (4, 3, 6),
        ({"scale": (6,)}, {}),
        lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w["scale"],
        tolerance=3e-6,
        large=(2, 2, 2**18),
    ),
    "RMSNorm offset": LayerRow(
        lambda dtype: nn.RMSNorm(scale_offset=1.0),
        (4, 3, 6),
        ({"scale": (6,)}, {}),
        lambda x, w: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1.0 + w["scale"]),
        tolerance=3e-6,
        variant=True,
    ),
    "RMSNorm bare": LayerRow(
        lambda dtype: nn.RMSNorm(axes=(-2, -1), scale=False, eps=1e-2),
        (4, 3, 6),
        ({}, {}),
        lambda x, w: x / np.sqrt((x**2).mean((-2, -1), keepdims=True) + 1e-2),
        tolerance=3e-6,
        variant=True,
    ),
    "GroupNorm": LayerRow(
        lambda dtype: nn.GroupNorm(3),
        (4, 3, 2, 6),
        (AFFINE, {}),
        lambda x, w: grouped(x, w, 3),
        tolerance=3e-6,
        large=(2, 300, 300, 6),
    ),
    "GroupNorm channel-first": LayerRow(
        lambda dtype: nn.GroupNorm(2, axis=-3, shift=False),
        (4, 6, 3, 2),
        ({"scale": (6,)}, {}),
        lambda x, w: np.moveaxis(grouped(np.moveaxis(x, 1, -1), w, 2), -1, 1),
        tolerance=3e-6,
        variant=True,
    ),
    "InstanceNorm": LayerRow(
        lambda dtype: nn.InstanceNorm(),
        (4, 3, 2, 6),
        (AFFINE, {}),
        lambda x, w: normed(x, w["scale"], w["shift"], axes=(1, 2)),
        tolerance=3e-6,
        large=(2, 300, 300, 6),
    ),
    "InstanceNorm bare": LayerRow(
        lambda dtype: nn.InstanceNorm(axis=1, scale=False, shift=False),
        (4, 3, 8),
        ({}, {}),
        lambda x, w: normed(x, axes=2),
        tolerance=3e-6,
        variant=True,
    ),
    "LocalResponseNorm": LayerRow(
        lambda dtype: nn.LocalResponseNorm(3, alpha=0.5, beta=0.6, k=1.5),
        (2, 3, 6),
        ({}, {}),
        lambda x, w: (
            x / (1.5 + 0.5 / 3 * sum(np.pad(x**2, [(0, 0)] * 2 + [(1, 1)])[..., i : i + 6] for i in range(3))) ** 0.6
        ),
    ),
    "WeightNorm": LayerRow(
        lambda dtype: nn.WeightNorm(nn.Linear(5)),
        (4, 6),
        ({"kernel/direction": (6, 5), "kernel/magnitude": (1, 5), "bias": (5,)}, {}),
        lambda x, w: (
            x @ (w["kernel/direction"] / np.linalg.norm(w["kernel/direction"], axis=0) * w["kernel/magnitude"])
            + w["bias"]
        ),
    ),
    "SpectralNorm": LayerRow(
        lambda dtype: nn.SpectralNorm(nn.Linear(5), first_iterations=200),
        (4, 6),
        ({"kernel": (6, 5), "bias": (5,)}, {"kernel/left": (5,), "kernel/right": (6,)}),
        lambda x, w: x @ spectral(w["kernel"]) + w["bias"],
        no_second_derivatives="the singular vectors count as constants, which is exact for the first derivative only",
    ),
    "SpectralNorm of a Series": LayerRow(
        lambda dtype: nn.SpectralNorm(
            mlax.Series(up=nn.Linear(5), norm=nn.BatchNorm(scale=False, shift=False)), axis=0, first_iterations=200
        ),
        (4, 6),
        (
            {"up/kernel": (6, 5), "up/bias": (5,)},
            {"up/kernel/left": (6,), "up/kernel/right": (5,), "norm/mean": (5,), "norm/var": (5,)},
        ),
        lambda x, w: (x @ spectral(w["up/kernel"]) + w["up/bias"]) / np.sqrt(1 + 1e-5),
        tolerance=1e-5,
        variant=True,
    ),
    "Dropout": LayerRow(
        lambda dtype: nn.Dropout(0.3), (4, 6), ({}, {}), lambda x, w: x, needs_key=True, no_sums="it sums nothing"
    ),
    "ChannelDropout": LayerRow(
        lambda dtype: nn.ChannelDropout(0.3),
        (4, 3, 6),
        ({}, {}),
        lambda x, w: x,
        needs_key=True,
        no_sums="it sums nothing",
    ),
    "PathDropout": LayerRow(
        lambda dtype: nn.PathDropout(0.3),
        (4, 3, 6),
        ({}, {}),
        lambda x, w: x,
        needs_key=True,
        no_sums="it sums nothing",
    ),
    "AlphaDropout": LayerRow(
        lambda dtype: nn.AlphaDropout(0.3), (4, 6), ({}, {}), lambda x, w: x, needs_key=True, no_sums="it sums nothing"
    ),
}
