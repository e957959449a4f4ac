"""The Python blocks of a page, and the output that the page shows for each."""

import contextlib
import io
import itertools
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<more>.*?)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.S | re.M)


class Block(NamedTuple):
    """A block of Python: its code, its line in the page, the output that the page shows, and the library it is for."""

    code: str
    line: int
    prints: str | None  # None: the page shows no output
    peer: str  # "" for mlax


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page; a title names another library, and a text block right after is the output.

    An output with the title "measured" differs from machine to machine: it is shown, and not compared.
    """
    text = (ROOT / page).read_text()
    fences = list(FENCE.finditer(text))
    found = []
    for fence, after in itertools.zip_longest(fences, fences[1:]):
        if fence["language"] != "python":
            continue
        is_output = after and after["language"] == "text" and not text[fence.end() : after.start()].strip()
        is_compared = is_output and 'title="measured"' not in after["more"]
        prints = textwrap.dedent(after["text"]) if after and is_compared else None
        title = re.search(r'title="([^"]+)"', fence["more"])
        line = text.count("\n", 0, fence.start("text"))
        found.append(Block(textwrap.dedent(fence["text"]), line, prints, title[1] if title else ""))
    return found


def run_page(page: str, peer: str = "", **names: Any) -> dict[str, Any]:
    """Run the blocks of a page for mlax, or for a peer, in order; returns the names that they define.

    Fails where a block prints something else than the page shows.
    """
    scope: dict[str, Any] = {"__name__": "page", **names}
    for block in blocks(page):
        if block.peer != peer:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # at its line in the page, so that errors and getsource find it
            exec(compile("\n" * block.line + block.code, str(ROOT / page), "exec"), scope)
        found = printed.getvalue()
        if block.prints is not None and found.strip() != block.prints.strip():
            where = f"{page}, line {block.line + 1}"
            raise AssertionError(f"{where}: the page shows\n\n{block.prints}\nbut the block prints\n\n{found}")
    return scope
