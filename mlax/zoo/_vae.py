"""VAE: the variational autoencoder of latent diffusion. https://arxiv.org/abs/2112.10752, section 3.1."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax import nn, ops
from mlax.core import Composite, Size, Sub, frozen
from mlax.zoo._config import Config
from mlax.zoo._images import check_images
from mlax.zoo._unet import MiddleBlock, ResidualBlock, SpatialAttention, check_size, map_level, map_middle
from mlax.zoo._weights import WeightMap, map_conv, map_norm

LOG_VARIANCE = (-30.0, 20.0)  # its range


@frozen
class VAE(Composite):
    """A variational autoencoder of images (b, h, w, c): a dict of reconstruction, mean and log_variance.

    The latent codes are (b, h / n, w / n, latent), where n is 2 for each level but the last; it must divide h and w. In
    training the decoder gets a sample, which needs a key, and in inference mode the mean. Parts: encode and decode,
    which are layers by themselves: encode gives the pair of mean and log-variance. The names of weights are those of
    diffusers' AutoencoderKL, whose latent codes are multiplied by `scale` before diffusion.

    >>> model = zoo.VAE(widths=(8, 16), groups=4)
    >>> trainables, _ = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    >>> outputs, _ = model.fwd(jnp.zeros((2, 8, 8, 3)), trainables, inference_mode=True)
    >>> outputs["mean"].shape
    (2, 4, 4, 4)
    """

    _: KW_ONLY
    channels: Size = 3  # of the images
    latent: Size = 4  # channels of the latent codes
    widths: tuple[int, ...] = (128, 256, 512, 512)  # the channels of each level, halved in size from one to the next
    layers: Size = 2  # residual blocks in each level of the encoder; the decoder has one more
    groups: Size = 32  # of the group norms
    eps: float = 1e-6  # of the norms
    scale: float = 0.18215  # of the latent codes, for diffusion

    def parts(self):
        options = {"widths": self.widths, "layers": self.layers, "groups": self.groups, "eps": self.eps}
        return {
            "encode": Encoder(latent=self.latent, **options),
            "decode": Decoder(latent=self.latent, channels=self.channels, **options),
        }

    def wire(self, sub: Sub, x: Any) -> dict[str, Any]:
        check_images("VAE", x, self.channels)
        check_size("VAE", x, len(self.widths))
        mean, log_variance = sub.encode(x)
        latent = mean
        if not sub.inference_mode:
            noise = jax.random.normal(sub.rng("latent"), mean.shape, mean.dtype)
            latent = mean + jnp.exp(log_variance / 2) * noise
        return {"reconstruction": sub.decode(latent), "mean": mean, "log_variance": log_variance}

    def example_input(self) -> Any:
        size = 2 ** (len(self.widths) - 1)
        return jax.ShapeDtypeStruct((1, size, size, self.channels), np.float32)

    def weight_map(self) -> WeightMap:
        """The names of diffusers' AutoencoderKL."""
        entries = {
            **map_conv("encode/quantize", "quant_conv"),
            **map_conv("decode/quantize", "post_quant_conv"),
        }
        for part, module in (("encode", "encoder"), ("decode", "decoder")):
            entries |= map_conv(f"{part}/conv_in", f"{module}.conv_in")
            entries |= map_middle(f"{part}/middle", f"{module}.mid_block")
            entries |= map_norm(f"{part}/norm", f"{module}.conv_norm_out")
            entries |= map_conv(f"{part}/conv_out", f"{module}.conv_out")
        for level in range(len(self.widths)):
            down, up = (f"encode/levels/{level}", f"decode/levels/{level}")
            entries |= map_level(down, f"encoder.down_blocks.{level}", self.layers, "halve", "downsamplers")
            entries |= map_level(up, f"decoder.up_blocks.{level}", self.layers + 1, "double", "upsamplers")
        return WeightMap(entries)

    def config(self) -> dict[str, Any]:
        """The config.json of diffusers' AutoencoderKL."""
        levels = len(self.widths)
        return {
            "_class_name": "AutoencoderKL",
            "in_channels": self.channels,
            "out_channels": self.channels,
            "latent_channels": self.latent,
            "block_out_channels": list(self.widths),
            "layers_per_block": self.layers,
            "down_block_types": ["DownEncoderBlock2D"] * levels,
            "up_block_types": ["UpDecoderBlock2D"] * levels,
            "norm_num_groups": self.groups,
            "scaling_factor": self.scale,
        }


@frozen
class Encoder(Composite):
    """Images (b, h, w, c) to the mean and the log-variance of their latent codes, each (b, h / n, w / n, latent)."""

    _: KW_ONLY
    latent: Size  # channels of the latent codes
    widths: tuple[int, ...]  # of the levels
    layers: Size  # residual blocks in each level
    groups: Size  # of the group norms
    eps: float  # of the norms

    def parts(self):
        last = len(self.widths) - 1
        befores = (self.widths[0], *self.widths[:-1])
        return {
            "conv_in": nn.Conv(self.widths[0], 3, padding=1),
            "levels": tuple(
                Level(
                    blocks=_blocks(self, before, width, self.layers),
                    halve=nn.Conv(width, 3, strides=2, padding=((0, 1), (0, 1))) if level < last else None,
                )
                for level, (before, width) in enumerate(zip(befores, self.widths, strict=True))
            ),
            "middle": _middle(self),
            "norm": nn.GroupNorm(self.groups, eps=self.eps),
            "conv_out": nn.Conv(2 * self.latent, 3, padding=1),
            "quantize": nn.Conv(2 * self.latent, 1),
        }

    def wire(self, sub: Sub, x: Any) -> tuple[Any, Any]:
        x = sub.conv_in(x)
        for level in sub.levels:
            x = level(x)
        x = sub.conv_out(jax.nn.silu(sub.norm(sub.middle(x))))
        mean, log_variance = jnp.split(sub.quantize(x), 2, axis=-1)
        return mean, jnp.clip(log_variance, *LOG_VARIANCE)


@frozen
class Decoder(Composite):
    """Latent codes (b, h / n, w / n, latent) to images (b, h, w, c)."""

    _: KW_ONLY
    latent: Size  # channels of the latent codes
    channels: Size  # of the images
    widths: tuple[int, ...]  # of the levels, those of the encoder
    layers: Size  # residual blocks in each level of the encoder
    groups: Size  # of the group norms
    eps: float  # of the norms

    def parts(self):
        widths = self.widths[::-1]
        last = len(widths) - 1
        return {
            "quantize": nn.Conv(self.latent, 1),
            "conv_in": nn.Conv(widths[0], 3, padding=1),
            "middle": _middle(self),
            "levels": tuple(
                Level(
                    blocks=_blocks(self, before, width, self.layers + 1),
                    double=nn.Conv(width, 3, padding=1) if level < last else None,
                )
                for level, (before, width) in enumerate(zip((widths[0], *widths[:-1]), widths, strict=True))
            ),
            "norm": nn.GroupNorm(self.groups, eps=self.eps),
            "conv_out": nn.Conv(self.channels, 3, padding=1),
        }

    def wire(self, sub: Sub, x: Any) -> Any:
        x = sub.middle(sub.conv_in(sub.quantize(x)))
        for level in sub.levels:
            x = level(x)
        return sub.conv_out(jax.nn.silu(sub.norm(x)))


@frozen
class Level(Composite):
    """Residual blocks at one size, and a convolution to the next: half of it, or double."""

    _: KW_ONLY
    blocks: tuple[ResidualBlock, ...]  # one after another
    halve: nn.Conv | None = None  # in an encoder
    double: nn.Conv | None = None  # in a decoder

    def wire(self, sub: Sub, x: Any) -> Any:
        for block in sub.blocks:
            x = block(x)
        if self.double is not None:
            return sub.double(ops.upsample(x, 2))
        return x if self.halve is None else sub.halve(x)


def _blocks(owner: Any, before: int, width: int, number: int) -> tuple[ResidualBlock, ...]:
    """Residual blocks, the first of which changes the width."""
    return tuple(
        ResidualBlock(width=width, groups=owner.groups, eps=owner.eps, shortcut=index == 0 and before != width)
        for index in range(number)
    )


def _middle(owner: Any) -> MiddleBlock:
    return MiddleBlock(
        block=ResidualBlock(width=owner.widths[-1], groups=owner.groups, eps=owner.eps),
        attend=SpatialAttention(heads=1, groups=owner.groups, eps=owner.eps),
    )


def vae() -> VAE:
    """The autoencoder of Stable Diffusion 1 and 2, with 84M parameters: 512 x 512 images to 64 x 64 codes.

    >>> zoo.vae()
    VAE()
    """
    return VAE()


def vae_from_config(config: Mapping[str, Any]) -> VAE:
    """The VAE that a config.json of diffusers' AutoencoderKL describes."""
    fields = Config("vae", config)
    for name, value in {
        "act_fn": "silu",
        "use_quant_conv": True,
        "use_post_quant_conv": True,
        "mid_block_add_attention": True,
        "shift_factor": None,
        "latents_mean": None,
        "latents_std": None,
    }.items():
        fields.require(name, value, default=value)
    fields.levels("down_block_types", {"DownEncoderBlock2D": None})
    fields.levels("up_block_types", {"UpDecoderBlock2D": None})
    channels = fields.size("in_channels", 3)
    fields.require("out_channels", channels, default=3)
    return VAE(
        channels=channels,
        latent=fields.size("latent_channels", 4),
        widths=fields.sizes("block_out_channels"),
        layers=fields.size("layers_per_block", 1),
        groups=fields.size("norm_num_groups", 32),
        scale=fields.number("scaling_factor", 0.18215),
    )
