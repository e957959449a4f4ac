"""Links have targets that exist: pages, files of the repository, headings."""

import re

import pytest

from scripts.pages import (
    DOCS,
    FENCED,
    ROOT,
    ROOT_PAGES,
    external_resource,
    link_names,
    links,
    resolve_link,
    rewrite_links,
    rooms,
    space_lists,
)

PAGES = ["README.md", *ROOT_PAGES.values(), *sorted(file.relative_to(ROOT).as_posix() for file in DOCS.rglob("*.md"))]
GENERATED = {f"docs/reference/{name}.md" for name in [*rooms(), "command"]}


def text_of(path):
    return (ROOT / path).read_text()


def anchors(path):
    """The anchors of the headings of a page, as GitHub and the site both generate them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text_of(path)), re.M)
    plain = [re.sub(r"[`*]|\]\(.*?\)|\[", "", heading).lower() for heading in headings]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


def dead_links(path):
    """The links of a page whose target does not exist."""
    for target in links(text_of(path)):
        file = resolve_link(target, path)
        anchor = "" if target.startswith("http") else target.partition("#")[2]
        if file in GENERATED:
            continue
        exists = not file or (ROOT / file).exists()
        if not exists or (anchor and anchor not in anchors(file or path)):
            yield target


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_no_dead_links(path):
    assert not list(dead_links(path))


def test_a_dead_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.test_links.ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text("# Page\n\n[a](nowhere.md) [b](page.md#gone) [c](page.md#page) [d](../x.py)")
    assert list(dead_links("docs/page.md")) == ["nowhere.md", "page.md#gone", "../x.py"]


def test_links_to_files_of_the_repository_point_at_the_pages_that_show_them():
    assert rewrite_links("[a](../../examples/digits.py)", "guides/a.md") == "[a](../source/examples/digits.py.md)"
    assert rewrite_links("[a](../CONTRIBUTING.md#x)", "faq.md") == "[a](contributing.md#x)"
    assert rewrite_links("[a](docs/design/README.md)", "contributing.md") == "[a](design/README.md)"
    assert rewrite_links("[a](other.md)\n```\n[b](../x.py)\n```", "faq.md") == "[a](other.md)\n```\n[b](../x.py)\n```"


def test_names_become_links_except_in_code_headings_and_links():
    names = {"nn.Linear": "mlax.nn.Linear"}
    assert (
        link_names("Use `nn.Linear(3)` or `nn.Other`.", names) == "Use [`nn.Linear(3)`][mlax.nn.Linear] or `nn.Other`."
    )
    for kept in ("# `nn.Linear`", "[`nn.Linear`](a.md)", "```\n`nn.Linear`\n```"):
        assert link_names(kept, names) == kept


def test_lists_get_an_empty_line_before_them_except_in_code():
    assert space_lists("a\n- b\n  c\n- d") == "a\n\n- b\n  c\n- d"
    assert space_lists("```\na\n- b\n```") == "```\na\n- b\n```"


def test_an_external_resource_is_found():
    assert external_resource('<script defer src="https://unpkg.com/x.js">') == "https://unpkg.com/x.js"
    assert external_resource('<link rel="stylesheet" href="//fonts.net/a.css">') == "//fonts.net/a.css"
    assert external_resource('<a href="https://docs.jax.dev">JAX</a> <img src="images/logo.svg">') == ""
