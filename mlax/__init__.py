"""mlax: a purely functional neural-network library on JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from mlax.core import *  # noqa: F403
from mlax.core import __all__ as _core

if TYPE_CHECKING:
    from mlax import dtypes, nn, ops, optim

__version__ = "0.1.0"
__all__ = [*_core, "dtypes", "nn", "ops", "optim"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """The other rooms, each loaded when it is first used."""
    if name in ("dtypes", "nn", "ops", "optim"):
        return importlib.import_module(f"mlax.{name}")
    raise AttributeError(f"mlax has no {name!r}; it has {', '.join(__all__)}.")
