"""Forms of convolutions and pooling over images that run faster, above all on a GPU.

As in `_cpu.py`, each has a predicate, `prefers_...`, which reads the backend while tracing.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from mlax._jax import explicit_sharding, is_narrow
from mlax.ops._layout import Layout, parse_layout
from mlax.ops._windows import Windows

MAX_FOLDED_CHANNELS = 4  # of images; from 8 on cuDNN has fast kernels for convolutions with strides
TENSOR_CORE = 8  # channels that it takes at a time
NOWHERE = 255  # the index of no element of a window


def is_gpu() -> bool:
    """Whether JAX computes on a GPU by default."""
    return jax.default_backend() == "gpu"


def prefers_gathered_pool_grad(x: Array, windows: Windows) -> bool:
    """Whether the gradient of a max pooling is gathered (benchmarks/images.py).

    Of windows that overlap, it is on a GPU, and on a CPU before JAX 0.11: there XLA takes up to ten times as long for
    the transpose of slices. Not over explicit mesh axes, since axes are split.
    """
    is_disjoint = all(stride >= window for stride, window in zip(windows.strides, windows.window, strict=True))
    is_faster = is_disjoint or is_gpu() or jax.__version_info__ < (0, 11)
    return is_faster and max(windows.dilation) == 1 and explicit_sharding(x) is None


def prefers_fused_max(x: Array) -> bool:
    """Whether the value of a max pooling without a gradient is `reduce_window`: on a CPU.

    XLA then computes it in one kernel with the convolutions before and after it (the CNN of benchmarks/layers.py).
    """
    return jax.default_backend() == "cpu" and x.dtype == jnp.float32


def gather_pool_grad(argmax: Array, y_grad: Array, shape: tuple[int, ...], axes: Layout, windows: Windows) -> Array:
    """The gradient of a max pooling with respect to an input of `shape`, from the index of the maximum in each window.

    Each element of the input reads the few windows that it is in. By the transpose of slices it would be the sum of as
    many arrays, with zeros between their elements, as a window has elements.
    """
    strides = [1] * len(shape)
    for axis, stride in zip(axes.spatial, windows.strides, strict=True):
        strides[axis] = stride
    blocks = [-(-size // stride) for size, stride in zip(shape, strides, strict=True)]  # of the input, a stride each
    reach = [-(-window // stride) for window, stride in zip(windows.window, windows.strides, strict=True)]
    padded = [_pad_windows(*each, reach, blocks, axes) for each in ((argmax, NOWHERE), (y_grad, 0))]
    total: Any = None
    for back in itertools.product(*map(range, reach)):  # how many blocks before the element's own its window starts
        index, grad = (_shift(each, back, reach, blocks, axes) for each in padded)
        part = jnp.where(index == _numbers(back, index.ndim, axes, windows), grad, np.zeros((), grad.dtype))
        total = part if total is None else total + part
    whole = [block * stride for block, stride in zip(blocks, strides, strict=True)]
    return lax.slice(lax.reshape(total, whole), [0] * len(shape), shape)


def _pad_windows(x: Array, fill: int, reach: list[int], blocks: list[int], axes: Layout) -> Array:
    """`x`, an entry a window, with entries of `fill` before the first and after the last."""
    widths = [(0, 0, 0)] * x.ndim
    for axis, distance in zip(axes.spatial, reach, strict=True):
        widths[axis] = (distance - 1, blocks[axis] - x.shape[axis], 0)
    return lax.pad(x, np.asarray(fill, x.dtype), widths)


def _shift(x: Array, back: tuple[int, ...], reach: list[int], blocks: list[int], axes: Layout) -> Array:
    """The entry, for each block, of the window that starts `back` blocks before, with an axis after each."""
    for axis, distance, most in zip(axes.spatial, back, reach, strict=True):
        x = lax.slice_in_dim(x, most - 1 - distance, most - 1 - distance + blocks[axis], axis=axis)
    return lax.expand_dims(x, _block_axes(axes))


def _numbers(back: tuple[int, ...], rank: int, axes: Layout, windows: Windows) -> np.ndarray:
    """The index in its window of each element of a block, along the axes of a block; `NOWHERE` beyond the window."""
    place = np.meshgrid(
        *(np.arange(stride) + stride * distance for stride, distance in zip(windows.strides, back, strict=True)),
        indexing="ij",
    )
    is_inside = np.all([each < window for each, window in zip(place, windows.window, strict=True)], 0)
    number = np.ravel_multi_index(place, windows.window, mode="clip")
    number = np.where(is_inside, number, NOWHERE - 1).astype(np.uint8)
    return np.expand_dims(number, [axis for axis in range(rank) if axis not in _block_axes(axes)])


def _block_axes(axes: Layout) -> list[int]:
    """The axes over the elements of a block, one after each spatial axis."""
    return [axis + number + 1 for number, axis in enumerate(axes.spatial)]


def prefers_folded_strides(x: Array, axes: Layout, windows: Windows, groups: int) -> bool:
    """Whether a convolution of images with strides is computed by `fold_strides`."""
    return (
        is_gpu()
        and groups == 1
        and is_narrow(x.dtype)
        and x.shape[axes.channel] <= MAX_FOLDED_CHANNELS
        and axes == parse_layout("conv", "channel_last", x)
        and min(windows.strides) > 1
        and max(windows.dilation) == 1
        and explicit_sharding(x) is None
    )


def fold_strides(x: Array, kernel: Array, windows: Windows) -> tuple[Array, Array, Windows]:
    """A channel-last convolution with strides, as the input, the kernel and the windows of one without.

    The elements of a stride are channels of it (space to depth), as many as a tensor core takes: cuDNN has no fast
    kernels for the 3 channels of an image.
    """
    images, weights = [(0, 0, 0)] * x.ndim, [(0, 0, 0)] * x.ndim
    for number, ((low, _), size) in enumerate(zip(windows.padding, x.shape[1:-1], strict=True)):
        count, window, stride, _ = windows.along(number)
        blocks = -(-window // stride)
        images[1 + number] = (low, (count - 1 + blocks) * stride - low - size, 0)
        weights[1 + number] = (0, blocks * stride - window, 0)
    x, kernel = _fold(x, images, windows.strides), _fold(kernel, weights, windows.strides)
    ones, none = (1,) * len(windows.window), ((0, 0),) * len(windows.window)
    return x, kernel, windows._replace(window=kernel.shape[1:-1], strides=ones, padding=none)


def _fold(x: Array, widths: list[tuple[int, int, int]], strides: tuple[int, ...]) -> Array:
    """`x`, padded, with each block of a stride along its inner axes as one element, and its elements as channels."""
    zero = np.zeros((), x.dtype)
    x = lax.pad(x, zero, widths)
    first, *sizes, channels = x.shape
    split = [part for size, stride in zip(sizes, strides, strict=True) for part in (size // stride, stride)]
    rank = len(strides)
    order = [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1]
    x = lax.transpose(lax.reshape(x, (first, *split, channels)), order)
    x = lax.reshape(x, (*x.shape[: rank + 1], math.prod(strides) * channels))
    return lax.pad(x, zero, [(0, 0, 0)] * (rank + 1) + [(0, -x.shape[-1] % TENSOR_CORE, 0)])
