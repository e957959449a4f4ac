"""Rows of attention and positions, and their definitions in NumPy."""

import numpy as np

from mlax import nn
from tests.catalogue.core import normed
from tests.catalogue.row import LayerRow


def attend(
    q, k, v, *, causal=False, window=None, alibi=False, softcap=None, sinks=None, bias=0.0, visible=True, scale=None
):
    """Attention of q (b, t, h, k) to k and v (b, s, g, k), as in the papers; a query without visible keys gets 0."""
    (t, h, width), (s, g) = q.shape[1:], k.shape[1:3]
    k, v = (np.repeat(x, h // g, axis=2) for x in (k, v))
    scores = np.einsum("bthk,bshk->bhts", q, k) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    behind = np.arange(t)[:, None] - np.arange(s)
    if alibi:
        scores = scores - 2.0 ** (-8 / h * np.arange(1, h + 1))[:, None, None] * abs(behind)
    scores = scores + bias
    seen = np.broadcast_to(visible, scores.shape)
    if causal:
        seen = seen & (behind >= 0)
    if window is not None:
        seen = seen & (abs(behind) < window)
    weights = np.where(seen, np.exp(scores - scores.max()), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - scores.max())
    weights = weights / np.where(total == 0, 1, total)
    return np.einsum("bhts,bshk->bthk", weights, v)


def attend_to(x, **options):
    return attend(x["query"], x["key"], x["value"], **options)


def rotate(x, frequencies):
    """Each pair (i, i + n) of x (b, t, h, 2n) as a complex number, times e^(i position frequency)."""
    n = len(frequencies)
    angles = np.arange(x.shape[1])[:, None, None] * np.asarray(frequencies)
    turned = (x[..., :n] + 1j * x[..., n : 2 * n]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, x[..., 2 * n :]], -1)


def frequencies(width, base=10_000.0):
    return base ** (-np.arange(0, width, 2) / width)


def llama3(frequencies, factor=8.0, low=1.0, high=4.0, length=8192):
    waves = 2 * np.pi / frequencies
    smooth = (length / waves - low) / (high - low)
    mixed = (1 - smooth) * frequencies / factor + smooth * frequencies
    return np.where(waves > length / low, frequencies / factor, np.where(waves < length / high, frequencies, mixed))


def yarn(width, base, factor, length, fast=32.0, slow=1.0):
    """The frequencies of YaRN, as Hugging Face's Transformers computes them."""

    def correction(rotations):
        return width * np.log(length / (rotations * 2 * np.pi)) / (2 * np.log(base))

    low, high = max(np.floor(correction(fast)), 0), min(np.ceil(correction(slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    inverse = 1 / base ** (np.arange(0, width, 2) / width)
    return inverse / factor * ramp + inverse * (1 - ramp)


def sinusoids(t, width):
    angles = np.arange(t)[:, None] * frequencies(width)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(t, width)


def bucket(offset, buckets, farthest, bidirectional):
    """The bucket of one key offset, by the published formula."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    share = np.log(np.float32(distance / exact)) / np.log(farthest / exact)
    return start + min(exact + int(np.float32(share) * np.float32(buckets - exact)), buckets - 1)


def relative(positions, w, buckets=8, farthest=20, bidirectional=True):
    queries, keys = positions
    found = np.vectorize(lambda offset: bucket(offset, buckets, farthest, bidirectional))(
        keys[:, None, :] - queries[:, :, None]
    )
    return w["table"][found].transpose(0, 3, 1, 2)


def multi_head(x, w, *, heads, kv_heads=None, source=None, turn=lambda x: x, norm=None, **options):
    def projected(name, x, count):
        y = x @ w[f"{name}/kernel"] + w.get(f"{name}/bias", 0)
        return y.reshape(*y.shape[:2], count, -1)

    source, kv_heads = x if source is None else source, kv_heads or heads
    q, k, v = projected("query", x, heads), projected("key", source, kv_heads), projected("value", source, kv_heads)
    if norm is not None:
        q, k = norm(q) * w["query_norm/scale"], norm(k) * w["key_norm/scale"]
    y = attend(turn(q), turn(k), v, **options)
    return y.reshape(*y.shape[:2], -1) @ w["out/kernel"] + w.get("out/bias", 0)


def split_projections(w, places):
    names = ("query", "key", "value")
    parts = {leaf: zip(names, np.split(w[f"qkv/{leaf}"], places, axis=-1), strict=True) for leaf in ("kernel", "bias")}
    return {**w, **{f"{name}/{leaf}": each for leaf, pairs in parts.items() for name, each in pairs}}


def linears(d, source, inner, kv, bias=True):
    shapes = {"query": (d, inner), "key": (source, kv), "value": (source, kv), "out": (inner, d)}
    kernels = {f"{name}/kernel": shape for name, shape in shapes.items()}
    return kernels | ({f"{name}/bias": shape[1:] for name, shape in shapes.items()} if bias else {})


def multi_head_with_weights(x, w, *, heads):
    q, k, v = (
        (source @ w[f"{name}/kernel"] + w[f"{name}/bias"]).reshape(*source.shape[:2], heads, -1)
        for name, source in (("query", x["x"]), ("key", x["source"]), ("value", x["value_source"]))
    )
    identity = np.broadcast_to(np.eye(k.shape[1])[None, :, None], (*k.shape[:3], k.shape[1]))
    y = attend(q, k, v)
    y = y.reshape(*y.shape[:2], -1) @ w["out/kernel"] + w["out/bias"]
    return {"y": y, "weights": attend(q, k, identity).transpose(0, 2, 1, 3)}


VALUE_KERNELS = {"query": (6, 6), "key": (4, 6), "value": (9, 10), "out": (10, 4)}
QKV = {"query": (3, 5, 4, 6), "key": (3, 7, 2, 6), "value": (3, 7, 2, 6)}

ROWS = {
    "Attention": LayerRow(
        lambda dtype: nn.Attention(),
        QKV,
        ({}, {}),
        lambda x, w: attend_to(x),
        tolerance=3e-6,
    ),
    "Attention everything": LayerRow(
        lambda dtype: nn.Attention(causal=True, window=3, softcap=2.0, sinks=True, alibi=True, scale=0.5),
        QKV,
        ({"sinks": (4,)}, {}),
        lambda x, w: attend_to(x, causal=True, window=3, softcap=2.0, sinks=w["sinks"], alibi=True, scale=0.5),
        tolerance=3e-6,
        variant=True,
    ),
    "Attention chunked": LayerRow(
        lambda dtype: nn.Attention(causal=True, softcap=2.0, sinks=True, implementation="chunked"),
        QKV,
        ({"sinks": (4,)}, {}),
        lambda x, w: attend_to(x, causal=True, softcap=2.0, sinks=w["sinks"]),
        tolerance=3e-6,
        variant=True,
    ),
    "MultiHeadAttention": LayerRow(
        lambda dtype: nn.MultiHeadAttention(2),
        (3, 5, 6),
        (linears(6, 6, 6, 6), {}),
        lambda x, w: multi_head(x, w, heads=2),
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
    "MultiHeadAttention cross": LayerRow(
        lambda dtype: nn.MultiHeadAttention(4, kv_heads=2, head_width=3, bias=False, dropout=0.2),
        ((3, 5, 6), (3, 7, 4)),
        (linears(6, 4, 12, 6, bias=False), {}),
        lambda x, w: multi_head(x[0], w, heads=4, kv_heads=2, source=x[1]),
        needs_key=True,
        tolerance=3e-6,
        variant=True,
    ),
    "MultiHeadAttention fused": LayerRow(
        lambda dtype: nn.MultiHeadAttention(4, kv_heads=2, value_width=3, causal=True, fused=True),
        (3, 5, 16),
        ({"qkv/kernel": (16, 30), "qkv/bias": (30,), "out/kernel": (12, 16), "out/bias": (16,)}, {}),
        lambda x, w: multi_head(x, split_projections(w, (16, 24)), heads=4, kv_heads=2, causal=True),
        tolerance=3e-6,
        variant=True,
    ),
    "MultiHeadAttention decoder": LayerRow(
        lambda dtype: nn.MultiHeadAttention(
            4,
            kv_heads=1,
            causal=True,
            window=3,
            sinks=True,
            rotary=nn.Rotary(),
            qk_norm=nn.LayerNorm(shift=False),
        ),
        (3, 5, 16),
        (
            linears(16, 16, 16, 4) | {"attend/sinks": (4,), "query_norm/scale": (4,), "key_norm/scale": (4,)},
            {},
        ),
        lambda x, w: multi_head(
            x,
            w,
            heads=4,
            kv_heads=1,
            causal=True,
            window=3,
            sinks=w["attend/sinks"],
            turn=lambda x: rotate(x, frequencies(4)),
            norm=normed,
        ),
        tolerance=1e-5,
        variant=True,
    ),
    "MultiHeadAttention relative": LayerRow(
        lambda dtype: nn.MultiHeadAttention(2, relative=nn.RelativeBias(2, buckets=8, farthest=20, param_dtype=dtype)),
        (3, 5, 6),
        (linears(6, 6, 6, 6) | {"relative/table": (8, 2)}, {}),
        lambda x, w: multi_head(
            x, w, heads=2, bias=relative((np.arange(5)[None], np.arange(5)[None]), {"table": w["relative/table"]})
        ),
        tolerance=3e-6,
        variant=True,
    ),
    "MultiHeadAttention values": LayerRow(
        lambda dtype: nn.MultiHeadAttention(2, value_width=5, features=4, return_weights=True),
        {"x": (3, 5, 6), "source": (3, 7, 4), "value_source": (3, 7, 9)},
        (
            {
                **{f"{name}/kernel": shape for name, shape in VALUE_KERNELS.items()},
                **{f"{name}/bias": shape[1:] for name, shape in VALUE_KERNELS.items()},
            },
            {},
        ),
        lambda x, w: multi_head_with_weights(x, w, heads=2),
        tolerance=3e-6,
        variant=True,
    ),
    "KeyValueCache": LayerRow(
        lambda dtype: nn.KeyValueCache(9),
        {"key": (3, 5, 2, 4), "value": (3, 5, 2, 6)},
        ({}, {"key": (3, 2, 9, 4), "value": (3, 2, 9, 6)}),
        lambda x, w: {name: np.pad(each, ((0, 0), (0, 4), (0, 0), (0, 0))) for name, each in x.items()},
        no_sums="it sums nothing",
        no_single_example="its state has a row for each example",
    ),
    "Rotary": LayerRow(
        lambda dtype: nn.Rotary(),
        (3, 5, 2, 8),
        ({}, {}),
        lambda x, w: rotate(x, frequencies(8)),
        no_sums="it sums nothing",
    ),
    "Rotary YaRN": LayerRow(
        lambda dtype: nn.Rotary(scaling=nn.YaRNScaling(4.0, length=64, attention_factor=1.5)),
        (3, 5, 2, 8),
        ({}, {}),
        lambda x, w: rotate(x, yarn(8, 10_000.0, 4.0, 64)) * 1.5,
        variant=True,
    ),
    "Rotary partial": LayerRow(
        lambda dtype: nn.Rotary(base=500_000.0, width=4, scaling=nn.Llama3Scaling()),
        (3, 5, 2, 8),
        ({}, {}),
        lambda x, w: rotate(x, llama3(frequencies(4, 500_000.0))),
        variant=True,
    ),
    "LearnedPositions": LayerRow(
        lambda dtype: nn.LearnedPositions(9),
        (3, 5, 4),
        ({"table": (9, 4)}, {}),
        lambda x, w: x + w["table"][:5],
    ),
    "LearnedPositions decoding": LayerRow(
        lambda dtype: nn.LearnedPositions(9, decoding=True),
        (3, 5, 4),
        ({"table": (9, 4)}, {"count": (3,)}),
        lambda x, w: x + w["table"][:5],
        no_single_example="its state has a row for each example",
        variant=True,
    ),
    "SinusoidalPositions": LayerRow(
        lambda dtype: nn.SinusoidalPositions(),
        (3, 5, 8),
        ({}, {}),
        lambda x, w: x + sinusoids(5, 8),
        no_sums="it sums nothing",
    ),
    "RelativeBias": LayerRow(
        lambda dtype: nn.RelativeBias(3, buckets=8, farthest=20, param_dtype=dtype),
        ((4, 5), (4, 7)),
        ({"table": (8, 3)}, {}),
        relative,
        integers=40,
        large=((4, 200), (4, 220)),
    ),
    "RelativeBias one-sided": LayerRow(
        lambda dtype: nn.RelativeBias(3, buckets=8, farthest=20, bidirectional=False, param_dtype=dtype),
        ((4, 5), (4, 7)),
        ({"table": (8, 3)}, {}),
        lambda x, w: relative(x, w, bidirectional=False),
        integers=40,
        variant=True,
    ),
}
