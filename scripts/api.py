"""Write docs/api.md, every public name with its one-line meaning, from the docstrings: `make api`.

    python scripts/api.py [--check]

`--check` writes nothing, and fails unless the page is up to date.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's mlax, even if another one is installed

from scripts.pages import DOCS, group_names, room_title, rooms, summary

PAGE = DOCS / "api.md"
INTRODUCTION = """\
# API

Every public name and what it is, in one line; the reference has the signatures. `make api` writes this page from the
first sentences of the docstrings.
"""


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail unless the page is up to date, and write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit(f"{PAGE} is not up to date; run `make api`.")


def page() -> str:
    """The page as it should be."""
    text = INTRODUCTION
    for prefix, room in rooms().items():
        text += f"\n## {room_title(prefix)}\n\n{room.__doc__.strip()}\n"
        for title, names in group_names(prefix, room).items():
            heading = ["", f"### {title}"]
            rows = [f"| `{prefix}.{name}` | {summary(room, name)} |" for name in names]
            text += "\n".join([*heading, "", "| name | meaning |", "|---|---|", *rows, ""])
    return text


if __name__ == "__main__":
    main()
