"""Checkpoints: saved training steps in a folder; atomic, asynchronous, verified."""

from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize
from mlax.train.checkpoints._orbax import from_orbax, to_orbax
from mlax.train.checkpoints._restore import RestoredCheckpoint

__all__ = ["Checkpoints", "Maximize", "Minimize", "RestoredCheckpoint", "from_orbax", "to_orbax"]
