"""ViT: a transformer over the patches of an image. Dosovitskiy et al., An Image is Worth 16x16 Words,
https://arxiv.org/abs/2010.11929; and DeiT, with a distillation token. Touvron et al., https://arxiv.org/abs/2012.12877.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax import _gpu, nn, ops
from mlax.core import Composite, Normal, Repeat, Size, Sub, Tree, TruncatedNormal, frozen, short_repr, with_fields
from mlax.zoo._config import Config
from mlax.zoo._images import check_images, label_names, num_labels, resize_grid
from mlax.zoo._weights import Weight, WeightMap, map_conv, map_linear, map_norm

KERNEL_INIT = TruncatedNormal(0.02)
MAX_IMAGE_SIZE = 1 << 14  # in a config.json, so that positions can be counted in 32 bits


@frozen
class ViT(Composite):
    """Vision transformer (ViT), for image classification: images (b, h, w, 3) to logits (b, classes), in their dtype.

    The images have the size `image_size`; `resize_positions` changes it. With `distilled`, it is DeiT, which has a
    second token and a second head, for the answers of a teacher: training returns the logits of both, and inference
    their mean. The pooler of transformers' ViTModel is not read: `classes=None` gives the class token before it.
    Parts: patches, class_token, distillation_token, positions, drop, blocks, norm, head, distillation_head.

    >>> model = zoo.ViT(image_size=(32, 24), patch=8, width=8, depth=2, heads=2, hidden=16, classes=10)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> model.fwd(jnp.ones((2, 32, 24, 3)), trainables)[0].shape
    (2, 10)
    """

    _: KW_ONLY
    image_size: tuple[int, int] = (224, 224)  # height and width
    patch: Size = 16  # height and width of a patch
    width: Size = 768  # of the residual stream
    depth: Size = 12  # the number of blocks
    heads: Size = 12  # of each attention
    hidden: Size = 3072  # the width inside of each MLP
    classes: Size | None = 1000  # of images; None: no head, so that the output is the class token (b, width)
    distilled: bool = False  # whether there is a distillation token, as in DeiT
    dropout: float = 0.0  # of embeddings and residual branches
    attention_dropout: float = 0.0  # of attention weights
    eps: float = 1e-6  # of the norms

    def __post_init__(self):
        if len(self.image_size) != 2 or min(self.image_size) < self.patch:
            raise ValueError(
                f"ViT: image_size is {self.image_size}, but must be a height and a width of at least {self.patch}, the "
                "size of a patch."
            )

    def parts(self):
        block = ViTBlock(
            width=self.width,
            heads=self.heads,
            hidden=self.hidden,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            eps=self.eps,
            tokens=math.prod(self.grid) + (2 if self.distilled else 1),
        )
        tokens, heads = ["class_token"], ["head"]
        if self.distilled:
            tokens, heads = [*tokens, "distillation_token"], [*heads, "distillation_head"]
        parts = {
            "patches": nn.Conv(self.width, self.patch, strides=self.patch, padding="VALID", kernel_init=KERNEL_INIT),
            **dict.fromkeys(tokens, nn.Bias(bias_init=Normal(0.02))),
            "positions": nn.Bias(axes=(-2, -1), bias_init=Normal(0.02)),
            "drop": nn.Dropout(self.dropout),
            "blocks": Repeat(block, self.depth),
            "norm": nn.LayerNorm(eps=self.eps),
        }
        if self.classes is None:
            return parts
        return parts | dict.fromkeys(heads, nn.Linear(self.classes, kernel_init=KERNEL_INIT))

    def wire(self, sub: Sub, images: Any) -> Any:  # (b, h, w, 3)
        check_images("ViT", images)
        if images.shape[1:3] != self.image_size:
            raise ValueError(
                f"ViT: the images are {images.shape}, but it has positions for {self.image_size}; resize the images, "
                "or the table of positions by zoo.resize_positions."
            )
        x = lax.collapse(sub.patches(images), 1, 3)  # (b, t, d)
        zeros = jnp.zeros_like(x[:, :1])
        tokens = [sub.class_token(zeros), *([sub.distillation_token(zeros)] if self.distilled else [])]
        x = sub.drop(sub.positions(jnp.concatenate([*tokens, x], axis=1)))
        if x.shape[1] % 2 and _gpu.prefers_kernels(x):  # cuDNN takes even times: one padding for 8 in each block
            x = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        x = sub.norm(sub.blocks(x))
        if self.classes is None:
            return x[:, 0]
        logits = sub.head(x[:, 0])
        if not self.distilled:
            return logits
        others = sub.distillation_head(x[:, 1])
        return (logits + others) / 2 if sub.inference_mode else (logits, others)

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches along each axis."""
        return self.image_size[0] // self.patch, self.image_size[1] // self.patch

    def example_input(self) -> Any:
        return jax.ShapeDtypeStruct((1, *self.image_size, 3), np.float32)

    def weight_map(self) -> WeightMap:
        """The names of transformers' files, and others.

        Those of "torchvision", of "torchvision_files" as published, and of "transformers_modules" since version 5.
        """
        others = (
            {} if self.distilled else {name: _torchvision_names(self, mlp) for name, mlp in TORCHVISION_MLP.items()}
        )
        others["transformers_modules"] = _transformers_names(self, TRANSFORMERS_MODULES)
        return _transformers_names(self, TRANSFORMERS_FILES)._replace(others=others)

    def config(self) -> dict[str, Any]:
        """The config.json of Hugging Face's transformers."""
        headed = "DeiTForImageClassificationWithTeacher" if self.distilled else "ViTForImageClassification"
        headless = "DeiTModel" if self.distilled else "ViTModel"
        height, width = self.image_size
        return {
            "model_type": "deit" if self.distilled else "vit",
            "architectures": [headless if self.classes is None else headed],
            "image_size": height if height == width else [height, width],
            "patch_size": self.patch,
            "num_channels": 3,
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "intermediate_size": self.hidden,
            "hidden_act": "gelu",
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.attention_dropout,
            "layer_norm_eps": self.eps,
            "qkv_bias": True,
            **({} if self.classes is None else label_names(self.classes)),
        }


@frozen
class ViTBlock(Composite):
    """A block of ViT: attention and an MLP, each after a layer norm and added to the residual stream."""

    _: KW_ONLY
    width: Size  # of the residual stream
    heads: Size  # of the attention
    hidden: Size  # the width inside of the MLP
    dropout: float = 0.0  # of residual branches
    attention_dropout: float = 0.0  # of attention weights
    eps: float = 1e-6  # of the norms
    tokens: Size | None = None  # of each image, beyond which the input is padding; None: all

    def parts(self):
        return {
            "norm1": nn.LayerNorm(eps=self.eps),
            "attend": nn.MultiHeadAttention(self.heads, dropout=self.attention_dropout, kernel_init=KERNEL_INIT),
            "norm2": nn.LayerNorm(eps=self.eps),
            "up": nn.Linear(self.hidden, activation=ops.exact_gelu, kernel_init=KERNEL_INIT),
            "down": nn.Linear(self.width, kernel_init=KERNEL_INIT),
            "drop": nn.Dropout(self.dropout),
        }

    def wire(self, sub: Sub, x: Any) -> Any:  # (b, t, d)
        lengths = None if self.tokens is None or x.shape[1] == self.tokens else np.int32(self.tokens)
        attended = {"x": x, "lengths": lengths}
        x, y = sub.norm1(x, None if self.dropout else sub.take_bias("attend", attended))
        x = x + sub.drop(sub.attend({**attended, "x": y}))
        x, y = sub.norm2(x, None if self.dropout else sub.take_bias("down", x))
        return x + sub.drop(sub.call_in_turn(y, "up", "down"))


def vit(
    size: Literal["tiny", "small", "base", "large"] = "base",
    *,
    patch: int = 16,
    classes: int | None = 1000,
    image_size: int | tuple[int, int] = 224,
) -> ViT:
    """ViT in a published size: 5.7M, 22.1M, 86.6M or 304.3M parameters with patches of 16.

    `trainables, _ = zoo.load_weights(zoo.vit("base"), "vit_b_16.pth")` loads torchvision's weights.

    >>> zoo.vit("large", patch=32)
    ViT(patch=32, width=1024, depth=24, heads=16, hidden=4096)
    """
    sizes = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
    if size not in sizes:
        raise ValueError(f"vit: the size is {size!r}, but must be one of {', '.join(sizes)}.")
    width, depth, heads = sizes[size]
    return ViT(
        image_size=(image_size, image_size) if isinstance(image_size, int) else image_size,
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        hidden=4 * width,
        classes=classes,
    )


def deit(
    size: Literal["tiny", "small", "base"] = "base",
    *,
    classes: int | None = 1000,
    image_size: int | tuple[int, int] = 224,
) -> ViT:
    """DeiT, a ViT with a distillation token, in a published size: 5.9M, 22.4M or 87.3M parameters.

    >>> zoo.deit("tiny").distilled
    True
    """
    if size not in ("tiny", "small", "base"):
        raise ValueError(f"deit: the size is {size!r}, but must be one of tiny, small, base.")
    return with_fields(vit(size, classes=classes, image_size=image_size), distilled=True)


def resize_positions(model: ViT, trainables: Tree, image_size: int | tuple[int, int]) -> tuple[ViT, Tree]:
    """A ViT for images of another size: the model and its trainables, whose position embeddings are interpolated.

    The interpolation is bicubic, as that of transformers' `interpolate_pos_encoding`. Pixels at the end of an axis that
    do not fill a patch are not read, as in any ViT: choose multiples of `model.patch`.

    >>> model = zoo.ViT(image_size=(32, 32), patch=8, width=8, depth=2, heads=2, hidden=16, classes=10)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> model, trainables = zoo.resize_positions(model, trainables, (48, 64))
    >>> model.fwd(jnp.ones((2, 48, 64, 3)), trainables)[0].shape
    (2, 10)
    """
    if not isinstance(model, ViT):
        raise TypeError(f"resize_positions: the model is {short_repr(model)}, but must be a ViT.")
    resized = with_fields(model, image_size=(image_size, image_size) if isinstance(image_size, int) else image_size)
    variables: Any = trainables
    table, number = variables["positions"]["bias"], 1 + model.distilled
    patches = resize_grid(table[number:], model.grid, resized.grid)
    return resized, {**variables, "positions": {"bias": jnp.concatenate([table[:number], patches])}}


BLOCK = "blocks/stacked"
TRANSFORMERS_FILES = {  # the names of a block, which transformers write for all versions
    "norm1": "encoder.layer.*.layernorm_before",
    "attend/query": "encoder.layer.*.attention.attention.query",
    "attend/key": "encoder.layer.*.attention.attention.key",
    "attend/value": "encoder.layer.*.attention.attention.value",
    "attend/out": "encoder.layer.*.attention.output.dense",
    "norm2": "encoder.layer.*.layernorm_after",
    "up": "encoder.layer.*.intermediate.dense",
    "down": "encoder.layer.*.output.dense",
}
TRANSFORMERS_MODULES = {
    "norm1": "layers.*.layernorm_before",
    "attend/query": "layers.*.attention.q_proj",
    "attend/key": "layers.*.attention.k_proj",
    "attend/value": "layers.*.attention.v_proj",
    "attend/out": "layers.*.attention.o_proj",
    "norm2": "layers.*.layernorm_after",
    "up": "layers.*.mlp.fc1",
    "down": "layers.*.mlp.fc2",
}
TORCHVISION_MLP = {"torchvision": ("0", "3"), "torchvision_files": ("linear_1", "linear_2")}


def _transformers_names(model: ViT, block: Mapping[str, str]) -> WeightMap:
    prefix = "deit." if model.distilled else "vit."
    heads = {"head": "cls_classifier", "distillation_head": "distillation_classifier"}
    entries = {
        **map_conv("patches", f"{prefix}embeddings.patch_embeddings.projection"),
        "class_token/bias": Weight(f"{prefix}embeddings.cls_token", unit_axes=(0, 1)),
        "distillation_token/bias": Weight(f"{prefix}embeddings.distillation_token", unit_axes=(0, 1)),
        "positions/bias": Weight(f"{prefix}embeddings.position_embeddings", unit_axes=(0,)),
        **map_norm("norm", f"{prefix}layernorm"),
    }
    for path, module in block.items():
        entries |= (map_norm if path.startswith("norm") else map_linear)(f"{BLOCK}/{path}", f"{prefix}{module}")
    for path, module in (heads if model.distilled else {"head": "classifier"}).items():
        entries |= map_linear(path, module)
    unread = ("*classifier.*",) if model.classes is None else ()
    return WeightMap(entries, prefix=prefix, ignored=(f"{prefix}pooler.*", *unread))


def _torchvision_names(model: ViT, mlp: tuple[str, str]) -> WeightMap:
    block = "encoder.layers.encoder_layer_*"
    qkv = [f"{BLOCK}/attend/{part}" for part in ("query", "key", "value")]
    entries = {
        **map_conv("patches", "conv_proj"),
        "class_token/bias": Weight("class_token", unit_axes=(0, 1)),
        "positions/bias": Weight("encoder.pos_embedding", unit_axes=(0,)),
        **map_norm(f"{BLOCK}/norm1", f"{block}.ln_1"),
        tuple(f"{part}/kernel" for part in qkv): Weight(f"{block}.self_attention.in_proj_weight", (1, 0)),
        tuple(f"{part}/bias" for part in qkv): Weight(f"{block}.self_attention.in_proj_bias"),
        **map_linear(f"{BLOCK}/attend/out", f"{block}.self_attention.out_proj"),
        **map_norm(f"{BLOCK}/norm2", f"{block}.ln_2"),
        **map_linear(f"{BLOCK}/up", f"{block}.mlp.{mlp[0]}"),
        **map_linear(f"{BLOCK}/down", f"{block}.mlp.{mlp[1]}"),
        **map_norm("norm", "encoder.ln"),
        **map_linear("head", "heads.head"),
    }
    return WeightMap(entries, ignored=("heads.*",) if model.classes is None else ())


def vit_from_config(config: Mapping[str, Any]) -> ViT:
    """The ViT that a config.json of Hugging Face describes; of model_type "deit", one with a distillation token."""
    distilled = config.get("model_type") == "deit"
    fields = Config("deit" if distilled else "vit", config)
    fields.require("num_channels", 3, default=3)
    fields.require("hidden_act", "gelu", default="gelu")
    fields.require("qkv_bias", True, default=True)
    if distilled:
        heads = [["DeiTForImageClassificationWithTeacher"], ["DeiTModel"]]
        fields.require("architectures", *heads, default=heads[0])
    height, width = _pair(fields, "image_size", 224)
    patch, across = _pair(fields, "patch_size", 16)
    if max(height, width) > MAX_IMAGE_SIZE:
        raise ValueError(
            f"{fields.family}: image_size is {(height, width)}, but at most {MAX_IMAGE_SIZE} is supported."
        )
    if patch != across:
        raise ValueError(f"{fields.family}: patch_size is {(patch, across)}, but only squares are supported.")
    return ViT(
        image_size=(height, width),
        patch=patch,
        width=fields.size("hidden_size", 768),
        depth=fields.size("num_hidden_layers", 12),
        heads=fields.size("num_attention_heads", 12),
        hidden=fields.size("intermediate_size", 3072),
        classes=num_labels(fields, backbone="DeiTModel" if distilled else "ViTModel"),
        distilled=distilled,
        dropout=fields.number("hidden_dropout_prob", 0.0),
        attention_dropout=fields.number("attention_probs_dropout_prob", 0.0),
        eps=fields.number("layer_norm_eps", 1e-12),
    )


def _pair(fields: Config, name: str, default: int) -> tuple[int, int]:
    """A height and a width, which may be one number."""
    if not isinstance(fields.fields.get(name), list | tuple):
        size = fields.size(name, default)
        return size, size
    sizes = fields.sizes(name)
    if len(sizes) != 2:
        raise ValueError(f"{fields.family}: {name} has {len(sizes)} entries, but must have a height and a width.")
    return sizes[0], sizes[1]
