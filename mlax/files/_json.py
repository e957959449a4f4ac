"""JSON from strangers: bounded in size and depth, every key once, no numbers that are none."""

import json
import re
from collections import Counter
from typing import Any

import numpy as np

from mlax.files._refused import Refused

# A string, closed or not; possessive, so that no input makes it look at anything twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parsed(data: bytes, path: str, *, depth: int) -> dict[str, Any]:
    """The object that `data` holds, of no more than `depth` brackets inside one another; `path` is for the words."""
    brackets = np.frombuffer(_STRING.sub(b"", data).translate(None, _NO_BRACKETS), np.uint8)
    if np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1).cumsum().max(initial=0) > depth:
        raise Refused(f"{path}: its JSON is nested more than {depth} deep; nothing honest is.")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as failure:
        raise Refused(f"{path}: its JSON cannot be read ({failure}).") from None
    if not isinstance(value, dict):
        raise Refused(f"{path}: its JSON is a {type(value).__name__}, but an object is wanted.")
    return value


def is_count(value: Any, most: int = 2**63 - 1) -> bool:
    """Whether a value of JSON is a whole number from 0 to `most`; True is none."""
    return type(value) is int and 0 <= value <= most


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} is there twice")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")
