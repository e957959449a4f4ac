"""Placement: where every variable lives, how data moves, where each computation runs."""

from mlax.place._auto import auto
from mlax.place._constrained import Constrained
from mlax.place._description import Description, DoesNotFit
from mlax.place._exchanged import Exchanged
from mlax.place._gathered import Gathered
from mlax.place._guard import UnplannedTransfer, check, guard
from mlax.place._in_stages import in_stages
from mlax.place._microbatches import split_microbatches
from mlax.place._noticed import traced_for
from mlax.place._on import On
from mlax.place._one_forward_one_backward import one_forward_one_backward
from mlax.place._pipelined import Pipelined
from mlax.place._plan import Plan
from mlax.place._ready import data, expert, fsdp, pipeline, sequence, single, tensor, zero
from mlax.place._stages import Stages
from mlax.place._start import Started, start
from mlax.place._stream import Stream
from mlax.place._where import Where, host, last, spread

__all__ = [
    "Constrained",
    "Description",
    "DoesNotFit",
    "Exchanged",
    "Gathered",
    "On",
    "Pipelined",
    "Plan",
    "Stages",
    "Started",
    "Stream",
    "UnplannedTransfer",
    "Where",
    "auto",
    "check",
    "data",
    "expert",
    "fsdp",
    "guard",
    "host",
    "in_stages",
    "last",
    "one_forward_one_backward",
    "pipeline",
    "sequence",
    "single",
    "spread",
    "start",
    "tensor",
    "zero",
]
