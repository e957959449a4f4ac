"""FLOPs and operations of a traced function, read from its jaxpr, by layer."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mlax._jax import is_backward_pass, is_workaround, layer_path
from mlax.core import short_repr
from mlax.inspect._trip_counts import Lanes


class Operation(NamedTuple):
    """An equation that runs by itself, not through a jaxpr inside it, and how often it runs."""

    equation: Any
    nest: tuple[Any, ...]  # the equations that it is nested in, the outermost first
    times: int

    @property
    def path(self) -> str:
        """The path of its layer; "" outside of a layer."""
        return layer_path((*self.nest, self.equation))

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to a backward pass, or is recomputed for it."""
        return is_backward_pass((*self.nest, self.equation))

    @property
    def flops(self) -> int:
        """Its FLOPs, in all the times that it runs."""
        return self.times * _product_flops(self.equation)


def flops(jaxpr: Any) -> int:
    """The FLOPs of all matrix products and convolutions; a multiplication and an addition are two.

    `jaxpr` is that of `jax.make_jaxpr(f)(...)` or `jax.jit(f).trace(...).jaxpr`. The body of a scan and a Pallas
    kernel count as often as they run, that of a `shard_map` once for each device, a loop of unknown length once, and of
    a conditional the most expensive branch. All other operations are left out, as is usual for model FLOPs utilization.
    Masked scores of an attention count if they are computed: see `summary`.
    """
    return sum(operation.flops for operation in operations(jaxpr))


def operations(jaxpr: Any) -> Iterator[Operation]:
    """The operations of a jaxpr in order, those of the jaxprs inside its equations included, without dead code."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if not hasattr(jaxpr, "eqns"):
        raise TypeError(f"flops takes a jaxpr, but got {short_repr(jaxpr)}; pass jax.make_jaxpr(function)(*arguments).")
    return _walk(jaxpr, jaxpr.outvars, (), 1, Lanes())


def _walk(jaxpr: Any, results: Iterable[Any], nest: tuple[Any, ...], times: int, lanes: Lanes) -> Iterator[Operation]:
    for equation in _live_equations(jaxpr, results):
        lanes = lanes.after(equation)
        bodies = [getattr(body, "jaxpr", body) for body in sub_jaxprs(equation.params)]
        if not bodies:
            yield Operation(equation, nest, times)
        if equation.primitive.name == "cond":
            bodies = [max(bodies, key=flops)]
        for body in bodies:
            runs = _runs(equation, times, lanes)
            yield from _walk(body, body.outvars, (*nest, equation), runs, lanes.inside(equation, body))


def _live_equations(jaxpr: Any, results: Iterable[Any]) -> list[Any]:
    """The equations that results depend on, or that have effects: XLA drops all others."""
    needed, live = {id(each) for each in results}, []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(each) in needed for each in equation.outvars):
            live.append(equation)
            needed.update(map(id, equation.invars))
    return live[::-1]


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs in the parameters of an equation."""
    found = [each for value in params.values() for each in (value if isinstance(value, tuple | list) else (value,))]
    return [each for each in found if hasattr(getattr(each, "jaxpr", each), "eqns")]


def _runs(equation: Any, times: int, lanes: Lanes) -> int:
    """How often the jaxpr inside an equation runs, on all devices, if the equation itself runs so many times."""
    params = equation.params
    if equation.primitive.name == "scan":
        return times * params["length"]
    if equation.primitive.name == "while":
        counts = lanes.trip_counts(equation)
        return times if counts is None else times * int(counts.sum()) // lanes.count
    if equation.primitive.name == "pallas_call":
        grid = getattr(params.get("grid_mapping"), "grid", ())
        return times * math.prod(size for size in grid if isinstance(size, int))
    if equation.primitive.name == "shard_map":
        sizes = dict(params["mesh"].shape)
        return times * math.prod(sizes[axis] for axis in params.get("manual_axes", sizes))
    return times


def _product_flops(equation: Any) -> int:
    params = equation.params
    if equation.primitive.name == "dot_general" and not is_workaround(equation):
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        return _conv_flops(equation)
    if equation.primitive.name.startswith("dot_product_attention_"):
        return _cudnn_flops(equation)
    return 0


def _cudnn_flops(equation: Any) -> int:
    """Those of attention by cuDNN, two products forward and five backward; all scores count, masked ones too."""
    query, key, value = (each.aval.shape for each in equation.invars[:3])  # (b, t, h, k), or (b, h, t, k)
    pairs = math.prod(query[:-1]) * key[2 if equation.params.get("layout") else 1]
    is_backward = "_bwd" in equation.primitive.name  # it computes the scores again
    return 2 * pairs * (3 * query[-1] + 2 * value[-1] if is_backward else query[-1] + value[-1])


def _conv_flops(equation: Any) -> int:
    """Each output is a sum over the window and the input channels; padding counts, zeros between elements do not."""
    params = equation.params
    kernel, spec = equation.invars[1].aval.shape, params["dimension_numbers"]
    out = equation.outvars[0].aval.shape
    batch, channels, *out_axes = spec.out_spec
    _, in_channels, *kernel_axes = spec.rhs_spec
    pairs = 1  # of an output position and an element of the window
    for axis, (out_axis, kernel_axis) in enumerate(zip(out_axes, kernel_axes, strict=True)):
        starts = np.arange(out[out_axis]) * params["window_strides"][axis] - params["padding"][axis][0]
        window = np.arange(kernel[kernel_axis]) * params["rhs_dilation"][axis]
        pairs *= int(np.sum((starts[:, None] + window) % params["lhs_dilation"][axis] == 0))
    return 2 * out[batch] * out[channels] * kernel[in_channels] * pairs
