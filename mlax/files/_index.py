"""An index: which of several files holds which array."""

import os

from mlax.files._header import MOST_BYTES
from mlax.files._json import parsed
from mlax.files._name import why_not
from mlax.files._opened import opened
from mlax.files._refused import Refused


def read_index(path: str, within: str | None) -> dict[str, str]:
    """The file of each array, a plain name in the folder of the index."""
    with opened(path, within) as (file, size):
        if size > MOST_BYTES:
            raise Refused(f"{path}: an index of {size:,} bytes is refused; {MOST_BYTES:,} are allowed.")
        words = parsed(file.read(size), path, depth=8)
    places = words.get("weight_map")
    if not isinstance(places, dict):
        raise Refused(f"{path}: it has no weight_map, so it is no index of safetensors files.")
    for name, place in places.items():
        if why := why_not(name):
            raise Refused(f"{path}: {name[:100]!r} is no name for an array; {why}.")
        if not is_plain(place) or not place.endswith(".safetensors"):
            raise Refused(f"{path}: {name!r} is said to be in {str(place)[:100]!r}; a file beside the index is wanted.")
    return places


def is_plain(place: object) -> bool:
    """Whether this is the name of a file in the same folder, and no way to another."""
    return isinstance(place, str) and os.path.basename(place) == place and "\\" not in place and not why_not(place)
