"""compare: where the outputs of two models part; dtypes: in which dtypes the layers of a function compute."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mlax.core import Documented, Layer, Tree, align_columns, capture, check_layer, document_tuple, layers, signature
from mlax.inspect._compile import trace
from mlax.inspect._flops import operations


@document_tuple
class LayerDifference(NamedTuple):
    """How far the outputs of one layer differ between two models."""

    path: str  # "" for the whole model
    first: str  # the signature of the output of the first model
    second: str  # that of the second model
    relative: float  # the norm of the difference over that of the first output
    largest: float  # the largest absolute difference of two elements

    @property
    def dtypes(self) -> str:
        """`float32`, or `float32 and bfloat16`."""
        return " and ".join(dict.fromkeys(each.partition("[")[0] for each in (self.first, self.second)))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(metaclass=Documented):
    """The differences of two models by layer, in the order of the model; `print` shows a table."""

    rows: tuple[LayerDifference, ...]  # one for each layer that both models have
    only_first: tuple[str, ...]  # paths that the second model does not have
    only_second: tuple[str, ...]  # paths that the first model does not have

    def worst(self) -> LayerDifference:
        """The layer after which the outputs differ most."""
        return max(self.rows, key=lambda row: row.relative if np.isfinite(row.relative) else np.inf)

    def first_above(self, tolerance: float) -> LayerDifference | None:
        """The first layer without parts whose relative difference is above a tolerance; None if none is."""
        paths = [row.path for row in self.rows]
        leaves = [row for row in self.rows if not any(path.startswith(f"{row.path}/") for path in paths) and row.path]
        return next((row for row in leaves if not row.relative <= tolerance), None)

    def __str__(self) -> str:
        cells = [
            (row.path or "(model)", row.first, row.dtypes, f"{row.relative:.2e}", f"{row.largest:.2e}")
            for row in self.rows
        ]
        table = align_columns([("layer", "output", "dtype", "relative", "largest"), *cells], right=(3, 4))
        more = [f"only in the first: {', '.join(self.only_first)}"] * bool(self.only_first)
        return "\n".join(
            [*table, *more, *[f"only in the second: {', '.join(self.only_second)}"] * bool(self.only_second)]
        )

    def __repr__(self) -> str:
        return str(self)


def compare(
    first: Layer,
    second: Layer,
    x: Any,
    trainables: Tree,
    non_trainables: Tree = None,
    *,
    second_variables: tuple[Tree, Tree] | None = None,
    rng: jax.Array | None = None,
    inference_mode: bool = True,
) -> Comparison:
    """Compare the outputs of two models layer by layer: a model and its mixed-precision form, say.

    Both are called on `x`, with the same variables unless `second_variables` are passed. Layers are matched by path.

    >>> model, x = mlax.Series(up=nn.Linear(32), norm=nn.LayerNorm()), jnp.ones((8, 16))
    >>> trainables, _ = model.init(jax.random.key(0), x)
    >>> inspect.compare(model, dtypes.mixed_bfloat16(model), x, trainables).worst().relative < 0.02
    True
    """
    check_layer("compare", "the first model", first)
    check_layer("compare", "the second model", second)
    options = {"rng": rng, "inference_mode": inference_mode}
    one = _outputs(first, x, (trainables, non_trainables), options)
    two = _outputs(second, x, second_variables or (trainables, non_trainables), options)
    paths = [path for path in ("", *layers(first)) if path in one and path in two]
    return Comparison(
        tuple(_difference(path, one[path], two[path]) for path in paths),
        tuple(path for path in one if path not in two),
        tuple(path for path in two if path not in one),
    )


def _outputs(model: Layer, x: Any, variables: tuple[Tree, Tree], options: dict[str, Any]) -> dict[str, Any]:
    if not layers(model):
        return {"": model.fwd(x, *variables, **options)[0]}
    y, _, outputs = capture(model, "**")(x, *variables, **options)
    return {"": y, **outputs}


def _difference(path: str, first: Any, second: Any) -> LayerDifference:
    pairs = list(zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=False))
    if not pairs:  # a part may return None
        return LayerDifference(path, signature(first), signature(second), 0.0, 0.0)
    a, b = (np.concatenate(side) for side in zip(*((_flat(a), _flat(b)) for a, b in pairs), strict=True))
    if a.shape != b.shape:
        return LayerDifference(path, signature(first), signature(second), np.inf, np.inf)
    difference, norm = np.abs(a - b), np.linalg.norm(a)
    relative = float(np.linalg.norm(difference) / norm) if norm else float(np.linalg.norm(difference))
    return LayerDifference(path, signature(first), signature(second), relative, float(difference.max(initial=0)))


def _flat(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.complex128 if jnp.iscomplexobj(leaf) else np.float64).ravel()


@document_tuple
class LayerDtypes(NamedTuple):
    """How many operations of a layer compute in which floating dtype."""

    path: str  # of the layer; "" outside of a layer
    is_backward: bool  # whether it is the backward pass
    counts: tuple[tuple[str, int], ...]  # the most frequent first


@dataclasses.dataclass(frozen=True, repr=False)
class Dtypes(metaclass=Documented):
    """The floating dtypes of a function by layer; `print` shows a table."""

    rows: tuple[LayerDtypes, ...]  # one for each layer and pass

    def __str__(self) -> str:
        cells = [
            (
                row.path or "(no layer)",
                "backward" if row.is_backward else "forward",
                ", ".join(f"{number} in {dtype}" for dtype, number in row.counts),
            )
            for row in self.rows
        ]
        return "\n".join(align_columns([("layer", "pass", "operations"), *cells]))

    def __repr__(self) -> str:
        return str(self)


def dtypes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Dtypes:
    """In which dtypes the layers of a function compute: the operations of the jaxpr by layer, pass and dtype.

    An operation counts for the dtype of its result. `mlax.dtypes.audit` lists those that leave a declared dtype.
    """
    counts: dict[tuple[str, bool], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for operation in operations(trace(function, args, kwargs).jaxpr):
        for result in operation.equation.outvars[:1]:
            dtype = getattr(result.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                counts[operation.path, operation.is_backward][str(dtype)] += 1
    return Dtypes(tuple(LayerDtypes(*key, tuple(each.most_common())) for key, each in counts.items()))
