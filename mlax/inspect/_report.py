"""report: one self-contained HTML page of what JAX and XLA made of a model, a training step or any other function."""

import base64
import collections
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mlax._jax import source_line
from mlax.core import Layer, flatten_paths, short_repr, signature, variable_shapes
from mlax.inspect._compile import trace_and_compile
from mlax.inspect._cost import Cost, cost_of, measure_instructions, without_command_buffers
from mlax.inspect._flops import Operation, operations
from mlax.inspect._memory import Memory, memory_of
from mlax.inspect._stages import Stages, stages_of
from mlax.inspect._summary import both_passes, path_in_model, summary

MOST_OPERATIONS = 4000  # in the list that is shown by layer
MOST_MOMENTS = 600  # of the memory curve


def report(path: str | Path, function: Any, *args: Any, measure: bool = False, **kwargs: Any) -> Path:
    """Write an HTML page about a model, `report("report.html", model, x)`, a training step or any other function.

    It shows the layers as a tree that folds, with shapes, parameters, dtypes and shardings; the cost of each layer as a
    treemap and in a roofline plot; the memory over time; and jaxpr, StableHLO and HLO with a search, and the operations
    of a layer at a click. Of a model, both passes are compiled; of a `train.step`, pass a state and a batch. With
    `measure=True` the function is run, to measure the time of each layer. The page needs no network.
    """
    model: Layer | None = function if isinstance(function, Layer) else None
    rows = None if model is None else _model_rows(model, *args, **kwargs)
    title = type(model).__name__ if model is not None else getattr(function, "__name__", short_repr(function))
    if model is not None:
        (function, args), kwargs = both_passes(model, *args, **kwargs), {}
    traced, compiled = trace_and_compile("report", function, args, kwargs)
    if traced is None:
        raise TypeError("report: a compiled function has no paths of layers; pass the function and its arguments.")
    if measure:
        compiled = without_command_buffers(traced, compiled)
    seconds = measure_instructions(function, args, kwargs, compiled) if measure else None
    variables = _find_variables(args)
    return write_report(path, title, function, traced, compiled, variables=variables, rows=rows, seconds=seconds)


Row = dict[str, Any]  # what the page shows of a layer


def write_report(
    path: str | Path,
    title: str,
    function: Any,
    traced: Any,
    compiled: Any,
    *,
    variables: Sequence[tuple[str, Any]] = (),
    rows: dict[str, Row] | None = None,
    seconds: dict[str, float] | None = None,
) -> Path:
    """Write the page about a function that is traced and compiled; `rows` are its layers, or else its named scopes."""
    found = list(operations(traced.jaxpr))
    rows = _scope_rows(found, variables) if rows is None else rows
    data = {
        "title": title,
        "device": str(jax.devices()[0].device_kind),
        **_layer_data(rows, found, cost_of(traced, compiled, seconds)),
        "memory": _memory_data(memory_of(compiled), rows),
        **_stage_data(stages_of(function, traced, compiled)),
    }
    page = resources.files("mlax.inspect").joinpath("report.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    path = Path(path)
    path.write_text(page.replace("DATA_OF_THE_REPORT", text, 1), encoding="utf-8")
    return path


def _model_rows(model: Layer, x: Any, **options: Any) -> dict[str, Row]:
    """The rows of `summary`, with the dtypes of the variables of each layer."""
    found = summary(model, x, **options)
    leaves = [*flatten_paths(variable_shapes(model, x)[0]).items()]
    return {
        row.path: {
            "layer": row.layer,
            "input": row.input,
            "output": row.output,
            "parameters": row.parameters,
            "bytes": row.bytes,
            "dtype": _dtypes(leaf for path, leaf in leaves if _is_below(path, row.path)),
            "sharding": "",
        }
        for row in found.rows
    }


def _scope_rows(found: Iterable[Operation], variables: Sequence[tuple[str, Any]]) -> dict[str, Row]:
    """The named scopes of a function as layers, with the variables whose paths are theirs."""
    paths = {"": None}
    for operation in found:
        names = operation.path.split("/") if operation.path else []
        paths.update(dict.fromkeys("/".join(names[: depth + 1]) for depth in range(len(names))))
    owned = {path: leaf for path, leaf in variables if path.rpartition("/")[0] in paths.keys() - {""}}
    rows = {}
    for path in paths:
        leaves = [leaf for where, leaf in owned.items() if _is_below(where, path)]
        rows[path] = {
            "layer": "",
            "input": "",
            "output": "",
            "parameters": sum(math.prod(leaf.shape) for leaf in leaves),
            "bytes": sum(leaf.nbytes if hasattr(leaf, "nbytes") else 0 for leaf in leaves),
            "dtype": _dtypes(leaves),
            "sharding": ", ".join(dict.fromkeys(filter(None, map(_sharding, leaves)))),
        }
    return rows


def _find_variables(args: Any) -> list[tuple[str, Any]]:
    """The leaves of arguments that are trees of variables, by path: those of a state, or of nested dicts."""
    trees = [getattr(arg, "trainables", arg) for arg in args]
    return [item for tree in trees if isinstance(tree, dict) for item in flatten_paths(tree).items()]


def _layer_data(rows: dict[str, Row], found: list[Operation], program: Cost) -> dict[str, Any]:
    """Layers with their own cost, without that of their parts; the peaks; and the operations."""
    own = {path: collections.Counter[str]() for path in rows}
    points = []
    for row in program.rows:
        path = path_in_model(row.path, rows)
        side = "backward" if row.is_backward else "forward"
        own[path].update({side: row.flops, f"{side}_bytes": row.bytes, "kernels": row.kernels})
        own[path]["microseconds"] += round(1e6 * (row.seconds or 0))
        points.append([path, row.is_backward, row.flops, row.bytes, row.best_seconds(program.peaks), row.seconds])
    computed = {path: collections.Counter[str]() for path in rows}
    listed = []
    for operation in found:
        path, equation = path_in_model(operation.path, rows), operation.equation
        result = equation.outvars[0].aval if equation.outvars else None
        if result is not None and hasattr(result, "dtype") and jnp.issubdtype(result.dtype, jnp.inexact):
            computed[path][str(result.dtype)] += 1
        if len(listed) < MOST_OPERATIONS:
            shapes = [", ".join(signature(each.aval) for each in side) for side in (equation.invars, equation.outvars)]
            source = source_line((*operation.nest, equation))
            listed.append([path, operation.is_backward, equation.primitive.name, *shapes, operation.times, source])
    return {
        "layers": [
            {"path": path, **row, "own": dict(own[path]), "computes": computed[path].most_common()}
            for path, row in rows.items()
        ],
        "peaks": program.peaks._asdict(),
        "points": points,
        "operations": listed,
        "omitted": max(0, len(found) - MOST_OPERATIONS),
    }


def _memory_data(used: Memory, rows: dict[str, Row]) -> dict[str, Any]:
    step = max(1, -(-len(used.timeline) // MOST_MOMENTS))
    groups = [used.timeline[i : i + step] for i in range(0, len(used.timeline), step)]
    moments = [max(group, key=lambda moment: moment.bytes) for group in groups]
    live = collections.Counter[tuple[str, str]]()
    for each in used.at_peak:
        live[path_in_model(each.path, rows), each.kind] += each.bytes
    return {
        "total": used.total,
        "arguments": used.arguments,
        "results": used.results,
        "temporaries": used.temporaries,
        "timeline": [[moment.bytes, path_in_model(moment.path, rows), moment.operation] for moment in moments],
        "at_peak": [[*key, size] for key, size in live.most_common()],
        "text": str(used),
    }


def _stage_data(texts: Stages) -> dict[str, Any]:
    stages = {"jaxpr": texts.jaxpr, "StableHLO": texts.stablehlo, "HLO": texts.hlo}
    notes = [
        *(f"{name} is dropped, since no result depends on it" for name in texts.dropped),
        *(str(each) for each in texts.donations if not each.is_used),
        *(f"a large constant: {each}" for each in texts.constants),
    ]
    return {
        "stages": {
            name: base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode() for name, text in stages.items()
        },
        "notes": notes[:50],
        "kernels": dict(texts.kernels),
    }


def _pack(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _dtypes(leaves: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves))


def _sharding(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    return str(sharding.spec) if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else ""


def _is_below(path: str, layer: str) -> bool:
    return not layer or path.startswith(f"{layer}/")
