"""Blocks of GPT-2 that compute one token in five kernels, on the GPUs where these are faster than XLA's."""

import functools
from typing import Any

import jax
import numpy as np

from mlax import ops
from mlax.core import (
    Layer,
    Tree,
    Wrapper,
    flatten_paths,
    frozen,
    map_layers,
    parts_of,
    unflatten_paths,
    with_fields,
)
from mlax.zoo._gpt2 import GPT2Block

LINEARS = ("attend/qkv", "attend/out", "up", "down")
WIDEST = 768  # that was measured; the wider a block, the less of its time is the start of kernels


@frozen
class DecoderBlock(Wrapper):
    """A GPT2Block whose calls on one token of one row are five kernels, all others those of the block.

    Its linear kernels are transposed, so that what a column of a product needs is contiguous.
    """

    layer: Any  # the block
    interpret: bool = False  # whether Pallas interprets the kernels, on any device

    def init(self, rng, x):
        trainables, state = self.layer.init(rng, x)
        return transpose_kernels(trainables), state

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        token, lengths = x if isinstance(x, tuple) else (x, None)
        if inference_mode and self.find_refusal(token, trainables, non_trainables) is None:
            return self.decode(token, trainables, non_trainables, lengths)
        plain = transpose_kernels(trainables)
        return self.layer.fwd(x, plain, non_trainables, rng=rng, inference_mode=inference_mode)

    def decode(self, x: Any, weights: Any, state: Any, lengths: Any = None) -> tuple[Any, Any]:  # (1, 1, d)
        """The output of the block for one token, and its new state; with a length of 0 it does not advance."""
        x, block, attend, cache = x[:, 0], self.layer, weights["attend"], state["attend"]["cache"]
        count = state["attend"]["position"]["count"]
        linear = functools.partial(ops.fused_linear, eps=block.eps, interpret=self.interpret)
        qkv = linear(x, **attend["qkv"], norm=_scale_and_shift(weights["norm1"]))
        y, keys, values = ops.decode_attention(
            qkv,
            cache["key"],
            cache["value"],
            count,
            heads=block.heads,
            scale=(block.width // block.heads) ** -0.5,
            interpret=self.interpret,
        )
        x = linear(y, **attend["out"], residual=x)
        hidden = linear(x, **weights["up"], norm=_scale_and_shift(weights["norm2"]), gelu=True)
        x = linear(hidden, **weights["down"], residual=x)
        count = count + (1 if lengths is None else lengths.astype(np.int32))
        return x[:, None], {"attend": {"cache": {"key": keys, "value": values}, "position": {"count": count}}}

    def find_refusal(self, x: Any, trainables: Any, non_trainables: Any) -> str | None:
        """Why the kernels do not compute arrays of these shapes and dtypes; None if they do."""
        if x.shape[:2] != (1, 1):
            return "the kernels are for one token of one row"
        leaves, tree = jax.tree.flatten((x, trainables, non_trainables))
        others = {leaf.dtype.name for leaf in leaves} - {"bfloat16", "int32"}
        if others:
            return f"the kernels are for bfloat16, not {', '.join(sorted(others))}"
        return None if self.interpret else _find_refusal(self, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


@functools.lru_cache(maxsize=256)
def _find_refusal(block: DecoderBlock, tree: Any, leaves: Any) -> str | None:
    """What is raised while a block is compiled for these shapes, which depends on the versions of JAX and of XLA."""
    arguments = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    try:
        jax.jit(block.decode).lower(*arguments).compile()
    except Exception as error:  # whatever it raises, XLA can compute the block
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


def _scale_and_shift(norm: Any) -> tuple[Any, Any]:
    return norm["scale"], norm["shift"]


def transpose_kernels(trainables: Tree, head: str = "") -> Any:
    """The variables of a block, at the path `head`, with its linear kernels transposed."""
    names = {f"{head}{name}/kernel" for name in LINEARS}
    leaves = flatten_paths(trainables).items()
    return unflatten_paths((path, leaf.T if path in names else leaf) for path, leaf in leaves)


def fuse_blocks(model: Layer, trainables: Tree, *, interpret: bool = False) -> tuple[Any, Tree]:
    """The decoder with a DecoderBlock for each block of GPT-2 that the kernels can compute."""
    heads: list[str] = []

    def fuse(path: str, layer: Layer) -> Layer:
        if find_obstacle(layer) is not None:
            return layer
        heads.append(f"{path}/" if path else "")
        return DecoderBlock(layer, interpret)

    model = map_layers(model, "", fuse)
    for head in heads:
        trainables = transpose_kernels(trainables, head)
    return model, trainables


def find_obstacle(layer: Layer) -> str | None:
    """Why the kernels cannot compute a layer of a decoder; None if they can."""
    if not isinstance(layer, GPT2Block):
        return f"the kernels are for blocks of GPT-2, not {type(layer).__name__}"
    if layer.width > WIDEST or layer.width % 64 or layer.width // layer.heads not in (16, 32, 64, 128):
        return f"the kernels are not for a width of {layer.width} with {layer.heads} heads"
    parts: dict[str, Any] = {**parts_of(layer)}
    wide = {"accum_dtype": "float32"}
    computed: dict[str, Any] = {**layer.parts(), "drop": parts["drop"]}  # dropout is for training
    computed |= {name: with_fields(computed[name], **wide) for name in ("norm1", "norm2")}
    slots = getattr(parts["attend"], "cache", None)
    computed["attend"] = with_fields(computed["attend"], fused=True, cache=slots, **wide)
    changed = [name for name, part in parts.items() if part != computed.get(name)]
    return f"the kernels compute {computed[changed[0]]}, not {parts[changed[0]]}" if changed else None


def has_kernels(device: Any) -> bool:
    """Whether a device is of the kind that the kernels are faster on: an NVIDIA GPU of Hopper, as the H200 is."""
    return getattr(device, "platform", "") == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")
