"""The pages of the site that nobody writes: the reference, by room, and the files that other pages link to.

mkdocs calls the functions `on_...`. The rest needs no mkdocs, so that tests can ask it which pages there will be.
"""

import importlib
import inspect
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BROUGHT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}  # pages that lie elsewhere
FENCED = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```[ ]*$", re.S | re.M)
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)|^\[[^\]]+\]: (\S+)$|(?:href|src)=\"([^\"]+)\"", re.M)


def rooms() -> dict[str, Any]:
    """The rooms by the name of their page: `mlax` is `core`, whose names are the package's own."""
    package = importlib.import_module("mlax")
    found = {name: getattr(package, name) for name in package.__all__}
    modules = {name: value for name, value in found.items() if inspect.ismodule(value)}
    return {"mlax": importlib.import_module("mlax.core"), **modules}


def reference() -> dict[str, str]:
    """The pages of the reference, by where they are."""
    pages = {f"reference/{name}.md": _room(name, room) for name, room in rooms().items()}
    return {**pages, "reference/command.md": _command()}


def spoken_of() -> dict[str, str]:
    """How pages speak of each public name, `nn.Linear` or `mlax.Series`, and its place in the reference."""
    return {f"{page}.{name}": f"{room.__name__}.{name}" for page, room in rooms().items() for name in room.__all__}


def source_page(path: str) -> str:
    """The page that shows a file of the repository."""
    return f"source/{path}.md"


def links(markdown: str) -> Iterator[str]:
    """Where the links of a page lead, code left out."""
    for groups in LINK.findall(FENCED.sub("", markdown)):
        yield next(filter(None, groups))


def led(target: str, file: str) -> str:
    """The file that a link in another leads to, both by their paths in the repository; "" for a link elsewhere."""
    path = target.partition("#")[0]
    if re.match(r"[a-z]+:", target) or not path:
        return ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(file), path))


def origin(page: str) -> str:
    """The path in the repository of what a page is made of."""
    return BROUGHT.get(page, f"docs/{page}")


def rewritten(markdown: str, page: str) -> str:
    """The page with links to files of the repository made links to the pages that show them."""
    own = {file: name for name, file in BROUGHT.items()}

    def changed(match: re.Match[str]) -> str:
        target = next(filter(None, match.groups()))
        _, mark, anchor = target.partition("#")
        file = led(target, origin(page))
        if not file or (origin(page).startswith("docs/") and file.startswith("docs/")):
            return match[0]
        to = own.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else source_page(file))
        return match[0].replace(target, posixpath.relpath(to, posixpath.dirname(page) or ".") + mark + anchor)

    return _outside_of_code(markdown, lambda text: LINK.sub(changed, text))


def crossed(markdown: str, names: dict[str, str]) -> str:
    """The page with each public name that it speaks of, as in `nn.Linear`, made a link to the reference."""

    def linked(match: re.Match[str]) -> str:
        name = match["name"]
        return f"[`{match['code']}`][{names[name]}]" if name in names else match[0]

    spoken = re.compile(r"(?<![\[`])`(?P<code>(?P<name>[a-z]+\.\w+)(?:\([^`]*\))?)`(?![\]`])")
    return _outside_of_code(markdown, lambda text: "\n".join(_line(line, spoken, linked) for line in text.split("\n")))


def spaced(markdown: str) -> str:
    """The page with an empty line before each list: GitHub needs none, the site does."""
    return _outside_of_code(markdown, lambda text: re.sub(r"^((?!- |  )\S.*)\n(?=- )", r"\1\n\n", text, flags=re.M))


def _line(line: str, spoken: re.Pattern[str], linked: Callable[[re.Match[str]], str]) -> str:
    """The line with its names linked, except where they are in a heading or in a link already."""
    if line.startswith("#"):
        return line
    parts = re.split(r"(\[[^\]]*\]\([^)]*\))", line)
    return "".join(part if place % 2 else spoken.sub(linked, part) for place, part in enumerate(parts))


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    kept, at = [], 0
    for block in FENCED.finditer(markdown):
        kept += [change(markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*kept, change(markdown[at:])])


def _room(page: str, room: Any) -> str:
    text = f"# {page if page == 'mlax' else f'mlax.{page}'}\n\n{room.__doc__}\n"
    for title, names in _grouped(room).items():
        rows = [f"| [`{name}`][{room.__name__}.{name}] | {_first_sentence(room, name)} |" for name in names]
        text += "\n".join(["", f"## {title}", "", "| | |", "|---|---|", *rows, ""])
        text += "".join(f"\n::: {room.__name__}.{name}\n" for name in names)
    return text


def _grouped(room: Any) -> dict[str, list[str]]:
    """The names of a room: those of each room inside of it, then classes, functions and the rest."""
    groups: dict[str, list[str]] = {"Classes": [], "Functions": [], "Types": []}
    for name in room.__all__:
        value = getattr(room, name)
        inner = getattr(value, "__module__", "").removeprefix(f"{room.__name__}.").partition(".")[0]
        if inner and not inner.startswith("_") and hasattr(room, inner):
            title = getattr(room, inner).__doc__.partition(":")[0]
        else:
            title = "Classes" if inspect.isclass(value) else "Functions" if inspect.isfunction(value) else "Types"
        groups.setdefault(title, []).append(name)
    return {title: names for title, names in groups.items() if names}


def _first_sentence(room: Any, name: str) -> str:
    value = getattr(room, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return ""
    first = re.split(r"(?<=[^.]\.)\s|\n\n|:\n", inspect.getdoc(value) or "")[0]
    return re.sub(r"\s+", " ", first).replace("|", "\\|")


def _command() -> str:
    lines = ["# The command `mlax`", importlib.import_module("mlax.cli").__doc__ or ""]
    for command in ("", "demo", "train", "launch", "doctor", "plot"):
        words = [*([command] if command else []), "--help"]
        shown = subprocess.run([sys.executable, "-m", "mlax", *words], capture_output=True, text=True, check=True)
        lines += [f"## mlax {command}" if command else "", f"```text\n{shown.stdout.strip()}\n```"]
    return "\n\n".join([*lines, "## From Python", "::: mlax.cli.main"])


def _shown(path: str) -> str:
    """The page of a file of the repository."""
    language = {"py": "python", "sh": "bash", "toml": "toml", "yaml": "yaml", "md": "markdown"}
    file = ROOT / path
    text = file.read_text() if file.is_file() else "\n".join(sorted(each.name for each in file.iterdir()))
    fence = "````" if "```" in text else "```"
    return f"# {path}\n\n{fence}{language.get(path.rpartition('.')[2], 'text')}\n{text.rstrip()}\n{fence}\n"


def on_config(config: Any) -> Any:
    """Keep of the table of contents what is there; a name with a star stands for all pages that it matches."""
    config.nav = _present(config.nav)
    return config


def _present(nav: list[Any]) -> list[Any]:
    made = {*BROUGHT, *(f"reference/{name}.md" for name in [*rooms(), "command"])}
    kept: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            kept += _matching(entry)
        elif isinstance(entry, str):
            kept += [entry] if entry in made or (DOCS / entry).is_file() else []
        else:
            ((title, below),) = entry.items()
            inner = _present(below if isinstance(below, list) else [below])
            kept += [{title: inner if isinstance(below, list) else inner[0]}] if inner else []
    return kept


def _matching(pattern: str) -> list[str]:
    """The pages that match, in the order in which the first page of their folder links to them, then by name."""
    found = {file.relative_to(DOCS).as_posix() for file in DOCS.glob(pattern)}
    first = [page for page in sorted(found) if Path(page).stem in ("index", "README")]
    targets = [led(target, origin(page)) for page in first for target in links((DOCS / page).read_text())]
    linked = [target.removeprefix("docs/") for target in targets]
    return [page for page in dict.fromkeys([*first, *linked, *sorted(found)]) if page in found]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    pages = {**reference(), **{page: (ROOT / file).read_text() for page, file in BROUGHT.items()}}
    texts = {file.src_uri: Path(file.abs_src_path).read_text() for file in files.documentation_pages()}
    for page, text in {**texts, **pages}.items():
        files_led = {led(target, origin(page)) for target in links(text)} - {"", *BROUGHT.values()}
        shown = {path for path in files_led if not path.startswith("docs/") and (ROOT / path).exists()}
        pages |= {source_page(path): _shown(path) for path in shown}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead the links of a page to other pages."""
    uri = page.file.src_uri
    if uri.startswith(("reference/", "source/")):
        return markdown
    return crossed(rewritten(spaced(markdown), uri), spoken_of())


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that loads something from elsewhere: the site is read without a network too."""
    if loaded := loaded_from_elsewhere(output):
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page.file.src_uri} loads {loaded}; keep what a page needs under docs/.")
    return output


def loaded_from_elsewhere(html: str) -> str:
    """The first thing that a page loads by another address than the site's own; a link to click on is none."""
    found = re.search(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"((?:https?:)?//[^\"]+)", html)
    return found[1] if found else ""
