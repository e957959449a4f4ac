"""The decoder of a language model: the same model with a KV cache, its state apart for each layer."""

import functools
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mlax import _gpu, dtypes, nn
from mlax.core import (
    Chain,
    Composite,
    Layer,
    Tree,
    Wrapper,
    check_layer,
    fields_of,
    find_layers,
    flatten_paths,
    get,
    map_layers,
    parts_of,
    unflatten_paths,
    unstack,
    with_fields,
)
from mlax.zoo._decoder_block import DecoderBlock, DecoderStack, find_obstacle, use_kernels

Fuse = Literal[
    "nothing",
    "projections",  # queries, keys and values are one product, which sharded kernels cannot be
    "kernels",  # and blocks compute a token with kernels of their own
    "interpreted",  # by Pallas, on any device
]
PROJECTIONS = ("query", "key", "value")
FLAGS = ("decode", "decoding", "stateful", "last_only")  # fields of layers that are True in a decoder


def decoder(model: Layer, length: int) -> Any:
    """A language model as a decoder, for autoregressive generation with a KV cache of `length` tokens.

        decoder = zoo.decoder(model, 256)
        _, cache = decoder.init(rng, prompts)
        logits, cache = decoder.fwd((prompts, lengths), trainables, cache, inference_mode=True)  # (b, 1, v)
        logits, cache = decoder.fwd(token, trainables, cache, inference_mode=True)  # token (b, 1)

    Trainables are those of the model. It sets `cache=length` on each nn.MultiHeadAttention with `causal` or `cross`,
    and on all other layers the fields that there are among `decode` (nn.Mamba), `decoding` (nn.LearnedPositions),
    `stateful` (mlax.Recurrent) and `last_only`. Each call continues each row where the one before it ended, and of an
    encoder-decoder only the first one has the source. A loop over tokens is faster with `mlax.unstack`.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> mlax.get(zoo.decoder(model, 16), "blocks/stacked/attend").cache
    16
    """
    check_layer("decoder", "the model", model)
    found = _set_fields(model, length)
    if not any(_has_state(layer) for _, layer in find_layers(found, Layer)):
        raise ValueError(
            f"decoder: {type(model).__name__} has no causal nn.MultiHeadAttention, and no layer with a field decode, "
            "so that it would forget the tokens of earlier calls; a language model attends with causal=True."
        )
    return found


def _has_state(layer: Layer) -> bool:
    """Whether a layer of a decoder keeps the tokens of earlier calls; a counter of positions does not."""
    fields = fields_of(layer)
    is_counter = isinstance(layer, nn.LearnedPositions | nn.SinusoidalPositions)
    return not is_counter and any(fields.get(name) for name in ("cache", "decode", "decoding", "stateful"))


def _set_fields(layer: Layer, length: int) -> Any:
    """The layer with its fields set, and then its parts, which may follow from them."""
    fields: dict[str, Any] = {name: True for name in FLAGS if name in fields_of(layer)}
    if _needs_cache(layer):
        fields["cache"] = length
    layer = with_fields(layer, **fields) if fields else layer
    if isinstance(layer, Wrapper):
        return with_fields(layer, layer=_set_fields(layer.layer, length))
    if isinstance(layer, Composite):
        parts = {name: (part, _set_fields(part, length)) for name, part in parts_of(layer).items()}
        changed = {name: new for name, (old, new) in parts.items() if new != old}
        return layer.with_parts(changed) if changed else layer
    return layer


def _needs_cache(layer: Layer) -> bool:
    """Whether a layer attends to tokens of earlier calls; that of an encoder does not."""
    if isinstance(layer, nn.RelativeBias):
        return not layer.bidirectional
    return isinstance(layer, nn.MultiHeadAttention) and (layer.causal or layer.cross)


def prepare_decoder(
    model: Layer, length: int, trainables: Tree, *, rows: int, fuse: Fuse = "nothing"
) -> tuple[Any, Tree]:
    """The decoder and its trainables in the form that a loop over tokens of so many rows is fastest with.

    No variables are stacked, so that the loop's carry has each layer's cache as a separate array, which is updated in
    place; casts of mixed precision are done here, once, not at each token; and what `fuse` says is fused, as
    `choose_fusion` finds.
    """
    model, trainables = unstack(decoder(model, length), trainables)
    boundaries = sorted(find_layers(model, dtypes.Mixed), key=lambda each: each[0].count("/"))  # outer ones first
    for path, mixed in boundaries:
        own = _leaves_below(trainables, path)
        trainables = unflatten_paths({**flatten_paths(trainables), **dtypes.cast(own, mixed.compute)}.items())
    model = map_layers(model, "", functools.partial(_follow_dtype, trainables))
    if fuse == "nothing":
        return model, trainables
    model, trainables = _fuse_projections(model, trainables)
    if fuse == "projections":
        return model, trainables
    return use_kernels(model, trainables, rows, interpret=fuse == "interpreted")


def decoding_backend(model: Layer, trainables: Tree, *, batch: int = 1, length: int = 1024) -> str:
    """The backend that computes a token of each row in `zoo.generate`, and why: "pallas: ..." or "xla: ...".

    "pallas" is for blocks of GPT-2 up to a width of 768, in bfloat16 with float32 statistics, as
    `dtypes.mixed_bfloat16` makes them, on one NVIDIA GPU of Hopper (H100, H200), with one row, or a multiple of 16 up
    to 256 whose heads fill a GPU: five or seven kernels a block, of which attention reads the filled slots of the cache
    alone. "xla" is for everything else, also what the kernels refuse to compile. `batch` is the number of rows,
    `length` the capacity of the cache.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> zoo.decoding_backend(model, trainables).partition(":")[0]
    'xla'
    """
    check_layer("decoding_backend", "the model", model)
    fuse = choose_fusion(trainables)
    if fuse == "nothing":
        return "xla: the weights are on several devices, or traced"
    if fuse == "projections":
        return "xla: the kernels are for NVIDIA GPUs of Hopper, and the weights are on another device"
    decoders: list[Any] = []

    def prepare(trainables: Tree) -> tuple[Tree, Tree]:
        found, weights = prepare_decoder(model, length, trainables, rows=batch, fuse=fuse)
        decoders.append(found)
        return weights, init_state(found, jnp.zeros((batch, 1), np.int32))

    weights, state = jax.eval_shape(prepare, trainables)
    layers = [layer for _, chain in find_layers(decoders[0], Chain) for layer in chain.layers]
    fused: list[Any] = [*find_layers(decoders[0], DecoderBlock), *find_layers(decoders[0], DecoderStack)]
    if not fused:
        return f"xla: {find_obstacle(layers[0] if layers else model, batch)}"
    path, layer = fused[0]
    block: Any = layers[0].layer if isinstance(layers[0], DecoderBlock) else layers[0]
    x = jax.ShapeDtypeStruct((batch, 1, block.width), jnp.bfloat16)
    refusal = layer.find_refusal(x, get(weights, path), get(state, path))
    return "pallas: the device and the model allow it" if refusal is None else f"xla: {refusal}"


def _fuse_projections(model: Layer, trainables: Tree) -> tuple[Any, Tree]:
    """The model with one product for queries, keys and values in each self-attention whose projections are alike."""
    leaves = flatten_paths(trainables)

    def fuse(path: str, layer: Layer) -> Layer:
        if not isinstance(layer, nn.MultiHeadAttention) or layer.cross or layer.cache is None or layer.fused:
            return layer
        edits, parts = dict(layer.edits), [parts_of(layer)[name] for name in PROJECTIONS]
        dtypes = {part.dtype if isinstance(part, nn.QuantizedLinear) else None for part in parts}
        is_edited = any(name in edits for name in PROJECTIONS)
        if len(dtypes) > 1 or (is_edited and dtypes == {None}):  # LoRA, say
            return layer
        outputs: Any = parts[0].tensor_parallel_axes(1)  # the axis of outputs of each leaf
        for leaf, axis in outputs.items():
            names = [f"{path}/{part}/{leaf}".lstrip("/") for part in PROJECTIONS]
            if names[0] in leaves:
                joined = jnp.concatenate([leaves.pop(name) for name in names], axis=axis)
                leaves[f"{path}/qkv/{leaf}".lstrip("/")] = joined
        others = tuple((name, part) for name, part in layer.edits if name not in PROJECTIONS)
        fused: Any = with_fields(layer, fused=True, edits=others)
        joint: Any = parts_of(fused)["qkv"]
        (dtype,) = dtypes
        return fused if dtype is None else fused.with_parts({"qkv": nn.QuantizedLinear(joint, dtype)})

    return map_layers(model, "", fuse), unflatten_paths(leaves.items())


def choose_fusion(trainables: Tree) -> Fuse:
    """What a decoder fuses with these weights, by their devices.

    Nothing if the weights are sharded, or tracers, which may be. Kernels only where they are measured to be faster.
    """
    leaves = jax.tree.leaves(trainables)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return "nothing"
    devices = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.sharding.device_set}
    if len(devices) > 1:
        return "nothing"
    # where a program of uncommitted arrays runs: a device, a platform or None
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    candidates = [*devices] if default is None else [*devices, default]
    return "kernels" if all(map(_gpu.is_hopper, candidates or jax.devices()[:1])) else "projections"


class Counters:
    """The counters of a decoder's tokens, of which the layers of a Chain have one in common.

    Equal layers of a Chain are called on as many tokens and the same lengths. With one counter for all of them, XLA
    computes positions and masks once for all layers, and the carry of a loop has fewer arrays.
    """

    def __init__(self, decoder: Layer):
        chains = [path for path, chain in find_layers(decoder, Chain) if len(set(chain.layers)) == 1]
        self.first: dict[str, str] = {}  # the path of the counter that stands for the one at a path
        self.counts: set[str] = set()  # the paths of all counters
        for path, layer in find_layers(decoder, nn.MultiHeadAttention):
            first = path if layer.cache is not None and not layer.cross else ""
            for chain in chains:
                head = "/".join(filter(None, (chain, "layers")))
                first = re.sub(rf"^{re.escape(head)}/\d+/", f"{head}/0/", first)
            if first:
                self.counts.add(f"{path}/position/count")
            if first not in (path, ""):
                self.first[f"{path}/position/count"] = f"{first}/position/count"

    def drop(self, state: Tree) -> Tree:
        """The state with one counter for each group."""
        return unflatten_paths((path, leaf) for path, leaf in flatten_paths(state).items() if path not in self.first)

    def align_rows(self, state: Tree) -> Tree:
        """The state with one count for all rows, which must be at the same position."""
        leaves = flatten_paths(state)
        return unflatten_paths((path, leaf[:1] if path in self.counts else leaf) for path, leaf in leaves.items())

    def restore(self, state: Tree) -> Tree:
        """The state with all counters."""
        leaves = flatten_paths(state)
        return unflatten_paths({**leaves, **{path: leaves[first] for path, first in self.first.items()}}.items())


def _follow_dtype(trainables: Tree, path: str, layer: Layer) -> Layer:
    """An embedding in the dtype of its table, so that `init` sees the dtypes of the computation, as caches need."""
    if not isinstance(layer, nn.Embed):
        return layer
    dtypes = [leaf.dtype for leaf in _leaves_below(trainables, path).values()]
    wide = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1]
    return with_fields(layer, param_dtype=wide[0]) if wide else layer


def _leaves_below(tree: Tree, path: str) -> dict[str, Any]:
    return {name: leaf for name, leaf in flatten_paths(tree).items() if not path or name.startswith(f"{path}/")}


@functools.partial(jax.jit, static_argnums=0)
def init_state(decoder: Layer, inputs: Any, non_trainables: Tree = None) -> Tree:
    """The state of a decoder before its first token, for inputs of these shapes; `non_trainables` are kept."""
    _, state = decoder.init(jax.random.key(0), inputs)  # the weights are unused, and so not computed
    return unflatten_paths({**flatten_paths(state), **flatten_paths(non_trainables)}.items())


def row_axes(decoder: Layer, inputs: Any) -> Any:
    """The axis of rows of each leaf of the state, for inputs of these shapes; -1 for a leaf without rows."""

    def shapes(rows: int) -> Any:
        resized = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), inputs)
        return jax.eval_shape(functools.partial(init_state, decoder), resized)

    def differing_axis(one: Any, other: Any) -> int:
        return next(
            (axis for axis, sizes in enumerate(zip(one.shape, other.shape, strict=True)) if len({*sizes}) > 1), -1
        )

    return jax.tree.map(differing_axis, shapes(2), shapes(3))
