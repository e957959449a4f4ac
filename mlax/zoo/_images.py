"""What the vision models share: normalized pixels, labels in a config.json, and tables of positions on a grid."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mlax.core import check_is_dtype
from mlax.zoo._config import Config

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MAX_STAGES, MAX_BLOCKS = 8, 1000


def normalize_images(
    images: Any,
    *,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    dtype: Any = np.float32,
) -> jax.Array:
    """Normalize the pixels of images (b, h, w, 3) by ImageNet's mean and standard deviation, as pretrained models want.

    Pixels are uint8 from 0 to 255, or floating from 0 to 1. Other means and deviations, such as (0.5, 0.5, 0.5), are in
    the preprocessor_config.json of a model on Hugging Face. Call it inside `jit`, where it is fused.

    >>> zoo.normalize_images(jnp.zeros((8, 224, 224, 3), "uint8")).shape
    (8, 224, 224, 3)
    """
    check_is_dtype("normalize_images", dtype=dtype)
    x = jnp.asarray(images)
    if x.ndim < 1 or x.shape[-1] != len(mean) or len(mean) != len(std):
        raise ValueError(
            f"normalize_images: the images are {x.shape}, with {len(mean)} means and {len(std)} deviations, but must "
            "have as many channels, on the last axis."
        )
    _check_pixels(x)
    largest = 1.0 if jnp.issubdtype(x.dtype, jnp.floating) else 255.0
    scale = np.asarray(1 / (largest * np.asarray(std)), dtype)
    shift = np.asarray(-np.asarray(mean) / np.asarray(std), dtype)
    return x.astype(dtype) * scale + shift


def _check_pixels(x: jax.Array) -> None:
    """Raise for pixels of unknown range and, unless they are traced, for floating ones from 0 to 255."""
    if x.dtype != np.uint8 and not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"normalize_images: the images are {x.dtype}, but must be uint8, from 0 to 255, or floating, from 0 to 1; "
            "cast them by images.astype('uint8'), or divide them by their largest value."
        )
    if x.dtype == np.uint8 or isinstance(x, Tracer) or not x.is_fully_addressable or not x.size:
        return
    if x.max() > 2:  # not 1, which bicubic interpolation exceeds
        raise ValueError(
            f"normalize_images: the images are {x.dtype} up to {x.max():g}, but must be from 0 to 1; divide them by "
            "255, or pass uint8."
        )


def check_images(model: str, images: Any, channels: int | None = None) -> None:
    """Raise for images that are not (b, h, w, channels), such as PyTorch's (b, c, h, w); None: any channels."""
    shape, usual = images.shape, (1, 3) if channels is None else (channels,)
    if len(shape) == 4 and (shape[3] in usual or (channels is None and shape[1] not in usual)):
        return
    hint = ""
    if len(shape) == 4 and shape[1] in usual:
        hint = "; channels come last: images.transpose(0, 2, 3, 1)"
    elif len(shape) == 3 and shape[2] in usual:
        hint = "; add a batch axis: images[None]"
    elif len(shape) == 3 and shape[0] in usual:
        hint = "; channels come last, after a batch axis: images.transpose(1, 2, 0)[None]"
    elif len(shape) == 3 and 1 in usual:
        hint = "; add an axis of channels: images[..., None]"
    raise ValueError(f"{model}: the images are {shape}, but must be (b, h, w, {channels or 'channels'}){hint}.")


def resize_grid(table: Any, size: tuple[int, int], new_size: tuple[int, int]) -> Any:
    """A table of vectors (h * w, d) on a grid, by bicubic interpolation on another one, as PyTorch's `interpolate`."""
    down, across = (_cubic_matrix(old, new) for old, new in zip(size, new_size, strict=True))
    grid = jnp.asarray(table).reshape(*size, -1)
    y = jnp.einsum("hi,wj,ijd->hwd", down.astype(grid.dtype), across.astype(grid.dtype), grid, precision="highest")
    return y.reshape(new_size[0] * new_size[1], -1)


def _cubic_matrix(old: int, new: int, a: float = -0.75) -> np.ndarray:
    """The weights (new, old) of cubic convolution at the centers of pixels; those beyond the border are the border's.

    R. Keys, Cubic convolution interpolation for digital image processing, 1981, with PyTorch's a.
    """
    at = (np.arange(new) + 0.5) * old / new - 0.5
    matrix = np.zeros((new, old))
    for offset in (-1, 0, 1, 2):
        source = np.floor(at) + offset
        x = np.abs(at - source)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * (x**3 - 5 * x**2 + 8 * x - 4)
        column = np.clip(source, 0, old - 1).astype(int)
        np.add.at(matrix, (np.arange(new), column), np.where(x <= 1, near, far))
    return matrix


def stage_depths(config: Config, default: tuple[int, ...]) -> tuple[int, ...]:
    """The number of blocks of each stage in a config.json, which may be untrusted: each stage takes time to trace."""
    depths = config.sizes("depths", default)
    if len(depths) > MAX_STAGES or sum(depths) > MAX_BLOCKS:
        raise ValueError(
            f"{config.family}: depths has {len(depths):,} stages with {sum(depths):,} blocks, but at most {MAX_STAGES} "
            f"with {MAX_BLOCKS:,} are supported."
        )
    return depths


def num_labels(config: Config, backbone: str) -> int | None:
    """The number of classes in a config.json, transformers' default being 2; None of a model without a head."""
    if config.fields.get("architectures") == [backbone]:
        return None
    names = config.fields.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    return config.size("num_labels", 2)


def label_names(classes: int) -> dict[str, Any]:
    """The names of classes in a config.json."""
    names = [f"LABEL_{index}" for index in range(classes)]
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
