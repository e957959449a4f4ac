"""Checkpoints: steps in a folder, atomic, in the background, verified."""

from mlax.train.checkpoints._best import Highest, Lowest
from mlax.train.checkpoints._checkpoints import Checkpoints
from mlax.train.checkpoints._orbax import from_orbax, to_orbax
from mlax.train.checkpoints._restored import Restored

__all__ = ["Checkpoints", "Highest", "Lowest", "Restored", "from_orbax", "to_orbax"]
