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

from pages import format_examples, format_lists, link_names, reference_names


class MlaxExtension(griffe.Extension):
    """Teach Griffe the conventions of mlax."""

    def on_class_instance(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Mark a `frozen` class as a dataclass."""
        if any(str(decorator.value).rpartition(".")[2] == "frozen" for decorator in cls.decorators):
            line = cls.decorators[-1].lineno
            cls.decorators.append(
                griffe.Decorator(griffe.ExprName("dataclasses.dataclass"), lineno=line, endlineno=line)
            )

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring to Markdown. Of a class, add its fields; an alias has a comment in its place."""
        is_alias = isinstance(obj, griffe.Attribute) and obj.docstring is None and not obj.parent.is_class
        if is_alias and (comment := _comment(obj)):
            obj.docstring = griffe.Docstring(_sentence(comment), lineno=obj.endlineno, parent=obj)
        if obj.docstring is not None:
            text = format_examples(format_lists(obj.docstring.value)) + _fields(obj)
            obj.docstring.value = link_names(text, reference_names())


def _fields(obj: griffe.Object) -> str:
    """The fields of a class that have comments, as a list."""
    members = obj.members.items() if obj.is_class else ()
    comments = {name: _comment(member) for name, member in members if member.is_attribute and not name.startswith("_")}
    items = [f"- `{name}`: {_sentence(comment)}" for name, comment in comments.items() if comment]
    return "\n".join(["", "", "**Fields**", "", *items]) if items else ""


def _comment(attribute: Any) -> str:
    """The comment behind an attribute that has no docstring."""
    if attribute.is_alias or attribute.docstring is not None or not attribute.lines:
        return ""
    found = re.search(r"  # (?!pyright|noqa|type:)(.+)$", attribute.lines[-1])
    return found[1] if found else ""


def _sentence(comment: str) -> str:
    """A comment as a sentence of Markdown, in which only code is marked up."""
    text = re.sub(r"(`[^`]*`)|([\[*<])", lambda match: match[1] or f"\\{match[2]}", comment.rstrip("."))
    return f"{text[0].upper()}{text[1:]}."
