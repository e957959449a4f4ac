"""What an array in a file may be called."""

import re

MOST_CHARACTERS = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def why_not(name: str) -> str | None:
    """Why this is no name for an array, or None if it is one: names, joined by slashes, that are no way up."""
    if not name or len(name) > MOST_CHARACTERS:
        return f"it has {len(name):,} characters, and 1 to {MOST_CHARACTERS:,} are allowed"
    if name == "__metadata__":
        return "the format has it for the words beside the arrays"
    if _CONTROL.search(name):
        return "it has a control character in it"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "it is not a plain path: '', '.' and '..' are no names"
    return None
