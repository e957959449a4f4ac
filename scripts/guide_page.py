"""Execute one page of the guide cell by cell, as a notebook does; `guide.py` starts this for each page."""

import ast
import base64
import contextlib
import io
import json
import platform
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jupytext
import matplotlib
from matplotlib import pyplot
from PIL import Image

ROOT = Path(__file__).parents[1]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def main(source: Path, digest: str, *options: str) -> None:
    """Execute every cell, and write the notebook to the working directory.

    With `--check`, a claim about a measurement that does not hold is printed, and is no failure: it may be the machine.
    """
    folder, text = Path.cwd(), source.read_text()
    notebook = jupytext.reads(text, fmt="py:percent")
    scope, position, count = {"__name__": "__main__"}, 0, 0
    set_style()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        if cell.cell_type != "code":
            continue
        position = text.index(cell.source, position)
        count += 1
        cell["execution_count"] = count
        tree = ast.increment_lineno(ast.parse(cell.source), text.count("\n", 0, position))
        tags = set(cell.metadata.get("tags", ()))
        if "--check" in options and "measured" in tags:
            tree = ast.fix_missing_locations(ReportedAsserts(source.name).visit(tree))
        cell["outputs"] = execute(tree, scope, source.name, tags, count)
    metadata = {"source": digest, "jax": jax.__version__, "python": platform.python_version(), "cpu": cpu()}
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}, "mlax": metadata}
    (folder / "notebook.json").write_text(json.dumps(notebook))


class ReportedAsserts(ast.NodeTransformer):
    """Replace `assert claim` by a line on standard error where the claim does not hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:  # the name that ast looks for
        message = f"{self.name}, line {node.lineno}: does not hold in this run: {ast.unparse(node.test)}\n"
        report = ast.parse(f"__import__('sys').__stderr__.write({message!r})").body
        return ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), report, []), node)


def cpu() -> str:
    """The model name of the processor."""
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found.group(1) if found else platform.processor()


def set_style() -> None:
    """Make figures legible on light and dark pages."""
    matplotlib.rcParams.update(
        {
            "figure.figsize": (7.2, 3.4),
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.facecolor": "white",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.prop_cycle": matplotlib.cycler(color=["#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377"]),
            "grid.color": "#E4E4E4",
            "font.size": 10,
        }
    )


def execute(tree: ast.Module, scope: dict[str, Any], name: str, tags: set[str], count: int) -> list[dict]:
    """Execute one cell as a notebook does, and return its outputs: what it printed, drew, evaluated to or raised."""
    line = tree.body[0].lineno if tree.body else 1
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None  # a notebook shows its value
    printed, value, error = io.StringIO(), None, None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_: print(f"{category.__name__}: {message}")
        try:
            exec(compile(tree, name, "exec"), scope)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
            jax.effects_barrier()
        except Exception as raised:
            if "raises-exception" not in tags:
                print(printed.getvalue(), file=sys.__stdout__)
                raise
            error = raised
    if (error is None) == ("raises-exception" in tags):
        raise RuntimeError(f"{name}, line {line}: the cell is tagged raises-exception but raised no error.")
    outputs: list[dict] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": anonymize(printed.getvalue())})
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    for figure in figures:
        outputs.append(
            {
                "output_type": "display_data",
                "data": {"image/png": encode_png(figure)},
                "metadata": {"alt": alt_text(figure)},
            }
        )
        pyplot.close(figure)
    if error is not None:
        notes = [note for note in getattr(error, "__notes__", ()) if "JAX has removed its internal frames" not in note]
        message = anonymize("\n".join([str(error).rstrip(), *notes]))
        kind = type(error).__name__
        outputs.append({"output_type": "error", "ename": kind, "evalue": message, "traceback": [f"{kind}: {message}"]})
    elif value is not None and not figures:
        data = {"text/plain": anonymize(repr(value))}
        outputs.append({"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": count})
    return outputs


def anonymize(text: str) -> str:
    """Remove what is specific to this machine: paths and addresses."""
    text = re.sub(r"/[^\s'\"]*/(?:site-packages|lib/python3\.\d+)/", "", text)
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)


def alt_text(figure: Any) -> str:
    """The alternative text of a figure: its titles, or else the text in it."""
    titles = [figure.get_suptitle(), *(axes.get_title(loc=loc) for axes in figure.axes for loc in ("center", "left"))]
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    description = "; ".join(filter(None, titles)) or ", ".join(filter(None, texts))
    return re.sub(r"[\s\[\]]+", " ", description).strip()


def encode_png(figure: Any) -> str:
    """The figure as a PNG in base64, in at most 96 colors, a third of the bytes."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, dpi=150)
    Image.open(full).convert("RGB").quantize(96).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
