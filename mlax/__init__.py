"""mlax: a purely functional neural-network library on JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from mlax._garbage import pause_garbage_collection

if TYPE_CHECKING:
    from mlax import dtypes, files, inspect, nn, ops, optim, place, train, zoo
    from mlax.core import *  # noqa: F403

_SUBPACKAGES = ("dtypes", "files", "inspect", "nn", "ops", "optim", "place", "train", "zoo")

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The subpackages and the names of `core`, each imported on first use, so that `mlax --help` needs no JAX."""
    if name in _SUBPACKAGES:
        return _import(name)
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"mlax has no {name!r}.")
    core = _import("core")
    names = [*core.__all__, *_SUBPACKAGES]
    if name not in ("__all__", *names):
        raise AttributeError(f"mlax has no {name!r}; it has {', '.join(names)}.")
    value = names if name == "__all__" else getattr(core, name)
    globals()[name] = value
    return value


@pause_garbage_collection()
def _import(name: str) -> Any:
    return importlib.import_module(f"mlax.{name}")


def __dir__() -> list[str]:
    return __getattr__("__all__")
