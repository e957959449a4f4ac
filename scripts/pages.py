"""The generated pages of the site: the API reference, one page per room, and the source files that pages link to.

MkDocs calls the `on_...` hooks. The rest does not need MkDocs, so that tests can use it.
"""

import contextlib
import importlib
import inspect
import io
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # MkDocs and Griffe load this file by its path

from scripts.groups import GROUPS, TITLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}  # kept in the root
SEARCH_BOOSTS = {  # by the beginning of the path: what explains before what lists, what lists before what decides
    "guides/README": 0.3,
    "guides/pretrained": 1.6,
    "guides/serving": 0.4,
    "guides/": 1.2,
    "reference/nn": 1.2,
    "reference/ops": 0.7,
    "reference/zoo": 0.7,
    "jax/index": 0.3,
    "design/": 0.3,
    "contributing": 0.3,
}
FENCED = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```[ ]*$", re.S | re.M)
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)|^\[[^\]]+\]: (\S+)$|(?:href|src)=\"([^\"]+)\"", re.M)


def rooms() -> dict[str, Any]:
    """The rooms by the name of their page; `core` is on the page `mlax`, which exports its names."""
    package = importlib.import_module("mlax")
    found = {name: getattr(package, name) for name in package.__all__}
    modules = {name: value for name, value in found.items() if inspect.ismodule(value)}
    return {"mlax": importlib.import_module("mlax.core"), **modules}


def reference() -> dict[str, str]:
    """The pages of the reference, by path."""
    pages = {f"reference/{name}.md": _room_page(name, room) for name, room in rooms().items()}
    return {**pages, "reference/command.md": _command()}


def reference_names() -> dict[str, str]:
    """Map each public name as pages write it, `nn.Linear` or `mlax.Series`, to its anchor in the reference."""
    return {f"{page}.{name}": f"{room.__name__}.{name}" for page, room in rooms().items() for name in room.__all__}


def source_page(path: str) -> str:
    """The path of the page that shows a file of the repository."""
    return f"source/{path}.md"


def links(markdown: str) -> Iterator[str]:
    """The link targets of a page, except in code."""
    for groups in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCED.sub("", markdown))):
        yield next(filter(None, groups))


def resolve_link(target: str, file: str) -> str:
    """The repository path that a link in `file` points to; "" if it points outside the repository."""
    path = target.partition("#")[0]
    if re.match(r"[a-z]+:", target) or not path:
        return ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), path))


def source_path(page: str) -> str:
    """The repository path of the source of a page."""
    return ROOT_PAGES.get(page, f"docs/{page}")


def rewrite_links(markdown: str, page: str) -> str:
    """Point links to repository files at the pages that show them."""
    root_pages = {file: name for name, file in ROOT_PAGES.items()}

    def rewrite(match: re.Match[str]) -> str:
        target = next(filter(None, match.groups()))
        _, mark, anchor = target.partition("#")
        file = resolve_link(target, source_path(page))
        if not file or (source_path(page).startswith("docs/") and file.startswith("docs/")):
            return match[0]
        to = root_pages.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else source_page(file))
        return match[0].replace(target, posixpath.relpath(to, posixpath.dirname(page) or ".") + mark + anchor)

    return _map_outside_code(markdown, lambda text: LINK.sub(rewrite, text))


def link_names(markdown: str, names: dict[str, str]) -> str:
    """Link each public name in inline code, such as `nn.Linear`, to the reference."""
    pattern = re.compile(r"(?<![\[`])`(?P<code>(?P<name>[a-z]+\.\w+)(?:\([^`]*\))?)`(?![\]`])")

    def link(match: re.Match[str]) -> str:
        name = match["name"]
        return f"[`{match['code']}`][{names[name]}]" if name in names else match[0]

    def link_line(line: str) -> str:
        if line.startswith("#"):
            return line
        parts = re.split(r"(\[[^\]]*\]\([^)]*\))", line)  # every other part is a link already
        return "".join(part if i % 2 else pattern.sub(link, part) for i, part in enumerate(parts))

    return _map_outside_code(markdown, lambda text: "\n".join(map(link_line, text.split("\n"))))


def space_lists(markdown: str) -> str:
    """Insert an empty line before each list: GitHub does not need it, the site does."""
    return _map_outside_code(markdown, lambda text: re.sub(r"^((?!- |  )\S.*)\n(?=- )", r"\1\n\n", text, flags=re.M))


def format_examples(text: str) -> str:
    """Turn each `>>>` example into a block of code, followed by what it prints."""

    def fence(match: re.Match[str]) -> str:
        lines = match[0].split("\n")
        code = [line.strip()[4:] for line in lines if line.strip().startswith((">>>", "..."))]
        output = [line.strip() for line in lines if not line.strip().startswith((">>>", "..."))]
        blocks = [["```python", *code, "```"], ["```text", *output, "```"] if output else []]
        return "\n\n".join("\n".join(block) for block in blocks if block)

    return re.sub(r"^ *>>> .+(?:\n *\S.*)*", fence, text, flags=re.M)


def format_lists(text: str) -> str:
    """Turn two-column lists of names and descriptions into Markdown lists, and put an empty line before each list."""
    text = re.sub(r"^(\w+) {2,}(?=\S)", r"- `\1`: ", text, flags=re.M)
    return space_lists(re.sub(r"^ {6,}(?=\S)", "  ", text, flags=re.M))  # continuation of the second column


def _map_outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(markdown[end:])])


def _room_page(page: str, room: Any) -> str:
    """The page of a room: its groups with their names, then for each group a table and the entries."""
    groups = group_names(page, room)
    links = {
        title: ", ".join(f"[`{name}`][{room.__name__}.{name}]" for name in names) for title, names in groups.items()
    }
    contents = [f"| [{title}](#{_anchor(title)}) | {links[title]} |" for title in groups]
    text = f"# {room_title(page)}\n\n{room.__doc__}\n\n" + "\n".join(["| | |", "|---|---|", *contents, ""])
    for title, names in groups.items():
        rows = [f"| [`{name}`][{room.__name__}.{name}] | {summary(room, name)} |" for name in names]
        text += "\n".join(["", f"## {title}", "", "| | |", "|---|---|", *rows, ""])
        text += "".join(f"\n::: {room.__name__}.{name}\n" for name in names)
    return text


def _link_all(room: Any, names: list[str]) -> str:
    return ", ".join(f"[`{name}`][{room.__name__}.{name}]" for name in names)


def room_title(page: str) -> str:
    """The title of the page of a room: its name and what it has."""
    return f"{page if page == 'mlax' else f'mlax.{page}'}: {TITLES[page]}"


def group_names(page: str, room: Any) -> dict[str, list[str]]:
    """The public names of a room by group, in reading order; those without a group come last, as "Other"."""
    groups = {title: [name for name in names.split() if name in room.__all__] for title, names in GROUPS[page].items()}
    grouped = {name for names in groups.values() for name in names}
    groups["Other"] = [name for name in room.__all__ if name not in grouped]
    return {title: names for title, names in groups.items() if names}


def _anchor(title: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def summary(room: Any, name: str) -> str:
    """The first sentence of the docstring; of an alias, the comment behind its definition."""
    value = getattr(room, name)
    if _is_alias(value):
        return _alias_comment(room, name)
    first = re.split(r"(?<=[^.]\.)\s|\n\n|:\n", inspect.getdoc(value) or "")[0]
    return re.sub(r"\s+", " ", first).replace("|", "\\|")


def _is_alias(value: Any) -> bool:
    """Whether a public name is another name for something, such as a type, that mlax does not define."""
    is_defined = inspect.isclass(value) or inspect.isfunction(value)
    return not is_defined or not value.__module__.startswith("mlax")


def _alias_comment(room: Any, name: str) -> str:
    for file in sorted(Path(room.__file__).parent.rglob("*.py")):
        if found := re.search(rf"^ *{name}\b[^=\n]* = .*  # (.+)$", file.read_text(), re.M):
            return found[1]
    return ""


def _command() -> str:
    cli = importlib.import_module("mlax.cli")
    lines = ["# The command line: `mlax`", cli.__doc__ or ""]
    for command in ("", *re.findall(r"^    (\w+) ", _help(cli, ""), re.M)):
        text = _help(cli, command).replace(f"{ROOT}/", "")
        lines += [f"## mlax {command}" if command else "", f"```text\n{text.strip()}\n```"]
    return "\n\n".join([*lines, "## From Python", "::: mlax.cli.main"])


def _help(cli: Any, command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    return printed.getvalue()


def _file_page(path: str) -> str:
    """A page that shows a file of the repository, or the listing of a directory."""
    language = {"py": "python", "sh": "bash", "toml": "toml", "yaml": "yaml", "md": "markdown"}
    file = ROOT / path
    text = file.read_text() if file.is_file() else "\n".join(sorted(each.name for each in file.iterdir()))
    fence = "````" if "```" in text else "```"
    return f"# {path}\n\n{fence}{language.get(path.rpartition('.')[2], 'text')}\n{text.rstrip()}\n{fence}\n"


def on_config(config: Any) -> Any:
    """Drop missing pages from the navigation, and expand entries with a `*`."""
    config.nav = _filter_nav(config.nav)
    return config


def _filter_nav(nav: list[Any]) -> list[Any]:
    generated = {*ROOT_PAGES, *(f"reference/{name}.md" for name in [*rooms(), "command"])}
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            entries += _glob_pages(entry)
        elif isinstance(entry, str):
            entries += [entry] if entry in generated or (DOCS / entry).is_file() else []
        else:
            ((title, children),) = entry.items()
            inner = _filter_nav(children if isinstance(children, list) else [children])
            entries += [{title: inner if isinstance(children, list) else inner[0]}] if inner else []
    return entries


def _glob_pages(pattern: str) -> list[str]:
    """The pages that match: an index first, then the pages in the order of its links, then the rest by name."""
    found = {file.relative_to(DOCS).as_posix() for file in DOCS.glob(pattern)}
    first = [page for page in sorted(found) if Path(page).stem in ("index", "README")]
    targets = [resolve_link(target, source_path(page)) for page in first for target in links((DOCS / page).read_text())]
    linked = [target.removeprefix("docs/") for target in targets]
    return [page for page in dict.fromkeys([*first, *linked, *sorted(found)]) if page in found]


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    pages = {**reference(), **{page: (ROOT / file).read_text() for page, file in ROOT_PAGES.items()}}
    texts = {file.src_uri: Path(file.abs_src_path).read_text() for file in files.documentation_pages()}
    for page, text in {**texts, **pages}.items():
        targets = {resolve_link(target, source_path(page)) for target in links(text)} - {"", *ROOT_PAGES.values()}
        sources = {path for path in targets if not path.startswith("docs/") and (ROOT / path).exists()}
        pages |= {source_page(path): _file_page(path) for path in sources}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Resolve the links of a page to pages of the site, and set how it is searched."""
    uri = page.file.src_uri
    page.meta = {"search": search_options(uri), **page.meta}
    if uri.startswith(("reference/", "source/")):
        return markdown
    text = re.sub(r"\A<!--.*?-->\s*", "", markdown, flags=re.S)  # before it, MkDocs finds no title
    return link_names(rewrite_links(space_lists(text), uri), reference_names())


def search_options(page: str) -> dict[str, Any]:
    """Where a page comes among search results: guides first; sources and pages that repeat others not at all."""
    if page.startswith("source/") or page in ("api.md", "changelog.md"):
        return {"exclude": True}
    return {"boost": next((boost for folder, boost in SEARCH_BOOSTS.items() if page.startswith(folder)), 1)}


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Reject pages that load external resources: the site must work offline."""
    if url := external_resource(output):
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page.file.src_uri} loads {url}; pages must be self-contained, so store it under docs/.")
    return output


def external_resource(html: str) -> str:
    """The first external URL that a page loads, or ""; hyperlinks do not count."""
    found = re.search(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"((?:https?:)?//[^\"]+)", html)
    return found[1] if found else ""
