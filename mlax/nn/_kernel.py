"""The variables that a convolution and a transposed convolution share."""

from typing import Any

import jax

from mlax._jax import named_key
from mlax.ops import Layout, check_groups, check_kernel, layout_of


def kernel_and_bias(layer: Any, rng: jax.Array, x: Any, axes: Layout, window: tuple[int, ...]) -> dict[str, jax.Array]:
    """The kernel (outputs, *window, inputs / groups), in the order of the layout, and the bias if there is one."""
    channels, groups = x.shape[axes.channel], groups_of(layer, x)
    check_groups(f"{layer}", groups, channels, layer.features)
    shape = axes.kernel_shape(layer.features, channels // groups, window)
    dtype = layer.param_dtype or x.dtype
    trainables = {
        "kernel": layer.kernel_init(named_key(rng, "kernel"), shape, dtype, in_axis=axes.inputs, out_axis=axes.outputs)
    }
    if layer.bias:
        trainables["bias"] = layer.bias_init(named_key(rng, "bias"), (layer.features,), dtype)
    return trainables


def check_channels(layer: Any, x: Any, trainables: Any) -> None:
    """Refuse a kernel that is not for the channels of `x`, with the layout that it would be for."""
    if isinstance(trainables, dict) and "kernel" in trainables:
        axes = layout_of(f"{layer}", layer.layout, x)
        check_kernel(f"{layer}", x, trainables["kernel"], axes, groups_of(layer, x))


def groups_of(layer: Any, x: Any) -> int:
    """The number of groups: as it is given, or one for each channel if it is "depthwise"."""
    return x.shape[layout_of(f"{layer}", layer.layout, x).channel] if layer.groups == "depthwise" else layer.groups
