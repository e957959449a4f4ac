"""The code of a page, block by block, and what the page says that each prints."""

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
    """A block of Python: its code, the line that it begins at, what it prints, and the peer that it is written for."""

    code: str
    line: int
    prints: str | None  # None: the page does not say
    peer: str  # "" for mlax


def blocks(page: str) -> list[Block]:
    """The blocks of Python of a page: one with a title is a peer's; a block of text right after is what it prints."""
    text = (ROOT / page).read_text()
    fences = list(FENCE.finditer(text))
    found = []
    for fence, after in itertools.zip_longest(fences, fences[1:]):
        if fence["language"] != "python":
            continue
        says = after and after["language"] == "text" and not text[fence.end() : after.start()].strip()
        prints = textwrap.dedent(after["text"]) if after and says else None
        title = re.search(r'title="([^"]+)"', fence["more"])
        line = text.count("\n", 0, fence.start("text"))
        found.append(Block(textwrap.dedent(fence["text"]), line, prints, title[1] if title else ""))
    return found


def run(page: str, peer: str = "", **names: Any) -> dict[str, Any]:
    """Run the blocks of a page that are written for mlax, or for a peer, one after another; gives what they define.

    Fails where a block prints something else than the page says.
    """
    scope: dict[str, Any] = {"__name__": "page", **names}
    for block in blocks(page):
        if block.peer != peer:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # on its own line of the page, so that errors and getsource find it
            exec(compile("\n" * block.line + block.code, str(ROOT / page), "exec"), scope)
        found = printed.getvalue()
        if block.prints is not None and found.strip() != block.prints.strip():
            where = f"{page}, line {block.line + 1}"
            raise AssertionError(f"{where}: the page says\n\n{block.prints}\nbut the block prints\n\n{found}")
    return scope
