"""Text and HTML of trees: one structure for what `print` indents and a notebook folds."""

import ast
import functools
import html
import inspect
import textwrap
import types
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A line of a tree, and what is indented below it."""

    name: str
    text: str
    below: tuple["Node", ...] = ()


def tree_text(node: Node) -> str:
    """The tree as lines, each level indented by two spaces: `name: text`."""
    return "\n".join(_lines(node))


def tree_html(node: Node) -> str:
    """The tree as nested `<details>`, the first level unfolded: neither a script nor a style sheet, in any theme."""
    style = "font-family: var(--jp-code-font-family, monospace); font-size: 0.95em; line-height: 1.5; white-space: pre"
    return f'<div style="{style}">{_details(node, is_open=True)}</div>'


class Text(str):
    """A string of several lines that a REPL and a notebook show as `print` does."""

    def __repr__(self) -> str:
        return str(self)


def print_pretty(value: Any, printer: Any) -> None:
    """What IPython prints: the tree or table of a value on its own, its repr inside a list."""
    printer.text(repr(value) if printer.indentation else str(value))


def function_name(function: Any) -> str:
    """A function as its author wrote it: `gelu`, `lambda x: 2 * x`, `partial(gelu, approximate=False)`."""
    if isinstance(function, functools.partial):
        words = [function_name(function.func), *map(repr, function.args)]
        return f"partial({', '.join([*words, *(f'{name}={value!r}' for name, value in function.keywords.items())])})"
    if isinstance(function, types.FunctionType) and function.__name__ == "<lambda>":
        return _lambda_source(function.__code__)
    return getattr(function, "__name__", repr(function))


def format_bytes(size: float) -> str:
    """A number of bytes with a unit, such as "1.5 KiB"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:{'.3g' if size < 999.5 * scale else '.0f'}} {unit}"
    return f"{size:.0f} bytes"


def align_columns(rows: Iterable[tuple[str, ...]], right: Container[int] = ()) -> list[str]:
    """Lines in which the cells of each column start below each other, or end in the columns `right`."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def count_of(number: int, noun: str) -> str:
    """`1 leaf`, `2 leaves`: a number with its noun, whose plural is regular but for a final f."""
    plural = f"{noun[:-1]}ves" if noun.endswith("f") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _lines(node: Node) -> Iterator[str]:
    label = f"{node.name}: {node.text}" if node.name else node.text
    yield from label.splitlines()
    for below in node.below:
        yield from textwrap.indent(tree_text(below), "  ").splitlines()


def _details(node: Node, *, is_open: bool = False) -> str:
    name = f'<span style="opacity: 0.65">{html.escape(node.name)}: </span>' if node.name else ""
    label = name + html.escape(node.text)
    if not node.below:
        return f'<div style="padding-left: 1.2em">{label}</div>'
    below = "".join(map(_details, node.below))
    unfolded = " open" * is_open
    return (
        f'<details{unfolded}><summary style="cursor: pointer">{label}</summary>'
        f'<div style="padding-left: 1.2em">{below}</div></details>'
    )


@functools.lru_cache(maxsize=1024)
def _lambda_source(code: types.CodeType) -> str:
    """The source of a lambda, if it is short and the file has not changed."""
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError, ValueError):
        return "<lambda>"
    starts = [(line, column) for line, _, column, _ in code.co_positions() if line is not None and column]
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)] if starts else []
    found = [node for node in lambdas if all(_start(node.body) <= each < _end(node.body) for each in starts)]
    text = ast.unparse(min(found, key=_end)) if found else "<lambda>"
    return text if len(text) <= 60 else "<lambda>"


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0
