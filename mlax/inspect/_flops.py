"""flops: the arithmetic of a traced function, counted in its jaxpr."""

import math
from typing import Any


def flops(jaxpr: Any) -> int:
    """The floating-point operations of all matrix products and convolutions, a multiplication and an addition each.

    `jaxpr` is what `jax.make_jaxpr` or `jax.jit(...).trace(...).jaxpr` give. Bodies of scans count as often as they
    run; of a conditional the dearest branch counts; a loop of unknown length counts once. Whatever is neither product
    nor convolution is left out, as it is in the usual measure of a device's utilisation.
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
        products = math.prod(kernel) // max(kernel[out_axis], 1)  # for one output number
        return 2 * math.prod(equation.outvars[0].aval.shape) * products
    if name == "cond":
        return max(map(flops, params["branches"]), default=0)
    times = params.get("length", 1) if name == "scan" else 1
    return times * sum(map(flops, sub_jaxprs(params)))


def sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs in the params of an equation."""
    found = [each for value in params.values() for each in (value if isinstance(value, tuple | list) else (value,))]
    return [each for each in found if hasattr(getattr(each, "jaxpr", each), "eqns")]
