"""What `help()` shows of a public class or function: a signature with named types, one line a field, no machinery."""

import abc
import ast
import dataclasses
import functools
import inspect
import io
import linecache
import re
import sys
import tokenize
import types
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from mlax.core._errors import SURGERY

T = TypeVar("T", bound=type)
DType = str | type | np.dtype | None  # anything that jnp.dtype accepts; a field of this type holds its name
Size = Annotated[int, "an integer of at least 1"]  # an integer of at least 1, which is checked in a field of this type
Size.__doc__ = (
    "An integer of at least 1; a field of this type is checked. None in a composite: inferred from the input."
)
HIDDEN = (SURGERY,)  # fields that only mlax sets


class Documented(abc.ABCMeta):
    """The type of public classes, whose `help` fits a screen.

    pydoc lists what `dir` of a class returns: here, the methods that the class introduces, or those in its tuple
    `_listed`. What it overrides, inherits or owes to dataclasses stays out. Its fields are a table below the docstring.
    """

    def __dir__(cls) -> list[str]:
        names = listed_names(cls)
        for name in names:  # pydoc reads their signatures next
            if isinstance(function := getattr(cls, name), types.FunctionType):
                show_short_types(function)
        return names

    @property
    def __signature__(cls) -> inspect.Signature | None:
        return class_signature(cls)


class DocumentedProtocol(Documented, type(Protocol)):
    """The type of public protocols."""


def _get_doc(cls: Any) -> str | None:
    own: str | None = _OWN_DOC.__get__(cls)
    if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is not cls:
        return own  # dataclasses ask while the class is defined, when its source need not be read
    below = "\n".join(filter(None, [field_table(cls), _pointer(cls)]))
    return "\n\n".join(filter(None, [inspect.cleandoc(own or ""), below])) or own


_OWN_DOC: Any = type.__dict__["__doc__"]
# assigned here, since in the body of the class it would be the metaclass's own docstring
Documented.__doc__ = property(_get_doc, lambda cls, text: _OWN_DOC.__set__(cls, text))  # pyright: ignore[reportAttributeAccessIssue]


def document_tuple(kind: T) -> T:
    """A NamedTuple whose `help` fits a screen: the same class but for its type."""
    names = {"__slots__": (), "__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return Documented(kind.__name__, (kind,), names)  # pyright: ignore[reportReturnType]


def name_types(namespace: dict[str, Any]) -> None:
    """Give the public functions of a module signatures with short names: `Layer`, not `mlax.core._layer.Layer`."""
    for name in namespace["__all__"]:
        if isinstance(function := namespace[name], types.FunctionType):
            show_short_types(function)


def show_short_types(function: Any) -> None:
    """Give a function a signature that shows types by their names."""
    if "__signature__" not in vars(function):
        function.__signature__ = _shorten(inspect.signature(function))


def listed_names(cls: type) -> list[str]:
    """The names that `help` lists: the methods and properties that the class introduces."""
    if "_listed" in vars(cls):
        return list(vars(cls)["_listed"])
    inherited = {name for base in cls.__mro__[1:] for name in vars(base)}
    inherited.update(vars(cls).get("__dataclass_fields__", ()))  # a function may be the default of a field
    own = {name: value for name, value in vars(cls).items() if not name.startswith("_") and name not in inherited}
    return [name for name, value in own.items() if inspect.isroutine(value) or isinstance(value, property)]


class OneLineSignature(inspect.Signature):
    """A signature that pydoc of Python 3.13 does not break into a line for each parameter."""

    __slots__ = ()

    def format(self, *, max_width: int | None = None, **options: Any) -> str:
        """The signature on one line, whatever its width."""
        return super().format(**options)  # pyright: ignore[reportAttributeAccessIssue]


class FieldDoc(NamedTuple):
    """A field as its author wrote it: the annotation, and the comment on its line."""

    annotation: str
    comment: str


def field_table(cls: type) -> str:
    """The fields in the order of the constructor, a line each: name, type, default and meaning."""
    fields, parameters = _fields(cls), _parameters(cls)
    is_written = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters.values())
    if not fields or is_written or not parameters.keys() <= set(fields):  # the docstring of such a constructor tells
        return ""
    docs = field_docs(cls)
    declared = {name: str(parameter) for name, parameter in parameters.items()}
    width = min(max(map(len, declared.values())), 48)
    lines = [f"    {text:{width}}  {docs[name].comment}".rstrip() for name, text in declared.items()]
    return "\n".join(["Fields:", *lines])


def class_signature(cls: type) -> inspect.Signature | None:
    """The signature of the constructor, with the types as the author of each field wrote them."""
    has_constructor = bool(_fields(cls)) or cls.__init__ is not object.__init__
    return OneLineSignature(list(_parameters(cls).values())) if has_constructor else None


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    constructor = cls.__new__ if issubclass(cls, tuple) else cls.__init__
    _, *parameters = inspect.signature(constructor).parameters.values()
    docs = field_docs(cls)
    return {
        each.name: _with_type(
            _with_short_default(each), docs[each.name].annotation if each.name in docs else type_name(each.annotation)
        )
        for each in parameters
        if each.name not in HIDDEN
    }


def _fields(cls: type) -> list[str]:
    if issubclass(cls, tuple):
        return list(cls._fields)  # pyright: ignore[reportAttributeAccessIssue]
    if "__dataclass_fields__" not in vars(cls):
        return []
    return [field.name for field in dataclasses.fields(cls) if field.init and field.name not in HIDDEN]  # pyright: ignore


@functools.cache
def field_docs(cls: type) -> dict[str, FieldDoc]:
    """The annotations and comments of the fields of a class and its bases, and of the arguments of its constructor."""
    found: dict[str, FieldDoc] = {}
    for base in reversed(cls.__mro__):
        written = dict(_read_source(base))
        for name, annotation in inspect.get_annotations(base).items():
            found[name] = written.get(name) or FieldDoc(type_name(annotation), "")
        found |= {name: doc for name, doc in written.items() if name not in found}
    return found


def _read_source(cls: type) -> Iterator[tuple[str, FieldDoc]]:
    """(name, annotation and comment) of each annotated name in the body of a class, and of `__init__`'s arguments."""
    try:
        lines = linecache.getlines(inspect.getsourcefile(cls) or "")
        classes, comments = _parse("".join(lines))
    except (OSError, SyntaxError, TypeError, tokenize.TokenError):  # typed in, or built in
        return
    for node in classes[cls.__qualname__].body if cls.__qualname__ in classes else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            comment = comments.get(node.end_lineno or 0, "")
            yield node.target.id, FieldDoc(_short_text(ast.unparse(node.annotation)), comment)
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
                if argument is not None and argument.annotation is not None:
                    comment = comments.get(argument.end_lineno or 0, "")
                    yield argument.arg, FieldDoc(_short_text(ast.unparse(argument.annotation)), comment)


@functools.lru_cache(maxsize=128)
def _parse(source: str) -> tuple[dict[str, ast.ClassDef], dict[int, str]]:
    """The classes of a file by name, those inside of classes left out, and its comments by line."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return classes, {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}


class TypeName:
    """A type, or a function that is a default, in a signature, shown by its name."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


def type_name(annotation: Any) -> str:
    """An annotation without modules; of aliases that Python expands, the name."""
    text = inspect.formatannotation(annotation)
    for alias, name in _ALIASES:
        text = text.replace(alias, name)
    return _short_text(text)


_ALIASES = [
    (inspect.formatannotation(alias), name)
    for name, alias in {"PrecisionLike": jax.lax.PrecisionLike, "Size": Size, "DType": DType}.items()
]


def _short_text(text: str) -> str:
    """A type without modules, quotes around it, and what is checked about it."""
    text = re.sub(r"\bAnnotated\[([^\[\]]*), [^\[\]]*\]", r"\1", text).strip("'\"")
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def _with_short_default(parameter: inspect.Parameter) -> inspect.Parameter:
    """A default that is a function shown by its name, `gelu`, without its address."""
    name = getattr(parameter.default, "__name__", None)
    is_function = callable(parameter.default) and not isinstance(parameter.default, type)
    return parameter.replace(default=TypeName(name)) if is_function and name else parameter


def _with_type(parameter: inspect.Parameter, name: str) -> inspect.Parameter:
    if parameter.annotation is parameter.empty or inspect.formatannotation(parameter.annotation) == name:
        return parameter
    return parameter.replace(annotation=TypeName(name))


def _shorten(signature: inspect.Signature) -> inspect.Signature:
    parameters = [_with_type(each, type_name(each.annotation)) for each in signature.parameters.values()]
    returned = signature.return_annotation
    if returned is not signature.empty:
        returned = TypeName(returned if isinstance(returned, str) else type_name(returned))
    return OneLineSignature(parameters, return_annotation=returned)


def _pointer(cls: type) -> str:
    """A line about the methods of the class that all of this kind derive from: a Layer or an Optimizer, say."""
    roots = [base for base in cls.__mro__[1:] if isinstance(base, Documented) and listed_names(base)]
    return f"Methods of {public_name(roots[-1])}: {', '.join(listed_names(roots[-1]))}" if roots else ""


def public_name(cls: type) -> str:
    """`mlax.Layer`, `mlax.optim.Optimizer`: the name that users import."""
    rooms = [name for name in cls.__module__.split(".") if not name.startswith("_") and name != "core"]
    return ".".join([*rooms[:2], cls.__qualname__])
