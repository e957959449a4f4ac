"""flops: the floating-point operations of a traced function, counted in its jaxpr."""

import math
from typing import Any


def flops(jaxpr: Any) -> int:
    """The FLOPs of all matrix products and convolutions; a multiplication and an addition are two.

    `jaxpr` is that of `jax.make_jaxpr(f)(...)` or `jax.jit(f).trace(...).jaxpr`. The body of a scan counts as often as
    it runs, a loop of unknown length once, and of a conditional the most expensive branch. All other operations are
    left out, as is usual for model FLOPs utilization.
    """
    return sum(_equation_flops(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _equation_flops(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, out_axis = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec[0]
        products = math.prod(kernel) // max(kernel[out_axis], 1)  # for each element of the output
        return 2 * math.prod(equation.outvars[0].aval.shape) * products
    if name == "cond":
        return max(map(flops, params["branches"]), default=0)
    times = params.get("length", 1) if name == "scan" else 1
    return times * sum(map(flops, sub_jaxprs(params)))


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs in the parameters of an equation."""
    found = [each for value in params.values() for each in (value if isinstance(value, tuple | list) else (value,))]
    return [each for each in found if hasattr(getattr(each, "jaxpr", each), "eqns")]
