"""summary: a table of a model by layer, with shapes, variables and FLOPs; nothing is computed."""

import collections
import dataclasses
import html
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mlax._jax import abstract_key
from mlax.core import (
    STACKED,
    Documented,
    Layer,
    Repeat,
    align_columns,
    call_shapes,
    count_of,
    document_tuple,
    flatten_paths,
    format_bytes,
    header,
    layers,
    map_layers,
    shape_dtypes,
    short_repr,
    signature,
    stacked_axes,
    variable_shapes,
    with_fields,
)
from mlax.inspect._flops import Operation, operations

WIDTH = 48  # of a layer, an input or an output in the table
TITLES = ("layer", "input", "output", "parameters", "bytes", "FLOPs", "backward", "share")
RIGHT = (3, 4, 5, 6, 7)  # the columns of numbers


@document_tuple
class LayerSummary(NamedTuple):
    """One layer, with all that is inside it."""

    path: str  # "" for the model itself
    layer: str  # as it prints, without its parts
    input: str  # its signature; of a layer in a stack, that of one repetition
    output: str  # likewise
    parameters: int  # trainable
    bytes: int  # of all variables
    forward_flops: int  # of matrix products and convolutions, in all repetitions
    backward_flops: int  # likewise, for the gradients of the trainables

    @property
    def name(self) -> str:
        """The last name of the path."""
        return self.path.rpartition("/")[2]

    @property
    def depth(self) -> int:
        """How many layers it is in."""
        return self.path.count("/") + 1 if self.path else 0


@dataclasses.dataclass(frozen=True, repr=False)
class Summary(metaclass=Documented):
    """The layers of a model, each before its parts; `print` shows a table."""

    rows: tuple[LayerSummary, ...]  # one for each layer, the model itself first

    @property
    def total(self) -> LayerSummary:
        """The row of the whole model."""
        return self.rows[0]

    def __str__(self) -> str:
        cells = [
            ("  " * row.depth + label, *rest) for row, (label, *rest) in zip(self.rows, self._cells(), strict=True)
        ]
        return "\n".join([*align_columns([TITLES, *cells], right=RIGHT), self._total()])

    def _repr_html_(self) -> str:
        head = _html_row("th", TITLES, 0)
        body = "".join(_html_row("td", cells, row.depth) for row, cells in zip(self.rows, self._cells(), strict=True))
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table><div>{self._total()}</div>"

    def _cells(self) -> list[tuple[str, ...]]:
        whole = max(self.total.forward_flops + self.total.backward_flops, 1)
        return [
            (
                _shorten(f"{row.name}: {row.layer}" if row.name else row.layer),
                row.input,
                row.output,
                f"{row.parameters:,}" if row.parameters else "",
                format_bytes(row.bytes) if row.bytes else "",
                format_flops(row.forward_flops),
                format_flops(row.backward_flops),
                f"{(row.forward_flops + row.backward_flops) / whole:.1%}" if row.forward_flops else "",
            )
            for row in self.rows
        ]

    def _total(self) -> str:
        return (
            f"{count_of(self.total.parameters, 'parameter')}, {format_bytes(self.total.bytes)} of variables, "
            f"{format_flops(self.total.forward_flops) or 0} FLOPs forward, "
            f"{format_flops(self.total.backward_flops) or 0} backward"
        )

    def __repr__(self) -> str:
        return str(self)


def summary(model: Layer, x: Any, *, inference_mode: bool = False) -> Summary:
    """A table of a model by layer: input, output, parameters, bytes, FLOPs of both passes, and their share.

    `x` is an input, or a pytree of `jax.ShapeDtypeStruct`; nothing is computed or allocated. FLOPs are those of matrix
    products and convolutions in the jaxpr, two for a multiplication and an addition: twice the number of MACs. The
    backward pass is that of the trainables: the first layer needs no gradient of its input. With `inference_mode=True`
    there is none. What is computed counts: all scores of an attention, masked ones too, as in published counts; but not
    the tiles of a causal one that are skipped, in long sequences and on CPUs, unless with `implementation="xla"`.

    >>> model = mlax.Series(up=nn.Linear(32), act=jax.nn.gelu, head=nn.Linear(4))
    >>> inspect.summary(model, jnp.ones((8, 16))).total.parameters
    676
    """
    if not isinstance(model, Layer):
        raise TypeError(
            f"summary: got {short_repr(model)}, but takes a model of mlax: summary(model, x). Of any other function, "
            "cost(function, *args) shows the FLOPs by named scope."
        )
    scanned = map_layers(model, "", _scan_repeats)  # which is traced once, not once for each layer
    parts: dict[str, Layer] = {"": model, **layers(model)}
    calls = call_shapes(scanned, x, inference_mode=inference_mode)
    forward, backward = _flops_by_layer(scanned, x, inference_mode, parts)
    trainables, non_trainables = (flatten_paths(tree) for tree in variable_shapes(scanned, x))
    sizes = {path: math.prod(leaf.shape) for path, leaf in trainables.items()}
    variables = [*trainables.items(), *non_trainables.items()]
    nbytes = [(path, math.prod(leaf.shape) * leaf.dtype.itemsize) for path, leaf in variables]
    return Summary(
        tuple(
            LayerSummary(
                path=path,
                layer=header(layer),
                input=_slice_signature(path, calls[path][0] if path in calls else None),
                output=_slice_signature(path, calls[path][1] if path in calls else None),
                parameters=_sum_below(path, sizes.items()),
                bytes=_sum_below(path, nbytes),
                forward_flops=_sum_below(path, forward.items()),
                backward_flops=_sum_below(path, backward.items()),
            )
            for path, layer in parts.items()
        )
    )


def scope_table(jaxpr: Any, trainables: Iterable[tuple[str, Any]], rows: int = 24) -> str:
    """A table of the named scopes of a traced function: parameters, FLOPs of both passes and their share.

    `trainables` are leaves by path. Scopes are shown to the greatest depth at which there are at most `rows`.
    """
    found, leaves = list(operations(jaxpr)), list(trainables)
    scopes = [each.path for each in found] + [path.rpartition("/")[0] for path, _ in leaves]
    variables = {path for path, _ in leaves}  # an optimizer enters a scope for each
    paths = [path for path in _tree_order(scopes) if path not in variables]
    forward, backward = count_flops(found, paths)
    parameters = [(path, math.prod(leaf.shape)) for path, leaf in leaves]
    total = max(forward.total() + backward.total(), 1)
    lines = [("layer", "parameters", "FLOPs", "backward", "share")]
    for path in _deepest_that_fit(paths, rows):
        size, ahead, behind = (_sum_below(path, each) for each in (parameters, forward.items(), backward.items()))
        if size or ahead or behind:
            name = "  " * (path.count("/") + 1) + path.rpartition("/")[2] if path else "step"
            share = f"{(ahead + behind) / total:.1%}" if ahead or behind else ""
            lines.append((name, f"{size:,}" if size else "", format_flops(ahead), format_flops(behind), share))
    return "\n".join(align_columns(lines, right=(1, 2, 3, 4)))


def _tree_order(paths: Iterable[str]) -> list[str]:
    """All these paths and those above them, each before those below it, in the order of their first appearance."""
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        for name in path.split("/") if path else ():
            node = node.setdefault(name, {})

    def walk(path: str, node: dict[str, Any]) -> Iterator[str]:
        yield path
        for name, below in node.items():
            yield from walk(f"{path}/{name}" if path else name, below)

    return list(walk("", tree))


def _deepest_that_fit(paths: list[str], rows: int) -> list[str]:
    """The paths of the greatest depth at which there are at most `rows`."""
    depths = [path.count("/") + 1 if path else 0 for path in paths]
    fitting = [depth for depth in range(2, max(depths) + 1) if sum(each <= depth for each in depths) <= rows]
    most = max(fitting, default=1)
    return [path for path, depth in zip(paths, depths, strict=True) if depth <= most]


def format_flops(number: float) -> str:
    """A number of FLOPs with a prefix, such as "1.5 G"; empty for none."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:.0f}" if number else ""


def _html_row(tag: str, cells: Iterable[str], depth: int) -> str:
    styles = [f"text-align: left; padding-left: {1 + 1.5 * depth}em"]
    styles += [f"text-align: {'right' if column in RIGHT else 'left'}" for column in range(1, len(TITLES))]
    filled = [f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell, style in zip(cells, styles, strict=True)]
    return f"<tr>{''.join(filled)}</tr>"


def _flops_by_layer(
    model: Layer, x: Any, inference_mode: bool, paths: Collection[str]
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """The FLOPs of the forward and of the backward pass by path."""
    function, arguments = both_passes(model, x, inference_mode=inference_mode)
    return count_flops(operations(jax.make_jaxpr(function)(*arguments)), paths)


def both_passes(model: Layer, x: Any, *, inference_mode: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function, the sum of the outputs of a model and, in training, its gradient; and the shapes to trace it for."""

    def total(trainables: Any, non_trainables: Any, x: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
        y, new = model.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        floats = [leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        sums = (leaf.sum(dtype=leaf.dtype).astype(jnp.float32) for leaf in floats)
        return sum(sums, start=jnp.zeros((), jnp.float32)), new

    variables = variable_shapes(model, x)
    differentiable = jax.tree.leaves(variables[0]) and not inference_mode
    function = jax.value_and_grad(total, has_aux=True) if differentiable else total
    return function, (*variables, shape_dtypes(x), abstract_key())


def count_flops(
    found: Iterable[Operation], paths: Collection[str]
) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """The FLOPs of operations by path, of the forward and of the backward pass."""
    counts = collections.Counter[str](), collections.Counter[str]()
    for operation in found:
        if number := operation.flops:
            counts[operation.is_backward][path_in_model(operation.path, paths)] += number
    return counts


def path_in_model(path: str, paths: Collection[str]) -> str:
    """The path of a part from the scope of an operation, or that of the innermost part around it.

    The scope in an unrolled stack has the number of the layer in place of the name of the stack, and JAX drops the
    outer names of what it hoists out of a loop.
    """
    names: list[str] = []
    for name in path.split("/"):
        is_number = name.isdigit() and "/".join([*names, name]) not in paths  # else it is a part in a tuple
        names.append(STACKED if is_number else name)
    ends = [each for each in paths if each.endswith(f"/{'/'.join(names)}")]
    if "/".join(names) not in paths and len(ends) == 1:
        return ends[0]
    while names and "/".join(names) not in paths:
        names.pop()
    return "/".join(names)


def _scan_repeats(path: str, layer: Layer) -> Layer:
    return with_fields(layer, mode="scan") if isinstance(layer, Repeat) and layer.mode == "unroll" else layer


def _slice_signature(path: str, x: Any) -> str:
    """The signature of an input or output of one layer in a stack, shortened if it is long: `3 x float32[8, 16]`."""
    axes = stacked_axes(path)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), x)
    text, leaves = signature(one), [signature(leaf) for leaf in jax.tree.leaves(one)]
    if x is None or len(text) <= WIDTH:
        return "" if x is None else text
    return f"{len(leaves)} x {leaves[0]}" if len(set(leaves)) == 1 else _shorten(text)


def _shorten(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _sum_below(layer: str, counts: Iterable[tuple[str, int]]) -> int:
    """The sum of what belongs to a layer or is inside it."""
    return sum(number for path, number in counts if not layer or path == layer or path.startswith(f"{layer}/"))
