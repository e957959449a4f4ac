"""Whether cuDNN computes an attention: asked by compiling it, and remembered beside the compilation cache."""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxlib import version as jaxlib_version

from mlax._jax import cuda_versions
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
    record = _record_of(arrays, lengths, spec)
    if record is not None and record.exists():
        load = functools.partial(_load_cudnn, record, arrays, lengths, spec)
        threading.Thread(target=load, name="load cuDNN").start()
        return None
    refusal = _compile_both_passes(arrays, lengths, spec)
    if refusal is None and record is not None:
        record.write()
    return refusal


def _load_cudnn(record: "Record", arrays: list[Any], lengths: Any, spec: ScoreSpec) -> None:
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


class Record(NamedTuple):
    """A file that says that cuDNN accepted an attention. Without this text in full it says nothing."""

    file: Path
    text: bytes

    def exists(self) -> bool:
        with contextlib.suppress(OSError):
            if self.file.is_file():  # a pipe would block
                with self.file.open("rb") as opened:
                    return opened.read(len(self.text) + 1) == self.text
        return False

    def write(self) -> None:
        """Write it, unless the folder is missing, read-only or full."""
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=self.file.parent) as folder:
            written = Path(folder, self.file.name)
            written.write_bytes(self.text)
            os.replace(written, self.file)

    def delete(self) -> None:
        with contextlib.suppress(OSError):
            self.file.unlink()


def _record_of(arrays: list[Any], lengths: Any, spec: ScoreSpec) -> Record | None:
    """The record of this attention on the default device, with all that the answer depends on.

    None without a persistent cache on a disk, or if a version is unknown, or for several processes, among which XLA may
    divide the work of compiling. A refusal has no record: it may be due to a lack of memory.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    if not folder or "://" in folder or jax.process_count() > 1:
        return None
    versions, program, device = cuda_versions(), _program_hash(), jax.devices()[0]
    if versions is None or program is None:
        return None
    described = {
        "accepted": [repr(arrays), repr(lengths), repr(spec), program],
        "versions": [jax.__version__, jaxlib_version.__version__, *map(str, versions), device.client.platform_version],
        "device": [device.device_kind, str(getattr(device, "compute_capability", ""))],
        "options": [os.environ.get("XLA_FLAGS", ""), config.jax_enable_x64],
    }
    text = json.dumps(described).encode()
    return Record(Path(folder, f"cudnn-{hashlib.sha256(text).hexdigest()[:32]}"), text)


@functools.cache
def _program_hash() -> str | None:
    """A hash of the file that calls cuDNN; None if it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(fused_attention.__code__.co_filename).read_bytes()).hexdigest()
    return None
