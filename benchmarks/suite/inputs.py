"""The same weights and batches for every library: a function of name and shape alone, in NumPy."""

import zlib
from typing import Any

import numpy as np

from benchmarks.suite.works import GPT2, LSTM, MLP, ResNet, ViT

Weights = dict[str, np.ndarray]  # by their names in PyTorch


def make_weights(size: Any) -> Weights:
    """Uniform kernels, norms near one, biases near zero; a wrong or missing leaf changes the loss."""
    return {name: _draw(name, shape) for name, shape in _SHAPES[type(size)](size).items()}


def make_batch(size: Any) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a step."""
    rng = np.random.default_rng(0)
    match size:
        case GPT2():
            text = rng.integers(0, size.vocabulary, (size.batch, size.length + 1), np.int32)
            return text[:, :-1].copy(), text[:, 1:].copy()
        case ResNet() | ViT():
            images = rng.standard_normal((size.batch, size.image, size.image, 3), np.float32)
            return images, rng.integers(0, size.classes, size.batch, np.int32)
        case LSTM():
            x, y = rng.standard_normal((2, size.batch, size.length, size.width), np.float32)
            return x, y / 2
        case MLP():
            lead = (size.steps, size.batch) if size.steps > 1 else (size.batch,)
            x = rng.standard_normal((*lead, size.widths[0]), np.float32)
            return x, rng.integers(0, size.widths[-1], lead, np.int32)
    raise TypeError(f"make_batch: there is no batch for {size!r}.")


def make_decoder_weights(size: GPT2) -> Weights:
    """Larger kernels than a training starts with, or the tokens hardly depend on the text."""
    weights = make_weights(size)
    return {name: each * 12 if ".h." in name and each.ndim == 2 else each for name, each in weights.items()}


def make_prompts(size: GPT2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size.vocabulary, (size.batch, size.prompt), np.int32)


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.random(shape, np.float32) * 2 - 1
    if len(shape) == 1:
        return values * 0.02 + name.endswith(("weight", "running_var"))
    inputs = np.prod(shape[1:]) if len(shape) == 4 else shape[-1]  # of a convolution; of the others nearly
    return values * np.float32((2 / inputs) ** 0.5 if len(shape) == 4 else min(0.035, inputs**-0.5))


def _gpt2(size: GPT2) -> dict[str, tuple[int, ...]]:
    d, names = size.width, {"wte.weight": (size.vocabulary, size.width), "wpe.weight": (size.length, size.width)}
    for i in range(size.depth):
        names |= {
            **_norm(f"h.{i}.ln_1", d),
            f"h.{i}.attn.c_attn.weight": (d, 3 * d),  # (in, out), unlike nn.Linear's
            f"h.{i}.attn.c_attn.bias": (3 * d,),
            f"h.{i}.attn.c_proj.weight": (d, d),
            f"h.{i}.attn.c_proj.bias": (d,),
            **_norm(f"h.{i}.ln_2", d),
            f"h.{i}.mlp.c_fc.weight": (d, 4 * d),
            f"h.{i}.mlp.c_fc.bias": (4 * d,),
            f"h.{i}.mlp.c_proj.weight": (4 * d, d),
            f"h.{i}.mlp.c_proj.bias": (d,),
        }
    return {f"transformer.{name}": shape for name, shape in {**names, **_norm("ln_f", d)}.items()}


def _vit(size: ViT) -> dict[str, tuple[int, ...]]:
    d, tokens = size.width, (size.image // size.patch) ** 2 + 1
    names = {
        "class_token": (1, 1, d),
        "conv_proj.weight": (d, 3, size.patch, size.patch),
        "conv_proj.bias": (d,),
        "encoder.pos_embedding": (1, tokens, d),
    }
    for i in range(size.depth):
        block = f"encoder.layers.encoder_layer_{i}"
        names |= {
            **_norm(f"{block}.ln_1", d),
            f"{block}.self_attention.in_proj_weight": (3 * d, d),
            f"{block}.self_attention.in_proj_bias": (3 * d,),
            **_linear(f"{block}.self_attention.out_proj", d, d),
            **_norm(f"{block}.ln_2", d),
            **_linear(f"{block}.mlp.0", d, 4 * d),
            **_linear(f"{block}.mlp.3", 4 * d, d),
        }
    return {**names, **_norm("encoder.ln", d), **_linear("heads.head", d, size.classes)}


def _resnet(size: ResNet) -> dict[str, tuple[int, ...]]:
    names, inputs = {"conv1.weight": (64, 3, 7, 7), **_batch_norm("bn1", 64)}, 64
    for stage, depth in enumerate(size.depths, 1):
        width = 64 * 2 ** (stage - 1)
        for i in range(depth):
            block = f"layer{stage}.{i}"
            for j, (c, o, k) in enumerate([(inputs, width, 1), (width, width, 3), (width, 4 * width, 1)], 1):
                names |= {f"{block}.conv{j}.weight": (o, c, k, k), **_batch_norm(f"{block}.bn{j}", o)}
            if i == 0:
                names |= {f"{block}.downsample.0.weight": (4 * width, inputs, 1, 1)}
                names |= _batch_norm(f"{block}.downsample.1", 4 * width)
            inputs = 4 * width
    return {**names, **_linear("fc", inputs, size.classes)}


def _lstm(size: LSTM) -> dict[str, tuple[int, ...]]:
    names = {}
    for i in range(size.depth):
        for part in ("ih", "hh"):
            names |= {
                f"rnn.weight_{part}_l{i}": (4 * size.width, size.width),
                f"rnn.bias_{part}_l{i}": (4 * size.width,),
            }
    return names


def _mlp(size: MLP) -> dict[str, tuple[int, ...]]:
    pairs = enumerate(zip(size.widths, size.widths[1:], strict=False))
    return {name: shape for i, (d, f) in pairs for name, shape in _linear(f"{2 * i}", d, f).items()}


def _norm(name: str, d: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (d,), f"{name}.bias": (d,)}


def _batch_norm(name: str, c: int) -> dict[str, tuple[int, ...]]:
    return {**_norm(name, c), f"{name}.running_mean": (c,), f"{name}.running_var": (c,)}


def _linear(name: str, d: int, f: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (f, d), f"{name}.bias": (f,)}


_SHAPES = {GPT2: _gpt2, ViT: _vit, ResNet: _resnet, LSTM: _lstm, MLP: _mlp}
