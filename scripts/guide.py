"""Run the pages of docs/jax and write what they print and draw beside their code: `make guide`.

    python scripts/guide.py [--check] [docs/jax/01_not_numpy.py ...]

Each page is a script of cells (jupytext's percent format). It runs in a process of its own, on two cores, and becomes
a markdown page, a notebook and figures. `--check` writes nothing: it runs the pages and fails where what they print
is no longer what they show. Tags say how a cell is treated:

    measured          times and the like: shown, never compared; what the text claims of them is asserted in the cell
    version           the words of one version of JAX: compared only under the version that wrote the page
    raises-exception  the cell ends in an error, and the error is what it shows
    drawing           the code is folded away, the figure is what it shows
"""

import argparse
import base64
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "jax"


def main() -> None:
    """Build or check the pages that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="sources; all of docs/jax if none is named")
    parser.add_argument("--check", action="store_true", help="compare with what is written, and write nothing")
    options = parser.parse_args()
    began, wrong = time.perf_counter(), []
    for page in [page.resolve() for page in options.pages] or sources():
        at = time.perf_counter()
        notebook = executed(page)
        if notebook is None:
            wrong.append(f"{page.name} failed; see above.")
        elif options.check:
            wrong += differences(page, notebook)
        else:
            write(page, notebook)
        print(f"{page.stem:24} {time.perf_counter() - at:5.0f} s", flush=True)
    print(f"{'all':24} {time.perf_counter() - began:5.0f} s")
    sys.exit("\n".join(wrong) if wrong else 0)


def sources() -> list[Path]:
    """The sources of the pages, in order."""
    return sorted(PAGES.glob("[0-9]*.py"))


def digest(page: Path) -> str:
    """What tells this source from any other."""
    return hashlib.sha256(page.read_bytes()).hexdigest()[:16]


def executed(page: Path) -> dict[str, Any] | None:
    """The page as a notebook with its outputs, run in a fresh process on two cores; None if it failed."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, Path(__file__).with_name("guide_page.py"), page, digest(page)],
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg", "PYTHONPATH": path},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            check=False,
        )
        return None if run.returncode else json.loads((Path(folder) / "notebook.json").read_text())


def tags(cell: Any) -> set[str]:
    """The tags of a cell."""
    return set(cell["metadata"].get("tags", ()))


def pictures(notebook: dict[str, Any]) -> list[str]:
    """The figures of a notebook in order, in base64."""
    return [
        output["data"]["image/png"]
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if output["output_type"] == "display_data"
    ]


def write(page: Path, notebook: dict[str, Any]) -> None:
    """Write the notebook, the figures and the page."""
    import nbformat

    for folder in ("notebooks", "figures"):
        (PAGES / folder).mkdir(exist_ok=True)
    nbformat.validate(notebook)
    (PAGES / "notebooks" / f"{page.stem}.ipynb").write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    for old in (PAGES / "figures").glob(f"{page.stem}-*.png"):
        old.unlink()
    for number, picture in enumerate(pictures(notebook), 1):
        (PAGES / "figures" / f"{page.stem}-{number}.png").write_bytes(base64.b64decode(picture))
    (PAGES / f"{page.stem}.md").write_text(rendered(page.stem, notebook))


def rendered(name: str, notebook: dict[str, Any]) -> str:
    """The notebook as a markdown page."""
    made = notebook["metadata"]["mlax"]
    blocks = [f"<!-- Written by `make guide` from {name}.py ({made['source']}); change that, not this. -->"]
    figure = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            blocks.append(cell["source"])
            continue
        code = f"```python\n{cell['source']}\n```"
        folded = "drawing" in tags(cell)
        blocks.append(
            f"<details markdown>\n<summary>The drawing's code</summary>\n\n{code}\n\n</details>" if folded else code
        )
        for output in cell["outputs"]:
            if output["output_type"] == "display_data":
                figure += 1
                blocks.append(f"![{words_of(output)}](figures/{name}-{figure}.png)")
            else:
                title = ' title="measured"' if "measured" in tags(cell) else ""
                blocks.append(f"```text{title}\n{words_of(output).rstrip()}\n```")
    after = [page for page in sources() if page.stem > name]
    following = f"Next: [{title_of(after[0])}]({after[0].stem}.md). " if after else ""
    blocks.append(
        f"---\n\n{following}This page is a script, [{name}.py]({name}.py), and a [notebook](notebooks/{name}.ipynb). "
        f"What it shows came out of JAX {made['jax']} on Python {made['python']}, on two cores of an {made['cpu']}; "
        "what is headed *measured* will differ on yours."
    )
    return "\n\n".join(blocks) + "\n"


def title_of(page: Path) -> str:
    """The heading of a page."""
    found = re.search(r"^# # (.*)$", page.read_text(), re.M)
    assert found, f"{page.name} has no heading"
    return found.group(1)


def words_of(output: dict[str, Any]) -> str:
    """The text of an output; of a figure what stands in its place for those who do not see it."""
    if output["output_type"] == "display_data":
        return output["metadata"]["alt"]
    if output["output_type"] == "error":
        return "\n".join(textwrap.fill(line, 110) for line in output["traceback"][0].splitlines())
    return output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]


def differences(page: Path, now: dict[str, Any]) -> list[str]:
    """Where a page that was just run says other things than the one that is written."""
    written = json.loads((PAGES / "notebooks" / f"{page.stem}.ipynb").read_text())
    if written["metadata"]["mlax"]["source"] != digest(page):
        return [f"{page.name} has changed since its page was written; run `make guide`."]
    same_jax = written["metadata"]["mlax"]["jax"] == now["metadata"]["mlax"]["jax"]
    found = []
    for before, after in zip(written["cells"], now["cells"], strict=True):
        if before["cell_type"] != "code" or "measured" in tags(before):
            continue
        loose = "version" in tags(before) and not same_jax
        then, here = (compared(cell, loose) for cell in (before, after))
        if then != here:
            diff = difflib.unified_diff(then.splitlines(), here.splitlines(), "written", "now", lineterm="", n=1)
            first = before["source"].splitlines()[0]
            found.append("\n".join([f"{page.name}, the cell that begins with {first!r}:", *diff]))
    return found


def compared(cell: dict[str, Any], loose: bool) -> str:
    """What a cell says, or with `loose` only the kind of error it ends in; pictures are not compared."""
    if loose:
        return " ".join(output["ename"] for output in cell["outputs"] if output["output_type"] == "error")
    pictures = {"display_data": lambda output: "a figure"}
    return "\n".join(pictures.get(output["output_type"], words_of)(output) for output in cell["outputs"])


if __name__ == "__main__":
    main()
