"""mlax: a purely functional neural-network library on JAX."""

from mlax import dtypes, nn, ops
from mlax.core import *  # noqa: F403
from mlax.core import __all__ as _core

__version__ = "0.1.0"
__all__ = [*_core, "dtypes", "nn", "ops"]  # pyright: ignore[reportUnsupportedDunderAll]
