"""Llama, Mistral, Qwen, Gemma, Mixtral and Phi-3 in their published sizes."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from mlax import nn, ops
from mlax.core import Zeros
from mlax.zoo._llama import Llama

LlamaSize = Literal[
    "2-7b", "2-13b", "2-70b", "3-8b", "3-70b", "3.1-8b", "3.1-70b", "3.1-405b", "3.2-1b", "3.2-3b", "3.3-70b"
]


def llama(size: LlamaSize = "3.2-1b") -> Llama:
    """Llama 2 and 3 in a published size.

    >>> zoo.llama("2-13b")
    Llama(width=5120, hidden=13824, depth=40, heads=40)
    """
    shapes: dict[str, dict[str, Any]] = {
        "1b": {"width": 2048, "hidden": 8192, "depth": 16, "heads": 32, "kv_heads": 8, "tied": True},
        "3b": {"width": 3072, "hidden": 8192, "depth": 28, "heads": 24, "kv_heads": 8, "tied": True},
        "7b": {},
        "8b": {"hidden": 14_336, "kv_heads": 8},
        "13b": {"width": 5120, "hidden": 13_824, "depth": 40, "heads": 40},
        "70b": {"width": 8192, "hidden": 28_672, "depth": 80, "heads": 64, "kv_heads": 8},
        "405b": {"width": 16_384, "hidden": 53_248, "depth": 126, "heads": 128, "kv_heads": 8},
    }
    scalings = {"3": None, "3.1": nn.Llama3Scaling(factor=8.0), "3.2": nn.Llama3Scaling(factor=32.0)}
    version = size.partition("-")[0]
    shape = _choose("llama", size, {each: shapes[each.partition("-")[2]] for each in get_args(LlamaSize)})
    if version == "2":
        return Llama(**shape)
    rotary = nn.Rotary(base=500_000.0, scaling=scalings["3.1" if version == "3.3" else version])
    return Llama(vocabulary=128_256, positions=8192 if version == "3" else 131_072, rotary=rotary, **shape)


def mistral(size: Literal["7b", "7b-v0.3", "nemo-12b"] = "7b") -> Llama:
    """Mistral in a published size: 7b is version 0.1, with a sliding window of 4,096 tokens.

    >>> zoo.mistral("7b").windows
    (4096,)
    """
    shape: dict[str, Any] = {"family": "mistral", "hidden": 14_336, "kv_heads": 8}
    long = shape | {"rotary": nn.Rotary(base=1_000_000.0)}
    sizes = {
        "7b": shape | {"positions": 32_768, "windows": (4096,)},
        "7b-v0.3": long | {"vocabulary": 32_768, "positions": 32_768},
        "nemo-12b": long | {"vocabulary": 131_072, "positions": 131_072, "width": 5120, "depth": 40, "head_width": 128},
    }
    return Llama(**_choose("mistral", size, sizes))


def qwen2(size: Literal["0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"] = "0.5b") -> Llama:
    """Qwen 2 and 2.5 in a published size.

    >>> zoo.qwen2("0.5b").tied
    True
    """
    sizes = {
        "0.5b": _shape(896, 4864, 24, 14, 2, tied=True),
        "1.5b": _shape(1536, 8960, 28, 12, 2, tied=True),
        "3b": _shape(2048, 11_008, 36, 16, 2, tied=True),
        "7b": _shape(3584, 18_944, 28, 28, 4, vocabulary=152_064),
        "14b": _shape(5120, 13_824, 48, 40, 8, vocabulary=152_064, norms=nn.RMSNorm(eps=1e-5)),
        "32b": _shape(5120, 27_648, 64, 40, 8, vocabulary=152_064, norms=nn.RMSNorm(eps=1e-5)),
        "72b": _shape(8192, 29_568, 80, 64, 8, vocabulary=152_064, norms=nn.RMSNorm(eps=1e-5)),
    }
    shared: dict[str, Any] = {"family": "qwen2", "vocabulary": 151_936, "positions": 32_768, "bias": True}
    shared["norms"] = nn.RMSNorm(eps=1e-6)
    shared["rotary"] = nn.Rotary(base=1_000_000.0)
    return Llama(**shared | _choose("qwen2", size, sizes))


def qwen3(size: Literal["0.6b", "1.7b", "4b", "8b", "14b", "32b"] = "0.6b") -> Llama:
    """Qwen 3 in a published size, without the mixtures of experts.

    >>> zoo.qwen3("4b").head_width
    128
    """
    sizes = {
        "0.6b": _shape(1024, 3072, 28, 16, 8, head_width=128, tied=True),
        "1.7b": _shape(2048, 6144, 28, 16, 8, tied=True),
        "4b": _shape(2560, 9728, 36, 32, 8, head_width=128, tied=True),
        "8b": _shape(4096, 12_288, 36, 32, 8),
        "14b": _shape(5120, 17_408, 40, 40, 8),
        "32b": _shape(5120, 25_600, 64, 64, 8, head_width=128),
    }
    rotary = nn.Rotary(base=1_000_000.0)
    shape = _choose("qwen3", size, sizes)
    return Llama(
        family="qwen3",
        vocabulary=151_936,
        positions=40_960,
        rotary=rotary,
        norms=nn.RMSNorm(eps=1e-6),
        qk_norm=True,
        **shape,
    )


GEMMA: dict[str, Any] = {  # what all generations of Gemma share
    "vocabulary": 256_000,
    "positions": 8192,
    "activation": ops.gelu,
    "norms": nn.RMSNorm(eps=1e-6, scale_offset=1.0, scale_init=Zeros()),
    "scaled_embed": True,
    "tied": True,
    "padding": 0,
}


def gemma(size: Literal["2b", "7b"] = "2b") -> Llama:
    """Gemma in a published size.

    >>> zoo.gemma("7b").head_width
    256
    """
    sizes = {"2b": _shape(2048, 16_384, 18, 8, 1), "7b": _shape(3072, 24_576, 28, 16, None, head_width=256)}
    return Llama(family="gemma", **GEMMA | _choose("gemma", size, sizes))


def gemma2(size: Literal["2b", "9b", "27b"] = "2b") -> Llama:
    """Gemma 2 in a published size: every other layer has a window, and soft caps bound scores and logits.

    >>> zoo.gemma2("9b").windows
    (4096, None)
    """
    sizes = {
        "2b": _shape(2304, 9216, 26, 8, 4, head_width=256),
        "9b": _shape(3584, 14_336, 42, 16, 8, head_width=256),
        "27b": _shape(4608, 36_864, 46, 32, 16, head_width=128, scale=144**-0.5),
    }
    shape = GEMMA | _choose("gemma2", size, sizes)
    return Llama(family="gemma2", windows=(4096, None), softcap=50.0, logit_softcap=30.0, post_norms=True, **shape)


def gemma3(size: Literal["270m", "1b"] = "1b") -> Llama:
    """Gemma 3 in a published size, those for text alone: five layers with a window for each one without.

    >>> zoo.gemma3("1b").windows
    (512, 512, 512, 512, 512, None)
    """
    sizes = {
        "270m": _shape(640, 2048, 18, 4, 1, head_width=256, vocabulary=262_144, positions=32_768),
        "1b": _shape(1152, 6912, 26, 4, 1, head_width=256, vocabulary=262_144, positions=32_768),
    }
    shape = GEMMA | _choose("gemma3", size, sizes)
    return Llama(
        family="gemma3_text",
        windows=(512,) * 5 + (None,),
        rotary=nn.Rotary(base=1_000_000.0),
        local_rotary=nn.Rotary(),
        qk_norm=True,
        post_norms=True,
        **shape,
    )


def mixtral(size: Literal["8x7b", "8x22b"] = "8x7b") -> Llama:
    """Mixtral in a published size: Llama with eight experts in each layer, of which two compute a token.

    >>> zoo.mixtral("8x7b").experts
    (8, 2)
    """
    sizes = {
        "8x7b": _shape(4096, 14_336, 32, 32, 8, positions=32_768),
        "8x22b": _shape(6144, 16_384, 56, 48, 8, positions=65_536),
    }
    shape = _choose("mixtral", size, sizes)
    return Llama(family="mixtral", experts=(8, 2), rotary=nn.Rotary(base=1_000_000.0), **shape)


def phi3(size: Literal["mini", "medium"] = "mini") -> Llama:
    """Phi-3 in a published size, with a context of 4,096 tokens.

    >>> zoo.phi3("mini").windows
    (2047,)
    """
    sizes = {"mini": _shape(3072, 8192, 32, 32, None), "medium": _shape(5120, 17_920, 40, 40, 10)}
    shape = _choose("phi3", size, sizes)
    return Llama(family="phi3", vocabulary=32_064, padding=32_000, windows=(2047,), **shape)


def _shape(width: int, hidden: int, depth: int, heads: int, kv_heads: int | None, **more: Any) -> dict[str, Any]:
    return {"width": width, "hidden": hidden, "depth": depth, "heads": heads, "kv_heads": kv_heads, **more}


def _choose(name: str, size: str, sizes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if size not in sizes:
        raise ValueError(f"{name}: the size is {size!r}, but must be one of {', '.join(sizes)}.")
    return sizes[size]
