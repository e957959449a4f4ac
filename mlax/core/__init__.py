"""The contract, the combinators, initialisers and surgery: what `import mlax` gives directly."""

from mlax.core._cell import Cell, CompositeCell
from mlax.core._composite import Composite
from mlax.core._f import F
from mlax.core._frozen import DType, Size, frozen
from mlax.core._initializers import (
    Constant,
    Identity,
    Initializer,
    Normal,
    Ones,
    Orthogonal,
    TruncatedNormal,
    Uniform,
    VarianceScaling,
    Zeros,
    glorot,
    he,
    lecun,
)
from mlax.core._keys import named_key
from mlax.core._layer import Layer, Tree
from mlax.core._map import Map
from mlax.core._parts import Sub
from mlax.core._recurrent import Recurrent
from mlax.core._remat import Remat
from mlax.core._repeat import Repeat
from mlax.core._residual import Residual
from mlax.core._series import Parallel, Series
from mlax.core._surgery import every, get, layers, override, replace
from mlax.core._tied import Tie, Tied
from mlax.core._trees import count, freeze, merge, paths, rename, select
from mlax.core._wrapper import Wrapper

__all__ = [
    "Cell",
    "Composite",
    "CompositeCell",
    "Constant",
    "DType",
    "F",
    "Identity",
    "Initializer",
    "Layer",
    "Map",
    "Normal",
    "Ones",
    "Orthogonal",
    "Parallel",
    "Recurrent",
    "Remat",
    "Repeat",
    "Residual",
    "Series",
    "Size",
    "Sub",
    "Tie",
    "Tied",
    "Tree",
    "TruncatedNormal",
    "Uniform",
    "VarianceScaling",
    "Wrapper",
    "Zeros",
    "count",
    "every",
    "freeze",
    "frozen",
    "get",
    "glorot",
    "he",
    "layers",
    "lecun",
    "merge",
    "named_key",
    "override",
    "paths",
    "rename",
    "replace",
    "select",
]
