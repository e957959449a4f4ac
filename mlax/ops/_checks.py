"""Checks of arguments that several operations share."""

from typing import Any

import jax
import jax.numpy as jnp

from mlax.ops._layout import Layout


def check_same_dtype(name: str, **arrays: jax.Array | None) -> None:
    """Raise where JAX would silently promote one of the arrays; None is skipped."""
    dtypes = {argument: str(array.dtype) for argument, array in arrays.items() if array is not None}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{argument} is {dtype}" for argument, dtype in dtypes.items())
        raise TypeError(f"{name}: {found}; mlax never casts implicitly, so cast them to one dtype.")


def check_floating(name: str, x: Any) -> None:
    """Raise for integers, whose sums overflow and whose means are not integers."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name}: the input {x.shape} is {x.dtype}, but must have a floating dtype; cast it, for example by "
            "x.astype(jnp.float32)."
        )


def check_kernel(name: str, x: Any, kernel: Any, axes: Layout, groups: int) -> None:
    """Raise if the kernel does not fit the channels of `x`."""
    if kernel.ndim != x.ndim:
        raise ValueError(
            f"{name}: the input {x.shape} has {x.ndim} axes but the kernel {kernel.shape} has {kernel.ndim}"
            f"{_missing_axis_hint(x, kernel, axes, groups)}."
        )
    channels = kernel.shape[axes.inputs] * groups
    if channels != x.shape[axes.channel]:
        factor = f", times {groups} groups," if groups != 1 else ""
        raise ValueError(
            f"{name}: the input has the shape {x.shape} but the kernel {kernel.shape}: the size of its axis "
            f"{axes.inputs}{factor} must be that of axis {axes.channel} of the input."
            f"{_layout_hint(x.shape, channels, axes.channel)}"
        )
    check_groups(name, groups, x.shape[axes.channel], kernel.shape[axes.outputs])


def check_groups(name: str, groups: int, channels: int, features: int) -> None:
    """Raise if the groups do not divide the channels and the features."""
    if type(groups) is not int or groups < 1 or channels % groups or features % groups:
        raise ValueError(
            f"{name}: groups is {groups}, but must be an integer that divides the {channels} channels of the "
            f"input and the {features} features."
        )


def _missing_axis_hint(x: Any, kernel: Any, axes: Layout, groups: int) -> str:
    """The axis to add to an input that has one axis less than the kernel."""
    if kernel.ndim != x.ndim + 1:
        return ""
    is_last = axes.channel == x.ndim - 1
    channels = kernel.shape[-1 if is_last else 1] * groups
    if channels == 1:
        return f": the input has no channel axis; pass x[{'..., None' if is_last else ':, None'}]"
    return ": the input has no batch axis; pass x[None]" if x.shape[-1 if is_last else 0] == channels else ""


def _layout_hint(shape: tuple[int, ...], channels: int, axis: int) -> str:
    """The layout in which an input of this shape would fit, as a sentence; empty if there is none."""
    for position, layout, other in (("first", "channel_first", 1), ("last", "channel_last", len(shape) - 1)):
        if shape[other] == channels and other != axis:
            return f" If the channels come {position}: layout={layout!r}."
    return ""
