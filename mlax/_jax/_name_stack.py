"""The path of a layer, read from JAX's name stack and from the names of compiled operations; its source line."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


class Scope(NamedTuple):
    """One entry of a name stack: a layer, or a JAX transformation."""

    name: str
    is_transformation: bool = False


WORKAROUND = "xla_workaround"  # the scope of operations that no layer asked for, such as a sum as a product


def path_of(scopes: Iterable[Scope]) -> str:
    """The path of the layer that scopes belong to, the same in the forward and the backward pass."""
    stack = _without_repeats([scope for scope in scopes if not _is_of_jax(scope)])
    return "/".join(scope.name for scope in stack if not scope.is_transformation)


def layer_path(nest: Iterable[Any]) -> str:
    """The path of the layer of the last of these jaxpr equations, each of which is nested in the one before."""
    # the name stack of an equation is relative to its jaxpr
    stack = [scope for equation in nest for scope in equation.source_info.name_stack.stack]
    return path_of(scopes_of_stack(stack))


def is_backward_pass(nest: Iterable[Any]) -> bool:
    """Whether the last of these jaxpr equations is part of a backward pass: JAX transposed it, or one around it."""
    stack = [scope for equation in nest for scope in equation.source_info.name_stack.stack]
    return any(scope.is_transformation and scope.name == "transpose" for scope in scopes_of_stack(stack))


def source_line(nest: Sequence[Any]) -> str:
    """The user's line that the last of these nested jaxpr equations comes from: `model.py:31 (wire)`; "" if unknown."""
    # The body of a jit inside JAX has no line of the user's; the equation that calls it does.
    for equation in reversed(nest):
        traceback = equation.source_info.traceback
        for frame in traceback.frames if traceback else ():
            if not frame.file_name.startswith(_MACHINERY):
                name = frame.function_name.rpartition(".")[2]
                return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({name})"
    return ""


def is_workaround(equation: Any) -> bool:
    """Whether a jaxpr equation is one of those of the scope WORKAROUND."""
    return any(scope.name == WORKAROUND for scope in scopes_of_stack(equation.source_info.name_stack.stack))


def scopes_of_stack(stack: Iterable[Any]) -> list[Scope]:
    """The scopes of a jaxpr equation, from `equation.source_info.name_stack.stack`."""
    return [Scope(each.name, type(each).__name__ == "Transform") for each in stack]  # jvp, transpose, vmap


def scopes_of_op_name(name: str) -> list[Scope]:
    """The scopes in the `op_name` of a compiled operation, without the primitive at its end.

    `jit(loss)/transpose(jvp(blocks))/while/body/closed_call/up/dot_general` gives transpose, jvp, blocks and up.
    """
    *around, _ = _split_outside_brackets(_INSERTED.sub("/", f"/{name}").removeprefix("/"), "/")
    return [scope for part in around for scope in _unwrap_scopes(part)]


def fused_op_names(name: str) -> list[str]:
    """The names of the operations that XLA merged into one: `f/(a:b)` gives `f/a` and `f/b`."""
    *around, last = _split_outside_brackets(name, "/")
    if not (last.startswith("(") and last.endswith(")")):
        return [name]
    joined = ["/".join([*around, each]) for each in _split_outside_brackets(last[1:-1], ":")]
    return [name for each in joined for name in fused_op_names(each)]


# What loops, branches and calls insert between the names of layers.
_CONTROL_FLOW = r"while/(?:body|cond)|cond/branch_\d+_fun|closed_call|call_exported|eval_jaxpr|checkpoint|shard_map"
_INSERTED = re.compile(rf"(?:/(?:{_CONTROL_FLOW}))+(?=/)")
_TRANSFORMATION = re.compile(r"(\w+)\((.*)\)")
_JITS = ("jit", "pjit")


def _unwrap_scopes(part: str) -> Iterator[Scope]:
    """`transpose(jvp(a))` is the layer a under two transformations; `jit(f)` is not a layer."""
    if match := _TRANSFORMATION.fullmatch(part):
        name, inside = match.groups()
        if name in _JITS:
            return
        if name in ("jvp", "transpose", "vmap"):
            yield Scope(name, is_transformation=True)
            yield from _unwrap_scopes(inside)
            return
    if part:
        yield Scope(part)


def _split_outside_brackets(text: str, at: str) -> list[str]:
    """Split outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _is_of_jax(scope: Scope) -> bool:
    # einsum enters a scope that is named by its subscripts.
    return scope.name in ("rematted_computation", WORKAROUND) or "," in scope.name or "->" in scope.name


def _without_repeats(stack: list[Scope]) -> list[Scope]:
    """Drop runs of scopes that are repeated under a transformation, longest first.

    When JAX transposes what it linearized (custom_jvp, remat), it appends a whole stack to itself:
    `transpose(jvp(a))/b/jvp(a)/b` for the layer b in a. Without a transformation, b/b is a layer b in b.
    """
    for length in range(len(stack) // 2, 0, -1):
        for end in range(length, len(stack) - length + 1):
            again = end + 1 if stack[end].name == "transpose" else end
            is_repeat = stack[end - length : end] == stack[again : again + length]
            if is_repeat and any(scope.is_transformation for scope in stack[end - length : again]):
                return _without_repeats(stack[:end] + stack[again + length :])
    return stack


def _folder(*parts: str) -> str:
    return os.path.join(os.path.abspath(os.path.join(*parts)), "")


# Frames in these folders only pass a call along.
_MACHINERY = (
    _folder(jax.__file__, ".."),
    _folder(jax.__file__, "..", "..", "jaxlib"),
    *(_folder(__file__, "..", "..", name) for name in ("_jax", "core", "dtypes", "inspect")),
)
