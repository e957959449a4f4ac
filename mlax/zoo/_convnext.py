"""ConvNeXt: a convolutional network with the proportions of a transformer. Liu et al., A ConvNet for the 2020s,
https://arxiv.org/abs/2201.03545.
"""

import itertools
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mlax import nn, ops
from mlax.core import Composite, Constant, Repeat, Size, Sub, TruncatedNormal, frozen
from mlax.zoo._config import Config
from mlax.zoo._images import check_images, label_names, num_labels, stage_depths
from mlax.zoo._weights import Weight, WeightMap, map_conv, map_linear, map_norm

EPS = 1e-6  # of all norms but the last
KERNEL_INIT = TruncatedNormal(0.02)


@frozen
class ConvNeXt(Composite):
    """ConvNeXt, for image classification: images (b, h, w, 3) to logits (b, classes), in the dtype of the images.

    Parts: stem, stem_norm, stages, mean, norm, head.

    >>> model = zoo.ConvNeXt(depths=(1, 2), widths=(8, 16), classes=10)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> model.fwd(jnp.ones((2, 33, 47, 3)), trainables)[0].shape
    (2, 10)
    """

    _: KW_ONLY
    depths: tuple[int, ...] = (3, 3, 9, 3)  # the number of blocks of each stage
    widths: tuple[int, ...] = (96, 192, 384, 768)  # the channels of each stage
    classes: Size | None = 1000  # of images; None: no head, so that the output is the normalized mean (b, channels)
    drop_path: float = 0.0  # the rate of stochastic depth of the last block, to which it grows linearly from 0
    layer_scale: float = 1e-6  # the initial scale of residual branches
    eps: float = 1e-6  # of the last norm

    def __post_init__(self):
        if len(self.depths) != len(self.widths) or not self.depths:
            raise ValueError(f"ConvNeXt: depths are {self.depths} and widths {self.widths}, but must be equally many.")

    def parts(self):
        number = sum(self.depths)
        rates = iter([self.drop_path * index / max(1, number - 1) for index in range(number)])
        stages = tuple(
            ConvNeXtStage(
                width=width,
                rates=tuple(itertools.islice(rates, depth)),
                layer_scale=self.layer_scale,
                halves=index > 0,
            )
            for index, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True))
        )
        parts = {
            "stem": nn.Conv(self.widths[0], 4, strides=4, padding="VALID", kernel_init=KERNEL_INIT),
            "stem_norm": nn.LayerNorm(eps=EPS),
            "stages": stages,
            "mean": nn.GlobalPool(),
            "norm": nn.LayerNorm(eps=self.eps),
        }
        return parts if self.classes is None else parts | {"head": nn.Linear(self.classes, kernel_init=KERNEL_INIT)}

    def wire(self, sub: Sub, x: Any) -> Any:  # (b, h, w, 3)
        check_images("ConvNeXt", x)
        x = sub.stem_norm(sub.stem(x))  # (b, h / 4, w / 4, c)
        for stage in sub.stages:
            x = stage(x)  # (b, h / 4, w / 4, c), then h / 8 and so on
        x = sub.norm(sub.mean(x))  # (b, c)
        return x if self.classes is None else sub.head(x)

    def example_input(self) -> Any:
        return jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)

    def weight_map(self) -> WeightMap:
        """The names of transformers, and of "torchvision"."""
        torchvision = _torchvision_names(self)
        return _transformers_names(self)._replace(others={"torchvision": torchvision})

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        return {
            "model_type": "convnext",
            "architectures": ["ConvNextModel" if self.classes is None else "ConvNextForImageClassification"],
            "num_channels": 3,
            "patch_size": 4,
            "num_stages": len(self.depths),
            "hidden_sizes": list(self.widths),
            "depths": list(self.depths),
            "hidden_act": "gelu",
            "layer_norm_eps": self.eps,
            "layer_scale_init_value": self.layer_scale,
            "drop_path_rate": self.drop_path,
            **({} if self.classes is None else label_names(self.classes)),
        }


@frozen
class ConvNeXtStage(Composite):
    """A stage of a ConvNeXt: a convolution that halves the image, if `halves`, then equal blocks, stacked."""

    _: KW_ONLY
    width: Size  # the channels
    rates: tuple[float, ...]  # of stochastic depth, one for each block
    layer_scale: float  # the initial scale of residual branches
    halves: bool  # whether to halve the image first

    def parts(self):
        block = ConvNeXtBlock(width=self.width, rates=self.rates, layer_scale=self.layer_scale)
        blocks = {"blocks": Repeat(block, len(self.rates), mode="unroll")}
        if not self.halves:
            return blocks
        half = nn.Conv(self.width, 2, strides=2, padding="VALID", kernel_init=KERNEL_INIT)
        return {"half_norm": nn.LayerNorm(eps=EPS), "half": half, **blocks}

    def wire(self, sub: Sub, x: Any) -> Any:
        x = sub.half(sub.half_norm(x)) if self.halves else x
        if not any(self.rates):
            return sub.blocks(x)
        x, _ = sub.blocks(x, jnp.zeros((), np.int32))
        return x


@frozen
class ConvNeXtBlock(Composite):
    """A block of a ConvNeXt: a 7x7 depthwise convolution, a layer norm and an MLP, scaled and added to the input.

    With stochastic depth, the input and the output are pairs with the index of the block.
    """

    _: KW_ONLY
    width: Size  # the channels
    rates: tuple[float, ...]  # of stochastic depth, one for each block of the stage
    layer_scale: float  # the initial scale of the residual branch

    def parts(self):
        parts = {
            "conv": nn.Conv(self.width, 7, padding=3, groups="depthwise", kernel_init=KERNEL_INIT),
            "norm": nn.LayerNorm(eps=EPS),
            "up": nn.Linear(4 * self.width, activation=ops.exact_gelu, kernel_init=KERNEL_INIT),
            "down": nn.Linear(self.width, kernel_init=KERNEL_INIT),
            "scale": nn.Scaler(scale_init=Constant(self.layer_scale)),
        }
        return parts | ({"drop": nn.PathDropout(self.rates)} if any(self.rates) else {})

    def wire(self, sub: Sub, x: Any, index: Any = None) -> Any:  # (b, h, w, c), ()
        y = sub.up(sub.norm(sub.conv(x)))  # (b, h, w, 4 c)
        y = sub.scale(sub.down(y))
        return x + y if index is None else (x + sub.drop(y, index), index + 1)


def convnext(
    size: Literal["tiny", "small", "base", "large"] = "tiny", *, classes: int | None = 1000, drop_path: float = 0.0
) -> ConvNeXt:
    """ConvNeXt in a published size: 28.6M, 50.2M, 88.6M or 197.8M parameters.

    They were trained with a `drop_path` of 0.1, 0.4, 0.5 and 0.5. `classes=None` omits the head, and ignores that of
    a file.

    >>> zoo.convnext("small", classes=10)
    ConvNeXt(depths=(3, 3, 27, 3), classes=10)
    """
    sizes = {"tiny": (9, 96), "small": (27, 96), "base": (27, 128), "large": (27, 192)}
    if size not in sizes:
        raise ValueError(f"convnext: the size is {size!r}, but must be one of {', '.join(sizes)}.")
    depth, width = sizes[size]
    widths = (width, 2 * width, 4 * width, 8 * width)
    return ConvNeXt(depths=(3, 3, depth, 3), widths=widths, classes=classes, drop_path=drop_path)


def _torchvision_names(model: ConvNeXt) -> WeightMap:
    entries = {**map_conv("stem", "features.0.0"), **map_norm("stem_norm", "features.0.1")}
    entries |= {**map_norm("norm", "classifier.0"), **map_linear("head", "classifier.2")}
    for stage in range(len(model.depths)):
        half, block = f"features.{2 * stage}", f"features.{2 * stage + 1}.*"
        entries |= _half_entries(stage, half)
        layer_scale = Weight(f"{block}.layer_scale", unit_axes=(1, 2))
        names = (f"{block}.block.0", f"{block}.block.2", f"{block}.block.3", f"{block}.block.5")
        entries |= _block_entries(stage, *names, layer_scale)
    return WeightMap(entries, ignored=("classifier.2.*",) if model.classes is None else ())


def _transformers_names(model: ConvNeXt) -> WeightMap:
    stem, encoder = "convnext.embeddings", "convnext.encoder.stages"
    entries = {**map_conv("stem", f"{stem}.patch_embeddings"), **map_norm("stem_norm", f"{stem}.layernorm")}
    entries |= {**map_norm("norm", "convnext.layernorm"), **map_linear("head", "classifier")}
    for stage in range(len(model.depths)):
        block = f"{encoder}.{stage}.layers.*"
        entries |= _half_entries(stage, f"{encoder}.{stage}.downsampling_layer")
        layer_scale = Weight(f"{block}.layer_scale_parameter")
        names = (f"{block}.dwconv", f"{block}.layernorm", f"{block}.pwconv1", f"{block}.pwconv2")
        entries |= _block_entries(stage, *names, layer_scale)
    return WeightMap(entries, prefix="convnext.", ignored=("classifier.*",) if model.classes is None else ())


def _half_entries(stage: int, module: str) -> dict[Any, Weight]:
    if stage == 0:
        return {}
    return {**map_norm(f"stages/{stage}/half_norm", f"{module}.0"), **map_conv(f"stages/{stage}/half", f"{module}.1")}


def _block_entries(stage: int, conv: str, norm: str, up: str, down: str, layer_scale: Weight) -> dict[Any, Weight]:
    path = f"stages/{stage}/blocks/stacked"
    convolution = {**map_conv(f"{path}/conv", conv), **map_norm(f"{path}/norm", norm)}
    mlp = {**map_linear(f"{path}/up", up), **map_linear(f"{path}/down", down)}
    return {**convolution, **mlp, f"{path}/scale/scale": layer_scale}


def convnext_from_config(config: Mapping[str, Any]) -> ConvNeXt:
    """The ConvNeXt that a config.json of Hugging Face describes."""
    fields = Config("convnext", config)
    fields.require("num_channels", 3, default=3)
    fields.require("patch_size", 4, default=4)
    fields.require("hidden_act", "gelu", default="gelu")
    layer_scale = fields.number("layer_scale_init_value", 1e-6)
    if layer_scale <= 0:
        raise ValueError(f"convnext: layer_scale_init_value is {layer_scale}, but only a layer scale is supported.")
    return ConvNeXt(
        depths=stage_depths(fields, (3, 3, 9, 3)),
        widths=fields.sizes("hidden_sizes", (96, 192, 384, 768)),
        classes=num_labels(fields, backbone="ConvNextModel"),
        drop_path=fields.number("drop_path_rate", 0.0),
        layer_scale=layer_scale,
        eps=fields.number("layer_norm_eps", 1e-12),
    )
