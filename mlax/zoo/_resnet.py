"""ResNet: a convolutional network of residual blocks with batch normalization. He et al., Deep Residual Learning for
Image Recognition, https://arxiv.org/abs/1512.03385; v1.5, which halves images in the 3x3 convolution of a bottleneck.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import numpy as np

from mlax import nn
from mlax.core import Composite, Repeat, Size, Sub, VarianceScaling, frozen, with_fields
from mlax.zoo._config import Config
from mlax.zoo._images import check_images, label_names, num_labels, stage_depths
from mlax.zoo._weights import WeightMap, map_batch_norm, map_conv, map_linear

KERNEL_INIT = VarianceScaling(2.0, "out", "normal")  # He's, by the number of outputs


@frozen
class ResNet(Composite):
    """ResNet v1.5, for image classification: images (b, h, w, 3) to logits (b, classes), in the dtype of the images.

    Wide ResNets have a smaller `reduction`, and ResNeXts `groups`. Parts: conv, norm, pool, stages, mean, head.
    Non-trainables: the running statistics of all batch norms.

    >>> model = zoo.ResNet(depths=(1, 2), widths=(16, 32), stem=8, classes=10)
    >>> trainables, non_trainables = model.init(jax.random.key(0), model.example_input())
    >>> images = jnp.ones((2, 33, 47, 3))
    >>> model.fwd(images, trainables, non_trainables, inference_mode=True)[0].shape
    (2, 10)
    """

    _: KW_ONLY
    depths: tuple[int, ...] = (3, 4, 6, 3)  # the number of blocks of each stage
    widths: tuple[int, ...] = (256, 512, 1024, 2048)  # the channels of each stage
    block: Literal["basic", "bottleneck"] = "bottleneck"  # two 3x3 convolutions, or a 3x3 between two 1x1
    stem: Size = 64  # the channels of the first convolution
    reduction: Size = 4  # of the channels inside a bottleneck
    groups: Size = 1  # of the 3x3 convolution of a bottleneck
    classes: Size | None = 1000  # of images; None: no head, so that the output is the mean (b, channels)

    def __post_init__(self):
        if len(self.depths) != len(self.widths) or not self.depths:
            raise ValueError(
                f"ResNet: depths are {self.depths} and widths {self.widths}, but must be one each a stage."
            )
        if self.block not in ("basic", "bottleneck"):
            raise ValueError(f"ResNet: block is {self.block!r}, but must be basic or bottleneck.")

    def parts(self):
        firsts = [self._block(self.widths[0], strides=1, has_shortcut=self.stem != self.widths[0])]
        firsts += [self._block(width, strides=2, has_shortcut=True) for width in self.widths[1:]]
        stages = tuple(ResNetStage(first, depth) for first, depth in zip(firsts, self.depths, strict=True))
        parts = {
            "conv": nn.Conv(self.stem, 7, strides=2, padding=3, bias=False, kernel_init=KERNEL_INIT),
            "norm": nn.BatchNorm(activation=jax.nn.relu),
            "pool": nn.MaxPool(3, strides=2, padding=1),
            "stages": stages,
            "mean": nn.GlobalPool(),
        }
        return parts if self.classes is None else parts | {"head": nn.Linear(self.classes)}

    def wire(self, sub: Sub, x: Any) -> Any:  # (b, h, w, 3)
        check_images("ResNet", x)
        x = sub.pool(sub.norm(sub.conv(x)))  # (b, h / 4, w / 4, c)
        for stage in sub.stages:
            x = stage(x)  # (b, h / 4, w / 4, c), then h / 8 and so on
        x = sub.mean(x)  # (b, c)
        return x if self.classes is None else sub.head(x)

    def _block(self, width: int, strides: int, has_shortcut: bool) -> "BasicBlock | Bottleneck":
        if self.block == "basic":
            return BasicBlock(width, strides=strides, has_shortcut=has_shortcut)
        inner = width // self.reduction
        return Bottleneck(width, inner=inner, groups=self.groups, strides=strides, has_shortcut=has_shortcut)

    def example_input(self) -> Any:
        return jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)

    def weight_map(self) -> WeightMap:
        """The names of transformers, and of "torchvision"."""
        torchvision = _torchvision_names(self)
        return _transformers_names(self)._replace(others={"torchvision": torchvision})

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        if self.block == "bottleneck" and (self.reduction, self.groups) != (4, 1):
            raise ValueError(
                f"ResNet: transformers' has a reduction of 4 and 1 group, not {self.reduction} and {self.groups}; save "
                "zoo.state_dict(..., names='torchvision') by files.save."
            )
        return {
            "model_type": "resnet",
            "architectures": ["ResNetModel" if self.classes is None else "ResNetForImageClassification"],
            "num_channels": 3,
            "embedding_size": self.stem,
            "hidden_sizes": list(self.widths),
            "depths": list(self.depths),
            "layer_type": self.block,
            "hidden_act": "relu",
            "downsample_in_first_stage": False,
            "downsample_in_bottleneck": False,
            **({} if self.classes is None else label_names(self.classes)),
        }


@frozen
class ResNetStage(Composite):
    """A stage of a ResNet: one block that may halve the image and change the channels, then equal blocks, stacked."""

    block: "BasicBlock | Bottleneck"  # the first
    depth: Size  # the number of blocks

    def parts(self):
        rest = with_fields(self.block, strides=1, has_shortcut=False)
        return {"first": self.block} | ({"rest": Repeat(rest, self.depth - 1, mode="unroll")} if self.depth > 1 else {})

    def wire(self, sub: Sub, x: Any) -> Any:
        x = sub.first(x)
        return sub.rest(x) if self.depth > 1 else x


@frozen
class BasicBlock(Composite):
    """Two 3x3 convolutions and a shortcut: (b, h, w, c) to (b, h / strides, w / strides, width)."""

    width: Size  # the channels of the output
    _: KW_ONLY
    strides: int = 1  # of the first convolution
    has_shortcut: bool = False  # whether the shortcut is a convolution, not the identity

    def parts(self):
        parts = {
            "conv1": _conv(self.width, 3, strides=self.strides),
            "norm1": nn.BatchNorm(activation=jax.nn.relu),
            "conv2": _conv(self.width, 3),
            "norm2": nn.BatchNorm(activation=jax.nn.relu),  # of the sum with the shortcut
        }
        return parts | _shortcut(self)

    def wire(self, sub: Sub, x: Any) -> Any:
        y = sub.conv2(sub.norm1(sub.conv1(x)))
        return sub.norm2(y, sub.shortcut_norm(sub.shortcut(x)) if self.has_shortcut else x)


@frozen
class Bottleneck(Composite):
    """A 3x3 convolution of few channels between two 1x1, and a shortcut: (b, h, w, c) to (b, h / s, w / s, width)."""

    width: Size  # the channels of the output
    _: KW_ONLY
    inner: Size  # the channels of the 3x3 convolution
    groups: Size = 1  # of the 3x3 convolution
    strides: int = 1  # of the 3x3 convolution
    has_shortcut: bool = False  # whether the shortcut is a convolution, not the identity

    def parts(self):
        parts = {
            "conv1": _conv(self.inner, 1),
            "norm1": nn.BatchNorm(activation=jax.nn.relu),
            "conv2": _conv(self.inner, 3, strides=self.strides, groups=self.groups),
            "norm2": nn.BatchNorm(activation=jax.nn.relu),
            "conv3": _conv(self.width, 1),
            "norm3": nn.BatchNorm(activation=jax.nn.relu),  # of the sum with the shortcut
        }
        return parts | _shortcut(self)

    def wire(self, sub: Sub, x: Any) -> Any:
        y = sub.norm1(sub.conv1(x))
        y = sub.conv3(sub.norm2(sub.conv2(y)))
        return sub.norm3(y, sub.shortcut_norm(sub.shortcut(x)) if self.has_shortcut else x)


def _conv(features: int, window: int, strides: int = 1, groups: int = 1) -> nn.Conv:
    padding = window // 2  # on both sides, as in PyTorch, which differs from "SAME" for strides of 2
    return nn.Conv(
        features, window, strides=strides, padding=padding, groups=groups, bias=False, kernel_init=KERNEL_INIT
    )


def _shortcut(block: Any) -> dict[str, Any]:
    if not block.has_shortcut:
        return {}
    return {"shortcut": _conv(block.width, 1, strides=block.strides), "shortcut_norm": nn.BatchNorm()}


def resnet(depth: Literal[18, 34, 50, 101, 152] = 50, *, classes: int | None = 1000) -> ResNet:
    """ResNet v1.5 in a published size, by its number of layers: 11.7M, 21.8M, 25.6M, 44.5M or 60.2M parameters.

    `trainables, non_trainables = zoo.load_weights(zoo.resnet(50), "resnet50.pth")` loads torchvision's weights.
    `classes=None` omits the head, and ignores that of a file.

    >>> zoo.resnet(18, classes=10)
    ResNet(depths=(2, 2, 2, 2), widths=(64, 128, 256, 512), block='basic', classes=10)
    """
    depths = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
    if depth not in depths:
        raise ValueError(f"resnet: the depth is {depth!r}, but must be one of {', '.join(map(str, depths))}.")
    if depth < 50:
        return ResNet(depths=depths[depth], widths=(64, 128, 256, 512), block="basic", classes=classes)
    return ResNet(depths=depths[depth], classes=classes)


def _torchvision_names(model: ResNet) -> WeightMap:
    entries = {**map_conv("conv", "conv1"), **map_batch_norm("norm", "bn1"), **map_linear("head", "fc")}
    for stage in range(len(model.depths)):
        for part, module, start in _blocks(stage, f"layer{stage + 1}"):
            block = {**map_conv(f"{part}/shortcut", f"{module}.downsample.0")}
            block |= map_batch_norm(f"{part}/shortcut_norm", f"{module}.downsample.1")
            for index in (1, 2, 3):
                block |= map_conv(f"{part}/conv{index}", f"{module}.conv{index}")
                block |= map_batch_norm(f"{part}/norm{index}", f"{module}.bn{index}")
            entries |= {path: weight._replace(start=start) for path, weight in block.items()}
    return WeightMap(entries, ignored=("fc.*",) if model.classes is None else ())


def _transformers_names(model: ResNet) -> WeightMap:
    stem = "resnet.embedder.embedder"
    entries = {**map_conv("conv", f"{stem}.convolution"), **map_batch_norm("norm", f"{stem}.normalization")}
    entries |= map_linear("head", "classifier.1")
    for stage in range(len(model.depths)):
        for part, module, start in _blocks(stage, f"resnet.encoder.stages.{stage}.layers"):
            block = {**map_conv(f"{part}/shortcut", f"{module}.shortcut.convolution")}
            block |= map_batch_norm(f"{part}/shortcut_norm", f"{module}.shortcut.normalization")
            for index in (1, 2, 3):
                block |= map_conv(f"{part}/conv{index}", f"{module}.layer.{index - 1}.convolution")
                block |= map_batch_norm(f"{part}/norm{index}", f"{module}.layer.{index - 1}.normalization")
            entries |= {path: weight._replace(start=start) for path, weight in block.items()}
    return WeightMap(entries, prefix="resnet.", ignored=("classifier.*",) if model.classes is None else ())


def _blocks(stage: int, module: str) -> tuple[tuple[str, str, int], ...]:
    """(path, module, first index) of the first block of a stage, and of the stack of the others."""
    return (f"stages/{stage}/first", f"{module}.0", 0), (f"stages/{stage}/rest/stacked", f"{module}.*", 1)


def resnet_from_config(config: Mapping[str, Any]) -> ResNet:
    """The ResNet that a config.json of Hugging Face describes."""
    fields = Config("resnet", config)
    fields.require("num_channels", 3, default=3)
    fields.require("hidden_act", "relu", default="relu")
    fields.require("downsample_in_first_stage", False, default=False)
    fields.require("downsample_in_bottleneck", False, default=False)
    return ResNet(
        depths=stage_depths(fields, (3, 4, 6, 3)),
        widths=fields.sizes("hidden_sizes", (256, 512, 1024, 2048)),
        block=fields.choice("layer_type", {"basic": "basic", "bottleneck": "bottleneck"}, "bottleneck"),
        stem=fields.size("embedding_size", 64),
        classes=num_labels(fields, backbone="ResNetModel"),
    )
