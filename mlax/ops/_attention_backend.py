"""Which backend computes an attention, and why."""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mlax._gpu import compute_capability, prefers_attention_kernel
from mlax._jax import is_static, known_values
from mlax.core import check_is_dtype
from mlax.ops._attention_scores import ScoreSpec
from mlax.ops._cudnn_support import find_refusal

AttentionBackend = Literal["cudnn", "xla", "chunked"]

CPU_CHUNK_SCORES = 1 << 20  # scores of one head, from which a CPU is faster in tiles that fit its cache
CHUNK_SCORES = 1 << 28  # scores of all heads, from which they are never all in memory


def attention_backend(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: int | None = None,
    segments: Any = None,
    lengths: Any = None,
    positions: Any = None,
    mask: Any = None,
    bias: Any = None,
    alibi: bool = False,
    softcap: float | None = None,
    sinks: Any = None,
    scale: float | None = None,
    dropout: float = 0.0,
    accum_dtype: Any = None,
    implementation: Any = None,  # AttentionBackend | None
) -> str:
    """The backend that `attention` chooses for these arguments, arrays or shapes, and why: "xla: 840 scores fit ...".

    - "cudnn", the fastest, on NVIDIA GPUs in float16 and bfloat16. Its softmax is in float32, so it is chosen only
      with `accum_dtype="float32"`, as mixed precision sets it, or `implementation="cudnn"`.
    - "chunked" for long sequences, from 2^28 scores in total, or on a CPU from 2^20 per head: memory grows with t + s
      and not with t x s.
    - "xla" for the rest: plain products, which XLA fuses. On a CPU causal attention goes by up to 4 blocks of queries,
      each with the keys up to its end, unless `implementation="xla"` asks for all scores at once.

    The device is JAX's default backend while tracing. `lax.platform_dependent` alone cannot decide, since cuDNN's form
    cannot even be traced where cuDNN is not installed. cuDNN is asked by compiling the forward and the backward pass
    once for each shape, and what it refuses another backend computes; `implementation="cudnn"` raises then.
    """
    check_is_dtype("attention_backend", accum_dtype=accum_dtype)
    names = get_args(AttentionBackend)
    if implementation not in (None, *names):
        raise ValueError(f"attention: implementation is {implementation!r}, but must be one of {', '.join(names)}.")
    if implementation == "chunked" and dropout > 0.0:
        raise ValueError(
            "attention: implementation is 'chunked', which has no dropout; leave implementation out, or use 'xla'."
        )
    spec = ScoreSpec(scale=q.shape[-1] ** -0.5 if scale is None else scale, causal=causal, window=window)
    obstacle = _cudnn_obstacle(
        q,
        k,
        v,
        bias=bias,
        lengths=lengths,
        spec=spec,
        unsupported={
            "segments": segments is not None,
            "positions": positions is not None,
            "a mask": mask is not None,
            "ALiBi": alibi,
            "a soft cap": softcap is not None,
            "sinks": sinks is not None,
            "dropout": dropout > 0.0,
        },
    )
    if obstacle is None and implementation is None and (accum_dtype is None or jnp.dtype(accum_dtype) != jnp.float32):
        obstacle = "its softmax is in float32, which needs accum_dtype='float32'"
    if obstacle is None and implementation in (None, "cudnn"):
        refusal = find_refusal(q, k, v, bias, lengths, spec)
        obstacle = None if refusal is None else f"it refuses this attention: {refusal}"
    if implementation == "cudnn" and obstacle is not None:
        raise ValueError(
            f"attention: implementation is 'cudnn', but {obstacle}; leave implementation out to choose one that works."
        )
    if implementation is not None:
        return f"{implementation}: chosen by implementation="
    if obstacle is None:
        return "cudnn: the device and the arguments allow it"
    if dropout > 0.0:
        return f"xla: the only one with dropout; not cudnn, since {obstacle}"
    scores = f"{math.prod(_score_sizes(q, k)):,} scores"
    if holds_too_many_scores(q, k):
        return f"chunked: {scores} are too many to hold in memory at once; not cudnn, since {obstacle}"
    return f"xla: {scores} fit in memory at once; not cudnn, since {obstacle}"


def holds_too_many_scores(q: Any, k: Any) -> bool:
    """Whether attention of these shapes is computed in tiles unless cuDNN computes it."""
    heads, head_scores = _score_sizes(q, k)
    return heads * head_scores >= CHUNK_SCORES or (head_scores >= CPU_CHUNK_SCORES and jax.default_backend() == "cpu")


def find_kernel_keys(q: Any, k: Any, v: Any, bias: Any, lengths: Any, spec: ScoreSpec) -> int | None:
    """The number of keys, without padding, if the kernel computes this attention, which cuDNN does, in a `layer_scan`.

    None if it does not: it is for self-attention of the kinds that it was measured for, in programs of one Hopper GPU,
    with lengths, if any, that are equal and known while tracing.
    """
    s = k.shape[1]
    known = None if lengths is None else known_values(lengths)
    is_supported = (
        prefers_attention_kernel(q, k, v)
        and spec.scale > 0.0
        and spec.window is None
        and bias is None
        and (lengths is None or (known is not None and bool(np.all(known == known[0])) and 1 <= known[0] <= s))
    )
    if not is_supported:
        return None
    return s if known is None else int(known[0])


def _score_sizes(q: Any, k: Any) -> tuple[int, int]:
    """Batch times heads, and the scores of each; lower bounds where a size is symbolic."""
    return math.prod(filter(is_static, (q.shape[0], q.shape[2]))), math.prod(
        filter(is_static, (q.shape[1], k.shape[1]))
    )


def _cudnn_obstacle(
    q: Any, k: Any, v: Any, *, bias: Any, lengths: Any, spec: ScoreSpec, unsupported: dict[str, bool]
) -> str | None:
    """Why cuDNN should not be asked to compute this attention on the default device; None if it should."""
    capability = compute_capability()
    if capability is None:
        return "there is no NVIDIA GPU"
    (_, t, h, width), s = q.shape, k.shape[1]
    widest = 256 if capability >= 9.0 else 128
    present = [name for name, is_present in unsupported.items() if is_present]
    if not is_static(*q.shape, *k.shape):
        return "it needs sizes that are known while tracing"
    if jnp.dtype(q.dtype) not in (jnp.float16, jnp.bfloat16):
        return f"it supports float16 and bfloat16 but not {q.dtype}"
    if width != v.shape[-1]:
        return f"it supports keys and values of equal width but not {width} and {v.shape[-1]}"
    if width % 8 or width > widest:
        return f"it supports head widths that are multiples of 8 up to {widest} but not {width}"
    if 0 in (math.prod(q.shape), math.prod(k.shape)):
        return "there is nothing to compute"
    if present:
        return f"it does not support {' or '.join(present)}"
    if spec.window is not None and not spec.causal:
        return "its window looks back only, and this attention is not causal"
    if spec.window is not None and lengths is not None:
        return "it does not support a window with lengths, behind which a query has no key"
    # for any other shape it would silently return no gradient of the bias
    if bias is not None and (bias.shape != (1, h, t, s) or t % 2 or s % 2 or capability < 9.0):
        return (
            f"it supports a bias of the shape {(1, h, t, s)} with even times, on Hopper or later, but not {bias.shape}"
        )
    return None
