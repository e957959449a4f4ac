"""Rows of convolution and pooling, and their definitions as loops over windows."""

import itertools
import math

import jax.numpy as jnp
import numpy as np

import mlax
from mlax import nn
from tests.catalogue.row import LayerRow


def cut(x, window, strides, pads, dilation=None, fill=0.0, mode="constant"):
    """Each window of (b, *spatial, c), as (b, *windows, *window, c)."""
    rank = len(window)
    dilation = dilation or (1,) * rank
    values = {"constant_values": fill} if mode == "constant" else {}
    x = np.pad(x, [(0, 0), *pads, (0, 0)], mode, **values)
    spans = [(size - 1) * rate + 1 for size, rate in zip(window, dilation, strict=True)]
    counts = [(x.shape[1 + a] - spans[a]) // strides[a] + 1 for a in range(rank)]
    out = np.empty((x.shape[0], *counts, *window, x.shape[-1]))
    for place in np.ndindex(*counts):
        starts = [at * stride for at, stride in zip(place, strides, strict=True)]
        inside = tuple(slice(s, s + n, d) for s, n, d in zip(starts, spans, dilation, strict=True))
        out[(slice(None), *place)] = x[(slice(None), *inside)]
    return out


def conv(x, kernel, bias, strides, pads, dilation=None, groups=1, mode="constant"):
    """Of (b, *spatial, c) by (f, *window, c / groups)."""
    window = kernel.shape[1:-1]
    cuts = cut(x, window, strides, pads, dilation, mode=mode)
    rank, share, features = len(window), kernel.shape[-1], kernel.shape[0] // groups
    made = [
        np.tensordot(
            cuts[..., group * share : (group + 1) * share],
            kernel[group * features : (group + 1) * features],
            (range(rank + 1, 2 * rank + 2), range(1, rank + 2)),
        )
        for group in range(groups)
    ]
    return np.concatenate(made, -1) + bias


def conv_transpose(x, kernel, bias, strides, cuts, extra=None, dilation=None, groups=1):
    """One window for each place of (b, *spatial, c), by (f, *window, c / groups)."""
    rank = x.ndim - 2
    dilation, extra = dilation or (1,) * rank, extra or (0,) * rank
    spans = [(size - 1) * rate + 1 for size, rate in zip(kernel.shape[1:-1], dilation, strict=True)]
    sizes = [(n - 1) * s + k + e for n, s, k, e in zip(x.shape[1:-1], strides, spans, extra, strict=True)]
    y = np.zeros((x.shape[0], *sizes, kernel.shape[0]))
    share, features = kernel.shape[-1], kernel.shape[0] // groups
    for place, offset in itertools.product(np.ndindex(*x.shape[1:-1]), np.ndindex(*kernel.shape[1:-1])):
        target = tuple(p * s + o * d for p, s, o, d in zip(place, strides, offset, dilation, strict=True))
        for group in range(groups):
            made = slice(group * features, (group + 1) * features)
            taken = x[(slice(None), *place, slice(group * share, (group + 1) * share))]
            y[(slice(None), *target, made)] += taken @ kernel[(made, *offset)].T
    kept = tuple(slice(low, size - high) for size, (low, high) in zip(sizes, cuts, strict=True))
    return y[(slice(None), *kept)] + bias


def pool(x, reduce, window, strides, pads, dilation=None, fill=0.0):
    """Each window of (b, *spatial, c) by a NumPy reduction over axes."""
    cuts = cut(x, window, strides, pads, dilation, fill)
    return reduce(cuts, axis=tuple(range(x.ndim - 1, 2 * x.ndim - 3)))


def adaptive(x, reduce, sizes):
    """Each of PyTorch's bins of (b, *spatial, c) by a NumPy reduction over axes."""
    y = np.empty((x.shape[0], *sizes, x.shape[-1]))
    for place in np.ndindex(*sizes):
        bins = zip(place, x.shape[1:-1], sizes, strict=True)
        inside = tuple(slice(i * n // m, math.ceil((i + 1) * n / m)) for i, n, m in bins)
        y[(slice(None), *place)] = reduce(x[(slice(None), *inside)], axis=tuple(range(1, x.ndim - 1)))
    return y


def last(x):
    """Channel-first to channel-last, of an input or of a kernel."""
    return np.moveaxis(x, 1, -1)


def first(x):
    """Channel-last to channel-first."""
    return np.moveaxis(x, -1, 1)


def shapes(kernel, features):
    return {"kernel": kernel, "bias": (features,)}, {}


def log_add(a, b):
    return jnp.logaddexp(a, b)


NORMAL = mlax.Normal(1.0)

ROWS = {
    "Conv": LayerRow(
        lambda dtype: nn.Conv(4, (3, 2), bias_init=NORMAL),
        (2, 5, 4, 3),
        shapes((4, 3, 2, 3), 4),
        lambda x, w: conv(x, w["kernel"], w["bias"], (1, 1), [(1, 1), (0, 1)]),
        tolerance=3e-6,
    ),
    "Conv grouped": LayerRow(
        lambda dtype: nn.Conv(
            6, 3, strides=2, padding="CAUSAL", dilation=2, groups=2, layout="channel_first", bias_init=NORMAL
        ),
        (2, 4, 9),
        shapes((6, 2, 3), 6),
        lambda x, w: first(conv(last(x), last(w["kernel"]), w["bias"], (2,), [(4, 0)], (2,), groups=2)),
        tolerance=3e-6,
        variant=True,
    ),
    "Conv depthwise": LayerRow(
        lambda dtype: nn.Conv(6, 3, pad_with="circular", groups="depthwise", bias=False),
        (2, 4, 5, 3),
        ({"kernel": (6, 3, 3, 1)}, {}),
        lambda x, w: conv(x, w["kernel"], 0, (1, 1), [(1, 1), (1, 1)], groups=3, mode="wrap"),
        tolerance=3e-6,
        variant=True,
    ),
    "Conv volume": LayerRow(
        lambda dtype: nn.Conv(
            3, 2, strides=(1, 2, 1), padding=((1, 0), 1, 0), pad_with="reflect", layout="NDHWC/DHWIO", bias_init=NORMAL
        ),
        (2, 3, 4, 3, 2),
        shapes((2, 2, 2, 2, 3), 3),
        lambda x, w: conv(
            x, np.moveaxis(w["kernel"], -1, 0), w["bias"], (1, 2, 1), [(1, 0), (1, 1), (0, 0)], mode="reflect"
        ),
        tolerance=3e-6,
        variant=True,
    ),
    "ConvTranspose": LayerRow(
        lambda dtype: nn.ConvTranspose(4, 3, strides=2, bias_init=NORMAL),
        (2, 3, 4, 3),
        shapes((4, 3, 3, 3), 4),
        lambda x, w: conv_transpose(x, w["kernel"], w["bias"], (2, 2), [(0, 1), (0, 1)]),
        tolerance=3e-6,
    ),
    "ConvTranspose grouped": LayerRow(
        lambda dtype: nn.ConvTranspose(
            6,
            3,
            strides=3,
            padding=((1, 2),),
            output_padding=1,
            dilation=2,
            groups=2,
            layout="channel_first",
            bias_init=NORMAL,
        ),
        (2, 4, 5),
        shapes((6, 2, 3), 6),
        lambda x, w: first(conv_transpose(last(x), last(w["kernel"]), w["bias"], (3,), [(1, 2)], (1,), (2,), groups=2)),
        tolerance=3e-6,
        variant=True,
    ),
    "Patches": LayerRow(
        lambda dtype: nn.Patches((2, 3), strides=(2, 1), padding="SAME"),
        (2, 5, 4, 3),
        ({}, {}),
        lambda x, w: cut(x, (2, 3), (2, 1), [(0, 1), (1, 1)]).reshape(2, 3, 4, 18),
        no_sums="it sums nothing",
    ),
    "Patches apart": LayerRow(
        lambda dtype: nn.Patches(2, layout="channel_first"),
        (2, 3, 5, 4),
        ({}, {}),
        lambda x, w: np.einsum("bhwijc->bcijhw", cut(last(x), (2, 2), (2, 2), [(0, 0)] * 2)).reshape(2, 12, 2, 2),
        variant=True,
    ),
    "Pool": LayerRow(
        lambda dtype: nn.Pool(log_add, -math.inf, 3, strides=1, padding="SAME"),
        (2, 5, 4, 3),
        ({}, {}),
        lambda x, w: pool(x, np.logaddexp.reduce, (3, 3), (1, 1), [(1, 1), (1, 1)], fill=-math.inf),
        tolerance=3e-6,
        no_forward_mode="the tangent of jnp.logaddexp at (-inf, -inf), as in the padding, is NaN",
        no_second_derivatives="the same",
    ),
    "MaxPool": LayerRow(
        lambda dtype: nn.MaxPool(2),
        (2, 5, 4, 3),
        ({}, {}),
        lambda x, w: pool(x, np.max, (2, 2), (2, 2), [(0, 0), (0, 0)]),
        no_sums="it sums nothing",
    ),
    "MaxPool overlapping": LayerRow(
        lambda dtype: nn.MaxPool((3, 2), strides=(2, 1), padding="SAME", layout="channel_first"),
        (2, 3, 5, 4),
        ({}, {}),
        lambda x, w: first(pool(last(x), np.max, (3, 2), (2, 1), [(1, 1), (0, 1)], fill=-math.inf)),
        variant=True,
    ),
    "SumPool": LayerRow(
        lambda dtype: nn.SumPool(3, strides=1, dilation=2),
        (2, 7, 3),
        ({}, {}),
        lambda x, w: pool(x, np.sum, (3,), (1,), [(0, 0)], (2,)),
    ),
    "MeanPool": LayerRow(
        lambda dtype: nn.MeanPool(3, strides=2, padding=1, ceil=True),
        (2, 6, 5, 3),
        ({}, {}),
        lambda x, w: pool(x, np.nanmean, (3, 3), (2, 2), [(1, 2), (1, 1)], fill=math.nan),
    ),
    "GlobalPool": LayerRow(
        lambda dtype: nn.GlobalPool(), (2, 4, 5, 3), ({}, {}), lambda x, w: x.mean((1, 2)), large=(2, 400, 400, 3)
    ),
    "GlobalPool max": LayerRow(
        lambda dtype: nn.GlobalPool(by="max", keep_axes=True, layout="channel_first"),
        (2, 3, 4, 5),
        ({}, {}),
        lambda x, w: x.max((2, 3), keepdims=True),
        variant=True,
    ),
    "AdaptivePool": LayerRow(
        lambda dtype: nn.AdaptivePool((3, None)),
        (2, 7, 4, 3),
        ({}, {}),
        lambda x, w: adaptive(x, np.mean, (3, 4)),
        large=(2, 4000, 40, 3),
    ),
    "AdaptivePool max": LayerRow(
        lambda dtype: nn.AdaptivePool((3, 2), by="max"),
        (2, 7, 4, 3),
        ({}, {}),
        lambda x, w: adaptive(x, np.max, (3, 2)),
        variant=True,
    ),
    "Upsample": LayerRow(
        lambda dtype: nn.Upsample((2, 3)),
        (2, 3, 4, 3),
        ({}, {}),
        lambda x, w: x.repeat(2, 1).repeat(3, 2),
        no_sums="it sums nothing",
    ),
    "Upsample linear": LayerRow(
        lambda dtype: nn.Upsample(2, by="linear", align_corners=True),
        (2, 5, 3),
        ({}, {}),
        lambda x, w: np.apply_along_axis(lambda line: np.interp(np.linspace(0, 4, 10), range(5), line), 1, x),
        variant=True,
    ),
    "PixelShuffle": LayerRow(
        lambda dtype: nn.PixelShuffle(2),
        (2, 3, 4, 8),
        ({}, {}),
        lambda x, w: np.einsum("bhwcij->bhiwjc", x.reshape(2, 3, 4, 2, 2, 2)).reshape(2, 6, 8, 2),
        no_sums="it sums nothing",
    ),
    "PixelUnshuffle": LayerRow(
        lambda dtype: nn.PixelUnshuffle(2),
        (2, 6, 8, 2),
        ({}, {}),
        lambda x, w: np.einsum("bhiwjc->bhwcij", x.reshape(2, 3, 2, 4, 2, 2)).reshape(2, 3, 4, 8),
        no_sums="it sums nothing",
    ),
}
