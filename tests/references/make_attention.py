"""Makes attention.npz: `python tests/references/make_attention.py` where torch and numpy are installed."""

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

SHAPES = {  # b, t, s, h, g, k
    "plain": (2, 5, 7, 3, 3, 8),
    "causal": (2, 6, 6, 2, 2, 4),
    "grouped": (1, 5, 5, 4, 2, 6),
    "shared": (2, 3, 4, 4, 1, 5),
    "masked": (2, 4, 6, 2, 2, 3),
    "biased": (2, 4, 6, 2, 1, 3),
    "one": (1, 1, 1, 1, 1, 1),
}


def draw(rng, *shape):
    return torch.tensor(rng.normal(size=shape), dtype=torch.float32, requires_grad=True)


def products():
    """scaled_dot_product_attention and its gradients, in the layout of mlax: (b, t, h, k)."""
    for seed, (name, (b, t, s, h, g, k)) in enumerate(SHAPES.items()):
        rng = np.random.default_rng(seed)
        inputs = {"q": draw(rng, b, t, h, k), "k": draw(rng, b, s, g, k), "v": draw(rng, b, s, g, k)}
        weight = torch.tensor(rng.normal(size=(b, t, h, k)), dtype=torch.float32)
        given = None
        if name == "masked":
            given = torch.tensor(rng.random((b, 1, t, s)) < 0.6) | (torch.arange(s) == 0)
        if name == "biased":
            given = inputs["bias"] = draw(rng, 1, h, t, s)
        y = functional.scaled_dot_product_attention(
            *(inputs[each].transpose(1, 2) for each in "qkv"),
            attn_mask=given,
            is_causal=name in ("causal", "grouped"),
            enable_gqa=h != g,
        ).transpose(1, 2)
        (y * weight).sum().backward()
        yield from ((f"{name}/{each}", x.detach()) for each, x in inputs.items())
        yield from ((f"{name}/grad/{each}", x.grad) for each, x in inputs.items())
        yield from ((f"{name}/y", y.detach()), (f"{name}/weight", weight))
        if name == "masked":
            yield f"{name}/mask", given


def layers():
    """nn.MultiheadAttention, padded self attention and cross attention, with all gradients."""
    for seed, (name, d, source) in enumerate((("self", 12, 12), ("cross", 12, 10))):
        torch.manual_seed(seed)
        rng = np.random.default_rng(100 + seed)
        layer = torch.nn.MultiheadAttention(d, 4, kdim=source, vdim=source, batch_first=True)
        torch.nn.init.normal_(layer.in_proj_bias)
        torch.nn.init.normal_(layer.out_proj.bias)
        x = draw(rng, 3, 5, d)
        inputs = {"x": x} if name == "self" else {"x": x, "source": draw(rng, 3, 7, source)}
        keys = inputs.get("source", x)
        lengths = torch.tensor([keys.shape[1], 2, 1])
        weight = torch.tensor(rng.normal(size=(3, 5, d)), dtype=torch.float32)
        y, _ = layer(x, keys, keys, key_padding_mask=torch.arange(keys.shape[1])[None] >= lengths[:, None])
        (y * weight).sum().backward()

        def split(of):
            if name == "self":
                kernels = of(layer.in_proj_weight).chunk(3)
            else:
                kernels = [of(each) for each in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)]
            biases = of(layer.in_proj_bias).chunk(3)
            for part, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
                yield f"{part}/kernel", kernel.T
                yield f"{part}/bias", bias
            yield "out/kernel", of(layer.out_proj.weight).T
            yield "out/bias", of(layer.out_proj.bias)

        yield from ((f"{name}/{path}", leaf) for path, leaf in split(lambda leaf: leaf.detach()))
        yield from ((f"{name}/grad/{path}", leaf) for path, leaf in split(lambda leaf: leaf.grad))
        yield from ((f"{name}/{each}", x.detach()) for each, x in inputs.items())
        yield from ((f"{name}/grad/{each}", x.grad) for each, x in inputs.items())
        yield from ((f"{name}/y", y.detach()), (f"{name}/weight", weight), (f"{name}/lengths", lengths.int()))


def buckets():
    """T5's buckets in float32 of PyTorch, for offsets from -300 to 300."""
    offsets = torch.arange(-300, 301)
    for name, sided, distance in (("both", 16, offsets.abs()), ("one", 32, (-offsets).clamp(min=0))):
        exact = sided // 2
        share = torch.log(distance.clamp(min=1).float() / exact) / math.log(128 / exact)
        wide = (exact + (share * (sided - exact)).long()).clamp(max=sided - 1)
        found = torch.where(distance < exact, distance, wide)
        yield f"buckets/{name}", found + (16 * (offsets > 0) if name == "both" else 0)


if __name__ == "__main__":
    arrays = {name: np.asarray(x.contiguous()) for part in (products(), layers(), buckets()) for name, x in part}
    np.savez_compressed(Path(__file__).with_name("attention.npz"), **arrays)
