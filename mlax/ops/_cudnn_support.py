"""Whether cuDNN computes an attention: asked by compiling it, and remembered beside the compilation cache."""

import functools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mlax._gpu import Record, find_record, hash_files
from mlax.ops._attention_cudnn import fused_attention
from mlax.ops._attention_scores import ScoreSpec


def find_refusal(q: Any, k: Any, v: Any, bias: Any, lengths: Any, spec: ScoreSpec) -> str | None:
    """What cuDNN answers if it refuses the forward or the backward pass of arrays of these shapes; None if it accepts.

    JAX and cuDNN check while tracing, lowering and compiling, by rules that change with their versions, so the answer
    is found by compiling both passes once. With a persistent compilation cache, the next process finds a record of what
    was accepted, and loads cuDNN, which takes a second, in the background.
    """
    described = [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, bias)]
    limits = None if lengths is None else jax.ShapeDtypeStruct(lengths.shape, np.int32)
    return _find_refusal(*described, limits, spec)


@functools.lru_cache(maxsize=1024)
def _find_refusal(q: Any, k: Any, v: Any, bias: Any, lengths: Any, spec: ScoreSpec) -> str | None:
    arrays = [x for x in (q, k, v, bias) if x is not None]
    # a refusal has no record: it may be due to a lack of memory
    record = find_record("cudnn", repr(arrays), repr(lengths), repr(spec), _program_hash())
    if record is not None and record.read() == b"":
        load = functools.partial(_load_cudnn, record, arrays, lengths, spec)
        threading.Thread(target=load, name="load cuDNN").start()
        return None
    refusal = _compile_both_passes(arrays, lengths, spec)
    if refusal is None and record is not None:
        record.write()
    return refusal


def _load_cudnn(record: Record, arrays: list[Any], lengths: Any, spec: ScoreSpec) -> None:
    """Compile, which loads cuDNN, and delete the record if it is wrong."""
    if _compile_both_passes(arrays, lengths, spec) is not None:
        record.delete()


def _compile_both_passes(arrays: list[Any], lengths: Any, spec: ScoreSpec) -> str | None:
    """The error, if there is one."""

    def both_passes(arrays: Any, lengths: Any) -> Any:
        y, pull_back = jax.vjp(lambda *arrays: fused_attention(*arrays, lengths=lengths, spec=spec), *arrays)
        return y, pull_back(y)

    try:
        jax.jit(both_passes).lower(arrays, lengths).compile()
    except Exception as error:  # whatever it raises, another backend can compute this attention
        return " ".join(str(error).split())[:200] or type(error).__name__
    return None


@functools.cache
def _program_hash() -> str | None:
    """A hash of the file that calls cuDNN."""
    return hash_files(Path(fused_attention.__code__.co_filename))
