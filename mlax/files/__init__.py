"""Files of arrays: read with suspicion, written so that they are there."""

from mlax.files._load import load, metadata
from mlax.files._refused import Refused
from mlax.files._save import save
from mlax.files._space import NoSpace

__all__ = ["NoSpace", "Refused", "load", "metadata", "save"]
