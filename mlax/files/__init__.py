"""Files of arrays: read with suspicion, written so that they are there."""

from mlax.files._dtypes import NAMES
from mlax.files._durable import (
    make_folder,
    replace,
    sync_folder,
    write,
)
from mlax.files._header import Header, read_header
from mlax.files._json import is_count, parsed
from mlax.files._laid_out import LaidOut, has, laid_out, raw, storable
from mlax.files._load import load, metadata
from mlax.files._name import why_not
from mlax.files._opened import opened
from mlax.files._refused import Refused
from mlax.files._save import save
from mlax.files._space import NoSpace, room_for

__all__ = ["NoSpace", "Refused", "load", "metadata", "save"]
