"""The Python blocks of each page run, in order and in one scope, and print what the page shows."""

import shutil
import sys

import jax
import pytest

import mlax
from tests.docs.blocks import ROOT, blocks, run_page

PAGES = [f"docs/{name}.md" for name in ("index", "installation", "quickstart", "all-of-mlax", "faq")]
GUIDES = sorted(f"docs/guides/{file.name}" for file in (ROOT / "docs/guides").glob("*.md"))


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """An empty folder to run in, with the arrays that other libraries wrote for the guides that compare with them.

    Matplotlib is hidden: other tests draw curves, a process for each run.
    """
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for file in (ROOT / "docs/guides/peers").glob("*.npz"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [*PAGES, *(pytest.param(page, marks=pytest.mark.guides) for page in GUIDES)])
def test_a_page_runs_and_prints_what_it_shows(page, reader):
    run_page(page)


def test_a_page_that_shows_another_output_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, line 2: the page shows\n\n2\n"):
        run_page("page.md")


def test_a_measured_output_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text('```python\nprint(1)\n```\n\n```text title="measured"\n2\n```\n')
    run_page("page.md")


def test_blocks_for_other_libraries_do_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    (tmp_path / "page.md").write_text('```python title="PyTorch"\nimport nowhere\n```\n\n```python\na = 1\n```\n')
    assert run_page("page.md")["a"] == 1
    assert [block.peer for block in blocks("page.md")] == ["PyTorch", ""]


def test_the_readme_is_short_learns_and_resumes(reader):
    assert len(blocks("README.md")[0].code.strip().splitlines()) < 30
    scope = run_page("README.md")
    assert scope["value"] < 0.05
    assert scope["result"].scores["loss"] < 0.1
    again = run_page("README.md")
    assert again["result"].scores == scope["result"].scores
    deep, _ = jax.eval_shape(scope["writer"].init, jax.random.key(0), jax.ShapeDtypeStruct((2, 8), "int32"))
    assert mlax.get(deep, "blocks/stacked/up/kernel").shape == (12, 64, 256)
