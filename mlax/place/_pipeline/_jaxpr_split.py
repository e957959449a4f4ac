"""Split a traced function at its pipeline: what comes before it, and what comes after."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
from jax.extend import core

from mlax.place._pipeline._layer import Pipelined, pipeline_p

INLINABLE = ("jit", "pjit", "checkpoint", "remat2", "closed_call", "custom_jvp_call")  # they only call their jaxpr


class SplitJaxpr(NamedTuple):
    """A function split at its pipeline; each part is a function of `inputs`, by index.

    The inputs are the leaves of the function's arguments, followed by the constants that it closes over.
    """

    layer: Pipelined
    structure: Any  # of the pipeline's arguments: (x, trainables, rng)
    inference_mode: bool
    inputs: dict[int, Any]
    avals: list[Any]  # of the function's results
    weights: "SubJaxpr"  # returns the leaves of the pipeline's trainables
    key: "SubJaxpr"  # returns the leaves of its key, if it has one
    before: "SubJaxpr"  # returns the leaves of its x
    after: "SubJaxpr"  # of the inputs and the leaves of the pipeline's output: returns all results


class InlinedJaxpr(NamedTuple):
    """A jaxpr without its pipeline, which was an equation at the top level."""

    equations: list[Any]
    inputs: list[Any]  # variables
    results: list[Any]
    debug_info: Any


class SubJaxpr:
    """The equations of a jaxpr that some variables depend on, as a function of the jaxpr's inputs.

    `reads` are the indices of the inputs that it depends on. `given` are variables whose values are passed as well,
    instead of being computed.
    """

    def __init__(self, jaxpr: InlinedJaxpr, results: Sequence[Any], given: Sequence[Any] = ()):
        equations, needed = _dead_code_eliminate(jaxpr.equations, results, given)
        self.reads = tuple(index for index, var in enumerate(jaxpr.inputs) if var in needed)
        # for each result that is an input, unchanged: the index of that input
        self.forwarded = {i: jaxpr.inputs.index(var) for i, var in enumerate(results) if var in jaxpr.inputs}
        invars = [*(jaxpr.inputs[index] for index in self.reads), *given]
        debug_info = jaxpr.debug_info._replace(arg_names=("",) * len(invars), result_paths=("",) * len(results))
        effects = frozenset[Any]().union(*(equation.effects for equation in equations))
        closed = core.ClosedJaxpr(core.Jaxpr([], invars, list(results), equations, effects, debug_info), [])
        self.function = core.jaxpr_as_fun(closed)

    def __call__(self, inputs: Mapping[int, Any], given: Sequence[Any] = ()) -> list[Any]:
        return self.function(*(inputs[index] for index in self.reads), *given)


def split_at_pipeline(function: Any, leaves: Sequence[Any], axis: str) -> SplitJaxpr:
    """Trace `function(*leaves)`, which returns a flat list, and split it at its only pipeline over `axis`."""
    with jax.sharding.use_abstract_mesh(_manual_mesh(axis)):
        closed = jax.make_jaxpr(function)(*leaves)
    jaxpr = getattr(closed, "jaxpr", closed)
    equations, results, constants = _inline_calls(jaxpr, closed.consts)
    pipelines = [equation for equation in equations if equation.primitive is pipeline_p]
    if len(pipelines) != 1:
        _raise_unsupported(len(pipelines), equations)
    (pipeline,) = pipelines
    others = [equation for equation in equations if equation is not pipeline]
    inlined = InlinedJaxpr(others, [*jaxpr.invars, *constants], results, jaxpr.debug_info)
    x, trainables, rng = jax.tree.unflatten(pipeline.params["structure"], pipeline.invars)
    weights = jax.tree.leaves(trainables)
    return SplitJaxpr(
        **pipeline.params,
        inputs=dict(enumerate([*leaves, *constants.values()])),
        avals=[atom.aval for atom in results],
        weights=SubJaxpr(_without_mesh_context(inlined, weights), weights),
        key=SubJaxpr(inlined, jax.tree.leaves(rng)),
        before=SubJaxpr(inlined, jax.tree.leaves(x)),
        after=SubJaxpr(inlined, results, pipeline.outvars),
    )


def _manual_mesh(axis: str) -> Any:
    """The mesh that is set, with `axis` manual, as inside the stages."""
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        raise ValueError(
            f"one_forward_one_backward: no mesh with the axis {axis!r} is set; call it under jax.set_mesh(mesh)."
        )
    return mesh.update_axis_types({axis: jax.sharding.AxisType.Manual})


def _inline_calls(jaxpr: Any, constants: Sequence[Any]) -> tuple[list[Any], list[Any], dict[Any, Any]]:
    """Equations, results and constants of a jaxpr in which calls that contain the pipeline are inlined."""
    equations: list[Any] = []
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    renamed: dict[Any, Any] = {}  # the outputs of inlined calls

    def rename(atom: Any, names: Mapping[Any, Any]) -> Any:
        return names.get(atom, atom) if _is_variable(atom) else atom

    for equation in jaxpr.eqns:
        equation = equation.replace(invars=[rename(atom, renamed) for atom in equation.invars])
        callee = _callee_with_pipeline(equation)
        if callee is None:
            equations.append(equation)
            continue
        body = getattr(callee, "jaxpr", callee)
        inner, results, more = _inline_calls(body, getattr(callee, "consts", ()))
        arguments = dict(zip(body.invars, equation.invars, strict=True))
        equations += [each.replace(invars=[rename(atom, arguments) for atom in each.invars]) for each in inner]
        outputs = [rename(atom, arguments) for atom in results]
        renamed.update(zip(equation.outvars, outputs, strict=True))
        values.update(more)
    return equations, [rename(atom, renamed) for atom in jaxpr.outvars], values


def _callee_with_pipeline(equation: Any) -> Any:
    """The jaxpr that an equation calls, if the equation can be inlined and the jaxpr contains a pipeline."""
    if equation.primitive.name not in INLINABLE or not _contains_pipeline(equation):
        return None
    return next(equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params)


def _contains_pipeline(equation: Any) -> bool:
    return equation.primitive is pipeline_p or any(
        _contains_pipeline(inner) for body in core.jaxprs_in_params(equation.params) for inner in body.eqns
    )


def _dead_code_eliminate(
    equations: Iterable[Any], results: Sequence[Any], given: Sequence[Any]
) -> tuple[list[Any], set[Any]]:
    """The equations that the results depend on, and the variables that they read, without those that are given."""
    needed = {var for var in results if _is_variable(var)}
    live = []
    for equation in reversed(list(equations)):
        if not needed.isdisjoint(equation.outvars):
            live.append(equation)
            needed.update(filter(_is_variable, equation.invars))
    return live[::-1], needed - set(given)


def _without_mesh_context(jaxpr: InlinedJaxpr, weights: Sequence[Any]) -> InlinedJaxpr:
    """The equations of the pipeline's weights, as if traced outside the stages, where they run."""
    equations, _ = _dead_code_eliminate(jaxpr.equations, weights, ())
    for equation in equations:
        if list(core.jaxprs_in_params(equation.params)):
            raise ValueError(
                "one_forward_one_backward: the pipeline's weights are computed from the trainables by "
                f"{equation.primitive.name} outside the pipeline; move that into the Repeat, around its layer."
            )
    context = jax.make_jaxpr(lax.neg)(1.0).eqns[0].ctx
    return jaxpr._replace(equations=[equation.replace(ctx=context) for equation in equations])


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _raise_unsupported(number: int, equations: list[Any]) -> NoReturn:
    others = [equation for equation in equations if equation.primitive is not pipeline_p]
    enclosing = [equation.primitive.name for equation in others if _contains_pipeline(equation)]
    if enclosing:
        raise ValueError(
            f"one_forward_one_backward: the pipelined part is called inside {enclosing[0]}; call it outside "
            "that, or use the schedule 'gpipe'."
        )
    if not number:
        raise ValueError(
            "one_forward_one_backward: the objective calls no pipelined part; call the model that "
            "plan.parallelize(model, x) returns."
        )
    raise ValueError(
        f"one_forward_one_backward: the objective calls {number} pipelined parts, but this schedule supports one, "
        "since its backward passes begin while forward passes are in flight; use the schedule 'gpipe', or one Repeat."
    )
