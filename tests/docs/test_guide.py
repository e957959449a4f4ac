"""The pages, notebooks and figures of the JAX guide all exist, and were generated from their sources."""

import base64
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "jax"
SOURCES = sorted(PAGES.glob("[0-9]*.py"))

spec = importlib.util.spec_from_file_location("guide", ROOT / "scripts" / "guide.py")
assert spec and spec.loader
guide = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guide)

each_page = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def notebook_of(source):
    return json.loads((PAGES / "notebooks" / f"{source.stem}.ipynb").read_text())


def cells_in(source):
    """The code cells of a source with their tags, split here, so that the guide's own reader is tested too."""
    for block in re.split(r"^# %%", source.read_text(), flags=re.M)[1:]:
        head, _, code = block.partition("\n")
        if "[markdown]" not in head:
            yield code.strip(), set(re.findall(r'"([\w-]+)"', head))


def test_there_are_fourteen_pages_and_the_index_links_each():
    linked = re.findall(r"\]\((\d\d_\w+)\.md\)", (PAGES / "index.md").read_text())
    assert linked == [source.stem for source in SOURCES]
    assert len(linked) == 14


def test_no_file_is_left_of_a_removed_page():
    named = {source.stem for source in SOURCES}
    assert {page.stem for page in PAGES.glob("[0-9]*.md")} == named
    assert {page.stem for page in (PAGES / "notebooks").glob("*")} == named
    assert {figure.stem.rsplit("-", 1)[0] for figure in (PAGES / "figures").glob("*")} <= named


@each_page
def test_the_notebook_was_generated_from_this_source(source):
    notebook = notebook_of(source)
    assert notebook["metadata"]["mlax"]["source"] == guide.digest(source), "run `make guide`"
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["source"].strip(), guide.tags(cell)) for cell in cells] == list(cells_in(source))


@each_page
def test_the_page_shows_the_notebook(source):
    page = (PAGES / f"{source.stem}.md").read_text()
    assert page == guide.render(source.stem, notebook_of(source)), "run `make guide`"
    assert guide.digest(source) in page.splitlines()[0]


@each_page
def test_the_figures_are_those_of_the_notebook_and_small(source):
    drawn = [base64.b64decode(picture) for picture in guide.figures(notebook_of(source))]
    files = sorted((PAGES / "figures").glob(f"{source.stem}-*.png"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    assert [file.read_bytes() for file in files] == drawn
    assert all(len(picture) < 80_000 for picture in drawn)


@each_page
def test_cells_raise_exactly_where_they_are_tagged(source):
    for cell in notebook_of(source)["cells"]:
        raised = any(output["output_type"] == "error" for output in cell.get("outputs", ()))
        assert raised == ("raises-exception" in guide.tags(cell)), cell["source"]


@each_page
def test_a_page_with_measurements_asserts_something(source):
    """A claim about a time is worth only what can fail."""
    cells = list(cells_in(source))
    if any("measured" in tags for _, tags in cells):
        assert any("assert" in code for code, tags in cells if "drawing" not in tags)


def test_a_changed_output_is_reported_unless_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(guide, "PAGES", tmp_path)
    (tmp_path / "notebooks").mkdir()
    page = tmp_path / "01_one.py"
    page.write_text("# %%\nprint(1)\n")

    def notebook(said, tags=(), jax="1"):
        stream = {"output_type": "stream", "name": "stdout", "text": said}
        cell = {"cell_type": "code", "source": "print(1)", "metadata": {"tags": list(tags)}, "outputs": [stream]}
        return {"cells": [cell], "metadata": {"mlax": {"source": guide.digest(page), "jax": jax}}}

    def differences(before, now):
        (tmp_path / "notebooks" / "01_one.ipynb").write_text(json.dumps(before))
        return guide.find_differences(page, now)

    assert differences(notebook("1\n"), notebook("1\n")) == []
    assert "-1\n+2" in differences(notebook("1\n"), notebook("2\n"))[0]
    assert differences(notebook("1\n", ["measured"]), notebook("2\n", ["measured"])) == []
    assert differences(notebook("1\n", ["version"]), notebook("2\n", ["version"], jax="2")) == []
    assert differences(notebook("1\n", ["version"]), notebook("2\n", ["version"])) != []
    before = notebook("1\n")
    page.write_text("# %%\nprint(2)\n")
    assert "run `make guide`" in differences(before, before)[0]


def test_the_loop_to_copy_has_about_forty_lines_and_fit_has_as_many_as_the_pages_say():
    (loop,) = [code for code, _ in cells_in(PAGES / "14_own_loop.py") if "def fit(" in code]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 42
    assert "checkpoints.restore" in loop and "evaluate(" in loop
    names = "fit loop scoring callback profile monitor loggers curves run signals divergence fingerprint metrics"
    lines = sum(len((ROOT / f"mlax/train/_{name}.py").read_text().splitlines()) for name in names.split())
    for page in ("jax/14_own_loop.py", "guides/training-loop.md", "design/loop.md"):
        text = " ".join((ROOT / "docs" / page).read_text().replace("#", " ").split())
        (claimed,) = re.findall(r"is about ([\d,]+) lines", text)
        assert abs(int(claimed.replace(",", "")) / lines - 1) < 0.15, (page, lines)
