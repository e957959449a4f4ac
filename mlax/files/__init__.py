"""Pytrees of arrays in safetensors files, validated when read and written crash-safely; PyTorch state dicts."""

from mlax.core import name_types as name_types
from mlax.files._io import NO_LOCKS_ERRNOS as NO_LOCKS_ERRNOS
from mlax.files._io import InvalidFile, NotEnoughSpace
from mlax.files._io import atomic_write as atomic_write
from mlax.files._io import check_space as check_space
from mlax.files._io import free_disk_bytes as free_disk_bytes
from mlax.files._io import fsync_folder as fsync_folder
from mlax.files._io import is_count as is_count
from mlax.files._io import lock_file as lock_file
from mlax.files._io import make_folder as make_folder
from mlax.files._io import open_regular as open_regular
from mlax.files._io import parse_json as parse_json
from mlax.files._io import remove_unfinished as remove_unfinished
from mlax.files._io import require_space as require_space
from mlax.files._io import safe_open as safe_open
from mlax.files._io import translate_no_space as translate_no_space
from mlax.files._io import unlock_file as unlock_file
from mlax.files._io import write_synced as write_synced
from mlax.files._load import load, metadata
from mlax.files._load import release_pages as release_pages
from mlax.files._safetensors import MAX_AXES as MAX_AXES
from mlax.files._safetensors import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from mlax.files._safetensors import MAX_NAME_LENGTH as MAX_NAME_LENGTH
from mlax.files._safetensors import SAFETENSORS_DTYPE_NAMES as SAFETENSORS_DTYPE_NAMES
from mlax.files._safetensors import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES
from mlax.files._safetensors import Header as Header
from mlax.files._safetensors import SerializedFile as SerializedFile
from mlax.files._safetensors import byte_view as byte_view
from mlax.files._safetensors import is_storable as is_storable
from mlax.files._safetensors import name_error as name_error
from mlax.files._safetensors import read_header as read_header
from mlax.files._safetensors import serialize as serialize
from mlax.files._safetensors import to_file_layout as to_file_layout
from mlax.files._save import LazyArray as LazyArray
from mlax.files._save import save
from mlax.files._save import save_lazily as save_lazily
from mlax.files._torch import load_torch

__all__ = ["InvalidFile", "NotEnoughSpace", "load", "load_torch", "metadata", "save"]

name_types(globals())
