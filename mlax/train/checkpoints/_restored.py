"""Restored: what came back from a checkpoint."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Restored(NamedTuple):
    """A tree that was restored, from which step, and which later steps were passed over because they are damaged."""

    step: int
    tree: Any
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    refused: tuple[tuple[int, str], ...] = ()  # (step, why), the newest first
