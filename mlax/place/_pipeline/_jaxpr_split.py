"""Split a traced function at its pipeline: what comes before it, and what comes after."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core

from mlax.place._pipeline._layer import pipeline_p

INLINABLE = ("jit", "pjit", "checkpoint", "remat2", "closed_call", "custom_jvp_call")  # their bodies may be written out


class SubJaxpr:
    """Some equations of a jaxpr as a function of the jaxpr's inputs, of which it reads those at `reads`."""

    def __init__(self, flat: "InlinedJaxpr", results: Sequence[Any], given: Sequence[Any] = ()):
        equations, needed = _dead_code_eliminate(flat.equations, results, given)
        self.reads = tuple(place for place, var in enumerate(flat.inputs) if var in needed)
        # the places of inputs that are given back as they came, by the place among the results
        self.unchanged = {i: flat.inputs.index(var) for i, var in enumerate(results) if var in flat.inputs}
        inputs = [*(flat.inputs[place] for place in self.reads), *given]
        names = flat.names._replace(arg_names=("",) * len(inputs), result_paths=("",) * len(results))
        effects = frozenset[Any]().union(*(equation.effects for equation in equations))
        jaxpr = core.Jaxpr([], inputs, list(results), equations, effects, names)
        self.run = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, []))

    def __call__(self, inputs: Mapping[int, Any], given: Sequence[Any] = ()) -> list[Any]:
        return self.run(*(inputs[place] for place in self.reads), *given)


class SplitJaxpr(NamedTuple):
    """The pieces, each a function of all `inputs`: the arguments' leaves, and what was closed over."""

    layer: Any  # the Pipelined
    tree: Any  # of what it is called on: (x, trainables, rng)
    inference_mode: bool
    inputs: dict[int, Any]
    shapes: list[Any]  # of what the function returns
    weights: SubJaxpr  # gives the leaves of the trainables that the pipeline is called on
    key: SubJaxpr  # and of its key, if it has one
    before: SubJaxpr  # and of its x
    after: SubJaxpr  # of the inputs and the leaves of the pipeline's output: all that the function returns


class InlinedJaxpr(NamedTuple):
    """A jaxpr whose pipeline is an equation of its own."""

    equations: list[Any]
    inputs: list[Any]  # variables
    results: list[Any]
    names: Any


def split_at_pipeline(function: Any, leaves: Sequence[Any], axis: str) -> SplitJaxpr:
    """Trace `function(*leaves)`, which returns a flat list, and cut it at its one pipeline over `axis`."""
    with jax.sharding.use_abstract_mesh(_manual_mesh(axis)):
        closed = jax.make_jaxpr(function)(*leaves)
    jaxpr = getattr(closed, "jaxpr", closed)
    equations, results, consts = _inline_calls(jaxpr, closed.consts)
    marks = [equation for equation in equations if equation.primitive is pipeline_p]
    if len(marks) != 1:
        _raise_unsupported(len(marks), equations)
    (mark,) = marks
    flat = InlinedJaxpr(
        [each for each in equations if each is not mark], [*jaxpr.invars, *consts], results, jaxpr.debug_info
    )
    params = mark.params
    x, trainables, rng = jax.tree.unflatten(params["tree"], mark.invars)
    return SplitJaxpr(
        params["layer"],
        params["tree"],
        params["inference_mode"],
        dict(enumerate([*leaves, *consts.values()])),
        [atom.aval for atom in results],
        SubJaxpr(_without_mesh_context(flat, jax.tree.leaves(trainables)), jax.tree.leaves(trainables)),
        SubJaxpr(flat, jax.tree.leaves(rng)),
        SubJaxpr(flat, jax.tree.leaves(x)),
        SubJaxpr(flat, results, mark.outvars),
    )


def _without_mesh_context(flat: InlinedJaxpr, weights: Sequence[Any]) -> InlinedJaxpr:
    """The equations of the pipeline's weights as if they had been traced outside of the stages, where they are run."""
    equations, _ = _dead_code_eliminate(flat.equations, weights, ())
    for equation in equations:
        if list(core.jaxprs_in_params(equation.params)):
            raise ValueError(
                "one_forward_one_backward: the pipeline's weights are computed from the trainables by a "
                f"{equation.primitive.name} outside of the pipeline; put that inside of the Repeat, around its layer."
            )
    context = jax.make_jaxpr(lax.neg)(1.0).eqns[0].ctx
    return flat._replace(equations=[equation.replace(ctx=context) for equation in equations])


def _manual_mesh(axis: str) -> Any:
    """The mesh that is set, as it is within the stages."""
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.axis_names:
        raise ValueError(
            f"one_forward_one_backward: no mesh with the axis {axis!r} is set; call it under jax.set_mesh(mesh)."
        )
    return mesh.update_axis_types({axis: jax.sharding.AxisType.Manual})


def _dead_code_eliminate(
    equations: Iterable[Any], results: Sequence[Any], given: Sequence[Any]
) -> tuple[list[Any], set[Any]]:
    """The equations that the results need, if some variables are given, and all variables that they need."""
    needed = {var for var in results if _is_variable(var)}
    kept = []
    for equation in reversed(list(equations)):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(filter(_is_variable, equation.invars))
    return kept[::-1], needed - set(given)


def _inline_calls(jaxpr: Any, consts: Sequence[Any]) -> tuple[list[Any], list[Any], dict[Any, Any]]:
    """Equations, results and constants of a jaxpr, calls that hold the pipeline replaced by what they call."""
    equations: list[Any] = []
    constants = dict(zip(jaxpr.constvars, consts, strict=True))
    same: dict[Any, Any] = {}

    def known(atom: Any) -> Any:
        return same.get(atom, atom) if _is_variable(atom) else atom

    for equation in jaxpr.eqns:
        equation = equation.replace(invars=[known(atom) for atom in equation.invars])
        body = _callee_with_pipeline(equation)
        if body is None:
            equations.append(equation)
            continue
        open_body = getattr(body, "jaxpr", body)
        inner, results, more = _inline_calls(open_body, getattr(body, "consts", ()))
        renamed = dict(zip(open_body.invars, equation.invars, strict=True))

        def new(atom: Any, renamed: dict[Any, Any] = renamed) -> Any:
            return renamed.get(atom, atom) if _is_variable(atom) else atom

        equations += [each.replace(invars=[new(atom) for atom in each.invars]) for each in inner]
        same.update(zip(equation.outvars, map(new, results), strict=True))
        constants.update(more)
    return equations, [known(atom) for atom in jaxpr.outvars], constants


def _callee_with_pipeline(equation: Any) -> Any:
    """What an equation calls, if that holds a pipeline and the equation only calls it."""
    if equation.primitive.name not in INLINABLE or not _contains_pipeline(equation):
        return None
    return next(equation.params[name] for name in ("jaxpr", "call_jaxpr") if name in equation.params)


def _contains_pipeline(equation: Any) -> bool:
    return equation.primitive is pipeline_p or any(
        _contains_pipeline(inner) for body in core.jaxprs_in_params(equation.params) for inner in body.eqns
    )


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _raise_unsupported(found: int, equations: list[Any]) -> None:
    holders = [
        each.primitive.name for each in equations if each.primitive is not pipeline_p and _contains_pipeline(each)
    ]
    if holders:
        raise ValueError(
            f"one_forward_one_backward: the pipelined part is called within a {holders[0]}; call it outside of that, "
            "or take the schedule 'gpipe'."
        )
    if not found:
        raise ValueError(
            "one_forward_one_backward: the objective calls no pipelined part; let it call the model that "
            "plan.parallelize(model, x) gives."
        )
    raise ValueError(
        f"one_forward_one_backward: the objective calls {found} pipelined parts, but this schedule runs one, since its "
        "backward pass starts while forward passes are under way; take the schedule 'gpipe', or one Repeat."
    )
