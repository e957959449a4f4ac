"""Private JAX API that mlax uses, and why; no other file imports any.

No public function makes an array weakly typed. An optimizer must keep the weak type of its weights, or the functions
that take them would recompile.

No public function gives the version of cuDNN that is loaded, which need not be that of the Python package.
"""

import importlib
from typing import Any

import jax
from jax._src import lib
from jax._src.lax.lax import _convert_element_type

__all__ = ["cuda_versions", "with_weak_type"]


def with_weak_type(x: jax.Array) -> jax.Array:
    """`x` with a weak type."""
    return _convert_element_type(x, x.dtype, weak_type=True)  # pyright: ignore[reportReturnType]


def cuda_versions() -> tuple[Any, ...] | None:
    """The versions of cuDNN, of the CUDA driver and of JAX's plugin for CUDA; None if one of them is unknown."""
    versions: Any = getattr(lib, "cuda_versions", None)
    try:
        plugin: Any = importlib.import_module(f"{versions.__package__}.version")
        return versions.cudnn_get_version(), versions.cuda_driver_get_version(), plugin.__version__
    except Exception:  # no plugin, no driver, no cuDNN, or another JAX
        return None
