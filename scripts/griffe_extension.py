"""A Griffe extension for the API reference.

`frozen` classes are shown as dataclasses, a trailing comment documents an attribute or alias, and docstrings get their
lists and links. Griffe reads the source for mkdocstrings.
"""

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from pages import link_names, reference_names, space_lists


class MlaxExtension(griffe.Extension):
    """Teach Griffe the conventions of mlax."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Mark a `frozen` class as a dataclass."""
        if any(str(decorator.value).rpartition(".")[2] == "frozen" for decorator in cls.decorators):
            line = cls.decorators[-1].lineno
            cls.decorators.append(
                griffe.Decorator(griffe.ExprName("dataclasses.dataclass"), lineno=line, endlineno=line)
            )

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Use a trailing comment as the docstring of an attribute that has none."""
        if attr.docstring is None and attr.lines:
            comment = re.search(r"  # (?!pyright|noqa|type:)(.+)$", attr.lines[-1])
            if comment:
                attr.docstring = griffe.Docstring(_sentence(comment[1]), lineno=attr.endlineno, parent=attr)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring to Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = link_names(format_lists(obj.docstring.value), reference_names())


def format_lists(text: str) -> str:
    """Turn two-column lists of names and descriptions into Markdown lists, and put an empty line before each list."""
    text = re.sub(r"^(\w+) {2,}(?=\S)", r"- `\1`: ", text, flags=re.M)
    return space_lists(re.sub(r"^ {6,}(?=\S)", "  ", text, flags=re.M))  # continuation of the second column


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if text[0].isalpha() else f"{text.rstrip('.')}."
