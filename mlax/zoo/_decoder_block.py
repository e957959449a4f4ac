"""Blocks of GPT-2 that compute one token with kernels of their own, on the GPUs where these are faster than XLA's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlax import _gpu, nn
from mlax.core import (
    Chain,
    Layer,
    Tree,
    Wrapper,
    find_layers,
    flatten_paths,
    frozen,
    map_layers,
    parts_of,
    unflatten_paths,
    with_fields,
)
from mlax.zoo._gpt2 import GPT2, GPT2Block

LINEARS = ("attend/qkv", "attend/out", "up", "down")
WIDEST, MOST_ROWS = 768, 256  # that were measured; the larger both are, the less of the time is the start of kernels
PROGRAMS = 128  # heads of all rows, from which on attention with a program for each has work for a whole GPU
ALIGNMENT = 128  # of the vocabulary: products of an odd one are slower, or XLA pads the table, at each token


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
        x, attend = x[:, 0], weights["attend"]
        linear = functools.partial(_gpu.fused_linear, eps=self.layer.eps, interpret=self.interpret)
        qkv = linear(x, **attend["qkv"], norm=_scale_and_shift(weights["norm1"]))
        y, state = _attend(self, self.layer, qkv, None, state, lengths)
        x = linear(y, **attend["out"], residual=x)
        hidden = linear(x, **weights["up"], norm=_scale_and_shift(weights["norm2"]), gelu=True)
        return linear(hidden, **weights["down"], residual=x)[:, None], state

    def find_refusal(self, x: Any, trainables: Any, non_trainables: Any) -> str | None:
        """Why the kernels do not compute arrays of these shapes and dtypes; None if they do."""
        if x.shape[:2] != (1, 1):
            return "the kernels are for one token of one row"
        return _refuse_dtypes(x, trainables, non_trainables) or _refuse_compilation(self, x, trainables, non_trainables)


@frozen
class DecoderStack(Wrapper):
    """A Chain of GPT2Blocks that computes a token of many rows with seven kernels a block.

    Residual and norm; queries, keys and values; attention; output; residual and norm; hidden layer; output. Products
    are split along k (split-K) to use the whole GPU, and their partial sums are reduced by the kernel that comes next,
    also if that is in the next block.
    """

    layer: Any  # the Chain
    interpret: bool = False  # whether Pallas interprets the kernels, on any device

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        token, lengths = x if isinstance(x, tuple) else (x, None)
        if inference_mode and self.find_refusal(token, trainables, non_trainables) is None:
            return self.decode(token, trainables, non_trainables, lengths)
        return self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

    def decode(self, x: Any, weights: Any, state: Any, lengths: Any = None) -> tuple[Any, Any]:  # (b, 1, d)
        """The output of all blocks for one token of each row, and their new state; a row of length 0 stays."""
        stream: Any = (x[:, 0], None, None)
        states: dict[str, Any] = {}
        for index, block in enumerate(self.layer.layers):
            name = str(index)
            stream, states[name] = self.decode_block(
                block, stream, weights["layers"][name], state["layers"][name], lengths
            )
        x, partial, bias = stream
        x = x.astype(np.float32) + (partial.sum(0) + bias.astype(np.float32))
        return x.astype(bias.dtype)[:, None], {"layers": states}

    def decode_block(self, block: Any, stream: Any, weights: Any, state: Any, lengths: Any) -> tuple[Any, Any]:
        """One block. `stream` is x (b, d), and the partial sums of a product and a bias that are to be added to it."""
        attend, norm = weights["attend"], functools.partial(_gpu.sum_and_norm, eps=block.eps, interpret=self.interpret)
        x, partial, bias = stream
        x, y = norm(x, *_scale_and_shift(weights["norm1"]), partial, bias)
        qkv = self.multiply(y, attend["qkv"]["kernel"])
        y, state = _attend(self, block, qkv, attend["qkv"]["bias"], state, lengths)
        partial = self.multiply(y, attend["out"]["kernel"])
        x, y = norm(x, *_scale_and_shift(weights["norm2"]), partial, attend["out"]["bias"])
        hidden = _gpu.rows_linear(y, **weights["up"], gelu=True, interpret=self.interpret)
        return (x, self.multiply(hidden, weights["down"]["kernel"]), weights["down"]["bias"]), state

    def multiply(self, x: Any, kernel: Any) -> Any:
        """The partial sums (p, b, f), in float32, of a split-K product of x (b, d) with a kernel (d, f)."""
        splits = max(2, _gpu.fastest_split(x.shape[0], *kernel.shape))  # one would be rounded to the dtype of x
        return _gpu.rows_linear(x, kernel, splits=splits, interpret=self.interpret)

    def find_refusal(self, x: Any, trainables: Any, non_trainables: Any) -> str | None:
        """Why the kernels do not compute arrays of these shapes and dtypes; None if they do."""
        if x.shape[1] != 1:
            return "the kernels are for one token of each row"
        first = with_fields(self, layer=Chain(self.layer.layers[:1]))
        variables = ({"layers": {"0": tree["layers"]["0"]}} for tree in (trainables, non_trainables))
        return _refuse_dtypes(x, trainables, non_trainables) or _refuse_compilation(first, x, *variables)


@frozen
class PaddedEmbed(Wrapper):
    """An Embed whose table has more rows, up to a multiple of ALIGNMENT; they are neither tokens nor logits."""

    layer: Any  # the Embed

    def init(self, rng, x):
        trainables, state = self.layer.init(rng, x)
        return {"table": pad_table(trainables["table"])}, state

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        rows, number = trainables["table"].shape[0], self.layer.vocabulary
        padded = with_fields(self.layer, vocabulary=rows)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return padded.fwd(x, trainables)[0][..., :number], non_trainables
        return padded.fwd(jnp.where(x < number, x, rows), trainables)[0], non_trainables


def pad_table(table: Any) -> Any:
    """A table (v, d) with rows of zeros up to a multiple of ALIGNMENT."""
    return jnp.pad(table, ((0, -table.shape[0] % ALIGNMENT), (0, 0)))


def _attend(layer: Any, block: Any, qkv: Any, bias: Any, state: Any, lengths: Any) -> tuple[Any, Any]:
    """Attention of one token of each row, with the cache and the count of its state, and the new state."""
    cache, count = state["attend"]["cache"], state["attend"]["position"]["count"]
    y, keys, values = _gpu.decode_attention(
        qkv,
        cache["key"],
        cache["value"],
        count,
        bias,
        heads=block.heads,
        scale=(block.width // block.heads) ** -0.5,
        interpret=layer.interpret,
    )
    count = count + (1 if lengths is None else lengths.astype(np.int32))
    return y, {"attend": {"cache": {"key": keys, "value": values}, "position": {"count": count}}}


def _refuse_dtypes(*arrays: Any) -> str | None:
    others = {leaf.dtype.name for leaf in jax.tree.leaves(arrays)} - {"bfloat16", "int32"}
    return f"the kernels are for bfloat16, not {', '.join(sorted(others))}" if others else None


def _refuse_compilation(layer: Any, *arrays: Any) -> str | None:
    if layer.interpret:
        return None
    leaves, tree = jax.tree.flatten(arrays)
    return _find_refusal(layer, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


@functools.lru_cache(maxsize=256)
def _find_refusal(layer: Any, tree: Any, leaves: Any) -> str | None:
    """What is raised while a layer is compiled for these shapes, which depends on the versions of JAX and of XLA."""
    arguments = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    try:
        jax.jit(layer.decode).lower(*arguments).compile()
    except Exception as error:  # whatever it raises, XLA can compute the layer
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


def _scale_and_shift(norm: Any) -> tuple[Any, Any]:
    return norm["scale"], norm["shift"]


def transpose_kernels(trainables: Tree, head: str = "") -> Any:
    """The variables of a block, at the path `head`, with its linear kernels transposed."""
    names = {f"{head}{name}/kernel" for name in LINEARS}
    leaves = flatten_paths(trainables).items()
    return unflatten_paths((path, leaf.T if path in names else leaf) for path, leaf in leaves)


def use_kernels(model: Layer, trainables: Tree, rows: int, *, interpret: bool = False) -> tuple[Any, Tree]:
    """The decoder for so many rows, with kernels for each block of GPT-2 that they can compute: (model, trainables)."""
    if rows == 1:
        return _use_row_kernels(model, trainables, interpret)
    stacks: list[str] = []

    def replace(path: str, layer: Layer) -> Layer:
        if not isinstance(layer, Chain) or find_obstacle(layer, rows) is not None:
            return layer
        stacks.append(path)
        return DecoderStack(layer, interpret)

    model = map_layers(model, "", replace)
    return _pad_tables(model, trainables) if stacks else (model, trainables)


def _use_row_kernels(model: Layer, trainables: Tree, interpret: bool) -> tuple[Any, Tree]:
    heads: list[str] = []

    def replace(path: str, layer: Layer) -> Layer:
        if find_obstacle(layer, 1) is not None:
            return layer
        heads.append(f"{path}/" if path else "")
        return DecoderBlock(layer, interpret)

    model = map_layers(model, "", replace)
    for head in heads:
        trainables = transpose_kernels(trainables, head)
    return model, trainables


def _pad_tables(model: Layer, trainables: Tree) -> tuple[Any, Tree]:
    """The model with a PaddedEmbed in each GPT-2 whose vocabulary is odd."""
    paths = {f"{path}/embed".lstrip("/") for path, _ in find_layers(model, GPT2)}
    padded: set[str] = set()

    def replace(path: str, layer: Layer) -> Layer:
        if path not in paths or not isinstance(layer, nn.Embed) or layer.vocabulary % ALIGNMENT == 0:
            return layer
        padded.add(f"{path}/table")
        return PaddedEmbed(layer)

    model, leaves = map_layers(model, "", replace), flatten_paths(trainables).items()
    return model, unflatten_paths((path, pad_table(leaf) if path in padded else leaf) for path, leaf in leaves)


def find_obstacle(layer: Layer, rows: int) -> str | None:
    """Why the kernels cannot compute a token of so many rows by a layer of a decoder; None if they can."""
    if isinstance(layer, Chain):
        return next(filter(None, (find_obstacle(each, rows) for each in layer.layers)), None)
    if not isinstance(layer, GPT2Block):
        return f"the kernels are for blocks of GPT-2, not {type(layer).__name__}"
    if layer.width % 64 or layer.width // layer.heads not in (16, 32, 64, 128):
        return f"the kernels are not for a width of {layer.width} with {layer.heads} heads"
    if layer.width > WIDEST:
        return f"the kernels are for a width of at most {WIDEST}, not {layer.width}"
    if rows > 1 and (rows % 16 or rows > MOST_ROWS):
        return f"the kernels are for one row, or for a multiple of 16 up to {MOST_ROWS}, not {rows}"
    if rows > 1 and rows * layer.heads < PROGRAMS:
        return f"the kernels are for one row, or for {-(-PROGRAMS // layer.heads)} or more, not {rows}"
    parts: dict[str, Any] = {**parts_of(layer)}
    wide = {"accum_dtype": "float32"}
    computed: dict[str, Any] = {**layer.parts(), "drop": parts["drop"]}  # dropout is for training
    computed |= {name: with_fields(computed[name], **wide) for name in ("norm1", "norm2")}
    slots = getattr(parts["attend"], "cache", None)
    computed["attend"] = with_fields(computed["attend"], fused=True, cache=slots, **wide)
    changed = [name for name, part in parts.items() if part != computed.get(name)]
    return f"the kernels compute {computed[changed[0]]}, not {parts[changed[0]]}" if changed else None
