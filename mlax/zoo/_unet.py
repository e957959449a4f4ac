"""U-Net: the noise-predicting network of DDPM. https://arxiv.org/abs/2006.11239, appendix B."""

import functools
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mlax import nn, ops
from mlax.core import Composite, Series, Size, Sub, frozen
from mlax.zoo._config import Config
from mlax.zoo._images import check_images
from mlax.zoo._weights import Weight, WeightMap, map_conv, map_embed, map_linear, map_norm

Names = dict[Any, Weight]


@frozen
class UNet(Composite):
    """A U-Net for diffusion: noisy images (b, h, w, c) and their time steps (b,), integers, to the predicted noise.

    h and w are divisible by 2 for each level but the last. The input is a pair (images, time), or with `classes` a
    triple with labels (b,), integers. A time step outside of `steps` gives NaN. Parts: time, label, conv_in, down,
    middle, up, norm, conv_out. The names of weights are those of diffusers' UNet2DModel.

    >>> model = zoo.UNet(widths=(8, 16), attention=(False, True), groups=4)
    >>> images, time = jnp.zeros((2, 8, 8, 3)), jnp.array([3, 999])
    >>> trainables, _ = model.init(jax.random.key(0), (images, time))
    >>> model.fwd((images, time), trainables)[0].shape
    (2, 8, 8, 3)
    """

    _: KW_ONLY
    channels: Size = 3  # of the images
    out_channels: Size | None = None  # None: those of the images
    widths: tuple[int, ...] = (128, 256, 256, 256)  # the channels of each level, halved in size from one to the next
    attention: tuple[bool, ...] = (False, True, False, False)  # which levels have self-attention
    layers: Size = 2  # residual blocks in each level
    head_width: Size | None = None  # of the attention; None: one head
    groups: Size = 32  # of the group norms
    dropout: float = 0.0  # in the residual blocks
    eps: float = 1e-6  # of the norms
    classes: Size | None = None  # of the labels; None: unconditional
    steps: Size = 1000  # the number of time steps
    sine_first: bool = True  # whether the embedding of the time is sines, then cosines, and not the reverse
    shift: float = 1.0  # of the lowest frequency of that embedding
    pad: Literal["end", "both"] = "end"  # where images are padded before they are halved

    def __post_init__(self):
        if len(self.attention) != len(self.widths):
            raise ValueError(
                f"UNet: attention has {len(self.attention)} levels but widths {len(self.widths)}; pass one for each."
            )

    def parts(self):
        width, levels = self.widths[0], range(len(self.widths))
        parts: dict[str, Any] = {
            "time": Series(up=nn.Linear(4 * width), silu=jax.nn.silu, down=nn.Linear(4 * width)),
            "conv_in": nn.Conv(width, 3, padding=1),
            "down": tuple(self._down(level) for level in levels),
            "middle": MiddleBlock(block=self._block(self.widths[-1]), attend=self._attend(self.widths[-1])),
            "up": tuple(self._up(level) for level in reversed(levels)),
            "norm": nn.GroupNorm(self.groups, eps=self.eps),
            "conv_out": nn.Conv(self.out_channels or self.channels, 3, padding=1),
        }
        return parts if self.classes is None else {**parts, "label": nn.Embed(self.classes, 4 * width)}

    def wire(self, sub: Sub, x: Any, time: Any, label: Any = None) -> Any:  # (b, h, w, c), (b,), (b,)
        if (label is None) != (self.classes is None):
            wanted = (
                "no labels; set classes=, or leave them out" if self.classes is None else "labels, (x, time, label)"
            )
            raise ValueError(f"UNet(classes={self.classes}): the input must have {wanted}.")
        check_images("UNet", x, self.channels)
        check_size("UNet", x, len(self.widths))
        for name, each in {"time": time, **({} if label is None else {"label": label})}.items():
            if jnp.shape(each) != x.shape[:1]:
                raise ValueError(
                    f"UNet: {name} is {jnp.shape(each)}, but must be (b,), one for each image: {x.shape[:1]}."
                )
        t = sub.time(_embed_time(time, self.widths[0], self.steps, self.sine_first, self.shift, x.dtype))
        t = jax.nn.silu(t if label is None else t + sub.label(label))  # (b, 4 d)
        x = sub.conv_in(x)
        skips = [x]
        for block in sub.down:
            x, outputs = block(x, t)
            skips.extend(outputs)
        x = sub.middle(x, t)
        for block in sub.up:
            x = block(x, t, tuple(skips.pop() for _ in range(self.layers + 1)))
        return sub.conv_out(jax.nn.silu(sub.norm(x)))

    def _block(self, width: int, *, shortcut: bool = False) -> "ResidualBlock":
        return ResidualBlock(
            width=width, groups=self.groups, eps=self.eps, dropout=self.dropout, shortcut=shortcut, conditional=True
        )

    def _attend(self, width: int) -> "SpatialAttention":
        heads = 1 if self.head_width is None else width // self.head_width
        return SpatialAttention(heads=heads, groups=self.groups, eps=self.eps)

    def _down(self, level: int) -> "DownBlock":
        width, before = self.widths[level], self.widths[max(level - 1, 0)]
        shortcuts = [width != before] + [False] * (self.layers - 1)
        return DownBlock(
            blocks=tuple(self._block(width, shortcut=each) for each in shortcuts),
            attend=(self._attend(width),) * self.layers if self.attention[level] else (),
            halve=None if level == len(self.widths) - 1 else _halve(width, self.pad),
        )

    def _up(self, level: int) -> "UpBlock":
        width = self.widths[level]
        return UpBlock(  # every block joins a skip connection, so that each has a shortcut
            blocks=(self._block(width, shortcut=True),) * (self.layers + 1),
            attend=(self._attend(width),) * (self.layers + 1) if self.attention[level] else (),
            double=None if level == 0 else nn.Conv(width, 3, padding=1),
        )

    def example_input(self) -> Any:
        size = 2 ** (len(self.widths) - 1)
        x = jax.ShapeDtypeStruct((1, size, size, self.channels), np.float32)
        integer = jax.ShapeDtypeStruct((1,), np.int32)
        return (x, integer) if self.classes is None else (x, integer, integer)

    def weight_map(self) -> WeightMap:
        """The names of diffusers' UNet2DModel."""
        entries = {
            **map_linear("time/up", "time_embedding.linear_1"),
            **map_linear("time/down", "time_embedding.linear_2"),
            **map_embed("label", "class_embedding"),
            **map_conv("conv_in", "conv_in"),
            **map_middle("middle", "mid_block"),
            **map_norm("norm", "conv_norm_out"),
            **map_conv("conv_out", "conv_out"),
        }
        for level in range(len(self.widths)):
            entries |= map_level(f"down/{level}", f"down_blocks.{level}", self.layers, "halve", "downsamplers")
            entries |= map_level(f"up/{level}", f"up_blocks.{level}", self.layers + 1, "double", "upsamplers")
        return WeightMap(entries)

    def config(self) -> dict[str, Any]:
        """The config.json of diffusers' UNet2DModel."""
        kinds = ["AttnDownBlock2D" if each else "DownBlock2D" for each in self.attention]
        return {
            "_class_name": "UNet2DModel",
            "in_channels": self.channels,
            "out_channels": self.out_channels or self.channels,
            "block_out_channels": list(self.widths),
            "layers_per_block": self.layers,
            "down_block_types": kinds,
            "up_block_types": [kind.replace("Down", "Up") for kind in reversed(kinds)],
            "attention_head_dim": self.head_width,
            "norm_num_groups": self.groups,
            "norm_eps": self.eps,
            "dropout": self.dropout,
            "num_class_embeds": self.classes,
            "num_train_timesteps": self.steps,
            "flip_sin_to_cos": not self.sine_first,
            "freq_shift": self.shift,
            "downsample_padding": 0 if self.pad == "end" else 1,
        }


@frozen
class ResidualBlock(Composite):
    """Two convolutions, each after a group norm and SiLU, added to the input: (b, h, w, c) to (b, h, w, width).

    If `conditional`, the input is a pair with a vector (b, d), a projection of which is added between the two.
    """

    _: KW_ONLY
    width: Size  # of the output
    groups: Size = 32  # of the norms
    eps: float = 1e-6  # of the norms
    dropout: float = 0.0  # before the second convolution
    shortcut: bool = False  # whether the input is projected, as it must be if it has another width
    conditional: bool = False  # whether the input is a pair with a vector

    def parts(self):
        parts = {
            "norm1": nn.GroupNorm(self.groups, eps=self.eps),
            "conv1": nn.Conv(self.width, 3, padding=1),
            "norm2": nn.GroupNorm(self.groups, eps=self.eps),
            "drop": nn.Dropout(self.dropout),
            "conv2": nn.Conv(self.width, 3, padding=1),
        }
        if self.conditional:
            parts["condition"] = nn.Linear(self.width)
        return {**parts, "shortcut": nn.Conv(self.width, 1)} if self.shortcut else parts

    def wire(self, sub: Sub, x: Any, t: Any = None) -> Any:
        y = sub.conv1(jax.nn.silu(sub.norm1(x)))
        if self.conditional:
            y = y + sub.condition(t)[:, None, None]
        y = sub.conv2(sub.drop(jax.nn.silu(sub.norm2(y))))
        return y + (sub.shortcut(x) if self.shortcut else x)


@frozen
class SpatialAttention(Composite):
    """Self-attention over all pixels after a group norm, added to the input: (b, h, w, c) to the same."""

    _: KW_ONLY
    heads: Size  # of the attention
    groups: Size = 32  # of the norm
    eps: float = 1e-6  # of the norm

    def parts(self):
        return {"norm": nn.GroupNorm(self.groups, eps=self.eps), "attend": nn.MultiHeadAttention(self.heads)}

    def wire(self, sub: Sub, x: Any) -> Any:
        b, h, w, c = x.shape
        return x + sub.attend(sub.norm(x).reshape(b, h * w, c)).reshape(b, h, w, c)


@frozen
class MiddleBlock(Composite):
    """A residual block, attention, and another residual block."""

    _: KW_ONLY
    block: ResidualBlock  # both of them
    attend: SpatialAttention  # between them

    def parts(self):
        return {"block1": self.block, "attend": self.attend, "block2": self.block}

    def wire(self, sub: Sub, x: Any, t: Any = None) -> Any:
        inputs = () if t is None else (t,)
        return sub.block2(sub.attend(sub.block1(x, *inputs)), *inputs)


@frozen
class DownBlock(Composite):
    """One level on the way down: its output, and those of each block for the way up."""

    _: KW_ONLY
    blocks: tuple[ResidualBlock, ...]  # one after another
    attend: tuple[SpatialAttention, ...] = ()  # one after each block, or none
    halve: nn.Conv | None = None  # to the size of the next level

    def wire(self, sub: Sub, x: Any, t: Any) -> tuple[Any, tuple[Any, ...]]:
        outputs = []
        for index in range(len(self.blocks)):
            x = sub.blocks[index](x, t)
            x = sub.attend[index](x) if self.attend else x
            outputs.append(x)
        if self.halve is not None:
            x = sub.halve(x)
            outputs.append(x)
        return x, tuple(outputs)


@frozen
class UpBlock(Composite):
    """One level on the way up: each block takes the output of a block on the way down, too."""

    _: KW_ONLY
    blocks: tuple[ResidualBlock, ...]  # one after another
    attend: tuple[SpatialAttention, ...] = ()  # one after each block, or none
    double: nn.Conv | None = None  # at the size of the next level

    def wire(self, sub: Sub, x: Any, t: Any, skips: tuple[Any, ...]) -> Any:
        for index, skip in enumerate(skips):
            x = sub.blocks[index](jnp.concatenate([x, skip], axis=-1), t)
            x = sub.attend[index](x) if self.attend else x
        return x if self.double is None else sub.double(ops.upsample(x, 2))


def unet(size: Literal["cifar10", "celebahq"] = "cifar10") -> UNet:
    """The U-Nets of DDPM: for CIFAR-10, 32 x 32, with 36M parameters, and for CelebA-HQ, 256 x 256, with 114M.

    >>> zoo.unet("cifar10").widths
    (128, 256, 256, 256)
    """
    if size == "cifar10":
        return UNet()
    if size != "celebahq":
        raise ValueError(f"unet: the size is {size!r}, but must be cifar10 or celebahq.")
    return UNet(widths=(128, 128, 256, 256, 512, 512), attention=(False, False, False, False, True, False))


MAX_TIMES = 1 << 22  # numbers in the table of sinusoids, which is computed while the model is traced


def unet_from_config(config: Mapping[str, Any]) -> UNet:
    """The U-Net that a config.json of diffusers' UNet2DModel describes."""
    fields = Config("unet", config)
    for name, value in {
        "center_input_sample": False,
        "time_embedding_type": "positional",
        "time_embedding_dim": None,
        "mid_block_type": "UNetMidBlock2D",
        "mid_block_scale_factor": 1,
        "downsample_type": "conv",
        "upsample_type": "conv",
        "act_fn": "silu",
        "attn_norm_num_groups": None,
        "resnet_time_scale_shift": "default",
        "add_attention": True,
        "class_embed_type": None,
    }.items():
        fields.require(name, value, default=value)
    attention = fields.levels("down_block_types", {"DownBlock2D": False, "AttnDownBlock2D": True})
    if fields.levels("up_block_types", {"UpBlock2D": False, "AttnUpBlock2D": True})[::-1] != attention:
        raise ValueError("unet: up_block_types is not the reverse of down_block_types; only that is supported.")
    steps, widths = fields.optional_size("num_train_timesteps", None) or 1000, fields.sizes("block_out_channels")
    if steps * widths[0] > MAX_TIMES:
        raise ValueError(f"unet: the sinusoids of {steps} steps and {widths[0]} channels are more than {MAX_TIMES}.")
    return UNet(
        channels=fields.size("in_channels", 3),
        out_channels=fields.size("out_channels", 3),
        widths=widths,
        attention=attention,
        layers=fields.size("layers_per_block", 2),
        head_width=fields.optional_size("attention_head_dim", 8),
        groups=fields.size("norm_num_groups", 32),
        dropout=fields.number("dropout", 0.0),
        eps=fields.number("norm_eps", 1e-5),
        classes=fields.optional_size("num_class_embeds", None),
        steps=steps,
        sine_first=not fields.flag("flip_sin_to_cos", True),
        shift=fields.number("freq_shift", 0),
        pad=fields.choice("downsample_padding", {0: "end", 1: "both"}, 1),
    )


def map_residual_block(path: str, module: str) -> Names:
    """The entries of a ResidualBlock, by diffusers' names."""
    return {
        **map_norm(f"{path}/norm1", f"{module}.norm1"),
        **map_conv(f"{path}/conv1", f"{module}.conv1"),
        **map_linear(f"{path}/condition", f"{module}.time_emb_proj"),
        **map_norm(f"{path}/norm2", f"{module}.norm2"),
        **map_conv(f"{path}/conv2", f"{module}.conv2"),
        **map_conv(f"{path}/shortcut", f"{module}.conv_shortcut"),
    }


def map_attention(path: str, module: str) -> Names:
    """The entries of a SpatialAttention, by diffusers' names."""
    entries = map_norm(f"{path}/norm", f"{module}.group_norm")
    for part, name in {"query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0"}.items():
        entries |= map_linear(f"{path}/attend/{part}", f"{module}.{name}")
    return entries


def map_middle(path: str, module: str) -> Names:
    """The entries of a MiddleBlock, by diffusers' names."""
    return {
        **map_residual_block(f"{path}/block1", f"{module}.resnets.0"),
        **map_attention(f"{path}/attend", f"{module}.attentions.0"),
        **map_residual_block(f"{path}/block2", f"{module}.resnets.1"),
    }


def map_level(path: str, module: str, layers: int, resize: str, resizers: str) -> Names:
    """The entries of a level with so many residual blocks, by diffusers' names."""
    entries = map_conv(f"{path}/{resize}", f"{module}.{resizers}.0.conv")
    for index in range(layers):
        entries |= map_residual_block(f"{path}/blocks/{index}", f"{module}.resnets.{index}")
        entries |= map_attention(f"{path}/attend/{index}", f"{module}.attentions.{index}")
    return entries


def check_size(model: str, images: Any, levels: int) -> None:
    """Raise for images that cannot be halved from each level to the next."""
    size, divisor = images.shape[1:3], 2 ** (levels - 1)
    if any(isinstance(each, int) and each % divisor for each in size):  # one may be symbolic
        raise ValueError(
            f"{model}: h and w are {size}, but must be divisible by 2 for each level but the last, here by {divisor}; "
            "pad or resize them."
        )


def _halve(width: int, pad: Literal["end", "both"]) -> nn.Conv:
    return nn.Conv(width, 3, strides=2, padding=((0, 1), (0, 1)) if pad == "end" else 1)


def _embed_time(time: Any, width: int, steps: int, sine_first: bool, shift: float, dtype: Any) -> Any:
    """Sines and cosines (b, width) of the time steps (b,), read from a table: a narrow dtype rounds them only once."""
    table = _time_table(width, steps, sine_first, shift)
    return ops.embedding(time, jnp.asarray(table, dtype))


@functools.cache
def _time_table(width: int, steps: int, sine_first: bool, shift: float) -> np.ndarray:
    frequencies = np.exp(-math.log(10_000) * np.arange(width // 2) / (width // 2 - shift))
    angles = np.arange(steps)[:, None] * frequencies
    waves = [np.sin(angles), np.cos(angles)]
    return np.concatenate(waves if sine_first else waves[::-1], axis=-1)
