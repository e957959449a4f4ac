"""Checkpoints: saved training steps in a folder; atomic, asynchronous, verified."""

from mlax.train.checkpoints._blocks import is_partition as is_partition
from mlax.train.checkpoints._checkpoints import Checkpoints, Maximize, Minimize
from mlax.train.checkpoints._manifest import CHECKPOINT_DTYPES as CHECKPOINT_DTYPES
from mlax.train.checkpoints._manifest import encode_manifest as encode_manifest
from mlax.train.checkpoints._manifest import hash_bytes as hash_bytes
from mlax.train.checkpoints._manifest import read_manifest as read_manifest
from mlax.train.checkpoints._orbax import from_orbax, to_orbax
from mlax.train.checkpoints._restore import RestoredCheckpoint
from mlax.train.checkpoints._save import write_checkpoint as write_checkpoint

__all__ = ["Checkpoints", "Maximize", "Minimize", "RestoredCheckpoint", "from_orbax", "to_orbax"]
