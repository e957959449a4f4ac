"""What the reference shows of the source: `frozen` classes have the signature of their fields, a comment behind a field
or an alias documents it, and docstrings have their lists and links.

An extension of Griffe, which reads the source for mkdocstrings.
"""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from pages import crossed, spaced, spoken_of


class Described(griffe.Extension):
    """Read what the house writes its own way."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Have Griffe take a `frozen` class for the dataclass that it is."""
        if any(str(decorator.value).rpartition(".")[2] == "frozen" for decorator in cls.decorators):
            line = cls.decorators[-1].lineno
            cls.decorators.append(
                griffe.Decorator(griffe.ExprName("dataclasses.dataclass"), lineno=line, endlineno=line)
            )

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Take the comment at the end of an attribute's line for its docstring, unless it has one."""
        if attr.docstring is None and attr.lines:
            comment = re.search(r"  # (?!pyright|noqa|type:)(.+)$", attr.lines[-1])
            if comment:
                attr.docstring = griffe.Docstring(_sentence(comment[1]), lineno=attr.endlineno, parent=attr)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Make Markdown of the docstring."""
        if obj.docstring is not None:
            obj.docstring.value = crossed(listed(obj.docstring.value), spoken_of())


def listed(text: str) -> str:
    """The text with names that have words beside them made a list, and an empty line before each list."""
    text = re.sub(r"^(\w+) {2,}(?=\S)", r"- `\1`: ", text, flags=re.M)
    return spaced(re.sub(r"^ {6,}(?=\S)", "  ", text, flags=re.M))  # what goes on in the second column


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:].rstrip('.')}." if words[0].isalpha() else f"{words.rstrip('.')}."
