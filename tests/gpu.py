"""What kernels for a GPU are tested by where there is none: the choice of them, lowering for CUDA, an interpreter."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from mlax import _gpu

GPU = inspect.getmodule(inspect.unwrap(_gpu.kernel_backend))
ROWS = inspect.getmodule(inspect.unwrap(_gpu.norm_kernel))
needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="kernels need JAX 0.11")


def assume_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mlax choose its kernels as on one GPU of compute capability 9.0."""
    monkeypatch.setattr(GPU, "compute_capability", lambda device=None: 9.0)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@contextlib.contextmanager
def compilation_cache(folder: Path) -> Iterator[None]:
    """A persistent compilation cache in this folder."""
    old = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield
    jax.config.update("jax_compilation_cache_dir", old)


def lower_for_cuda(function: Callable[..., Any], *args: Any) -> str:
    """The StableHLO of a function for a GPU; `count_kernels` counts the kernels in Pallas in it."""
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def count_kernels(function: Callable[..., Any], *args: Any) -> int:
    return lower_for_cuda(function, *args).count("custom_call @mosaic_gpu")


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run kernels by the interpreter of Pallas."""
    from jax.experimental.pallas import mosaic_gpu

    if not hasattr(mosaic_gpu, "InterpretGPUParams"):
        pytest.skip("JAX 0.12 has a public interpreter")
    interpreted = functools.partial(mosaic_gpu.kernel, interpret=mosaic_gpu.InterpretGPUParams())
    monkeypatch.setattr(mosaic_gpu, "kernel", interpreted)
