"""The members of a zip archive, as ranges of bytes that are validated in full before use.

https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT. Stricter than `zipfile`: members that overlap,
duplicate names, comments at the end, bytes in front, and headers that disagree are errors, and the number of members is
bounded before any of them is read.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from mlax.files._io import InvalidFile

MAX_MEMBERS, MAX_DIRECTORY_BYTES = 100_000, 1 << 25

_END = struct.Struct("<4s4H2LH")  # of the archive
_LOCATOR = struct.Struct("<4sLQL")  # of the zip64 end
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")  # of the central directory
_LOCAL = struct.Struct("<4s5H3L2H")  # in front of the data of each member
_ENCRYPTED = 1 | 1 << 6 | 1 << 13
_FULL32 = 0xFFFFFFFF  # the field is in the zip64 extra instead


class Member(NamedTuple):
    """One member: its data are bytes `start` to `stop` of the archive."""

    start: int
    stop: int
    is_stored: bool  # neither compressed nor encrypted


class _Directory(NamedTuple):
    start: int
    stop: int
    count: int


def read_members(data: memoryview, path: str) -> dict[str, Member]:
    """The members of an archive by name. `data` is the whole file, memory-mapped; `path` is for errors."""
    directory = _find_directory(data, path)
    members: dict[str, Member] = {}
    spans: list[tuple[int, int]] = []
    for name, offset, size, is_stored in _read_entries(data, directory, path):
        if name in members:
            raise InvalidFile(f"{path}: it contains {name[:100]!r} twice.")
        start = _data_start(data, name, offset, path)
        members[name] = Member(start, start + size, is_stored)
        spans.append((offset, start + size))
    spans.sort()
    stops = [0, *(stop for _, stop in spans)]
    starts = [*(start for start, _ in spans), directory.start]
    if any(stop > start for stop, start in zip(stops, starts, strict=True)):
        raise InvalidFile(f"{path}: members of the zip archive overlap, or one is longer than the file.")
    return members


def _find_directory(data: memoryview, path: str) -> _Directory:
    at = len(data) - _END.size
    *_, count, size, start, comment = _unpack(_END, b"PK\5\6", data, at, path)
    if at >= _LOCATOR.size and data[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b"PK\6\7":
        at -= _LOCATOR.size + _END64.size
        *_, count, size, start = _unpack(_END64, b"PK\6\6", data, at, path)
    if start + size != at or comment:
        raise InvalidFile(f"{path}: the directory of its zip archive is not at its end; it is truncated or damaged.")
    if count > MAX_MEMBERS or size > MAX_DIRECTORY_BYTES:
        raise InvalidFile(f"{path}: its zip archive has {count:,} members, and at most {MAX_MEMBERS:,} are allowed.")
    return _Directory(start, at, count)


def _read_entries(data: memoryview, directory: _Directory, path: str) -> Iterator[tuple[str, int, int, bool]]:
    """Name, offset, size in the archive and whether it is stored, of each member, by the central directory."""
    at = directory.start
    for _ in range(directory.count):
        fields = _unpack(_ENTRY, b"PK\1\2", data, at, path)
        flags, method, packed, size, names, extras, comments, offset = *fields[3:5], *fields[8:13], fields[-1]
        name_at, extra_at = at + _ENTRY.size, at + _ENTRY.size + names
        at = extra_at + extras + comments
        name = _decode(data[name_at:extra_at], path)
        wide = _zip64_fields(data[extra_at : extra_at + extras])
        size, packed, offset = (wide.pop(0) if x == _FULL32 and wide else x for x in (size, packed, offset))
        yield name, offset, packed, not method and packed == size and not flags & _ENCRYPTED
    if at != directory.stop:
        raise InvalidFile(f"{path}: the directory of its zip archive does not have {directory.count:,} members.")


def _zip64_fields(extras: memoryview) -> list[int]:
    at = 0
    while at + 4 <= len(extras):
        kind, length = struct.unpack_from("<2H", extras, at)
        if kind == 1:
            fields = extras[at + 4 : at + 4 + length]
            return list(struct.unpack_from(f"<{len(fields) // 8}Q", fields))
        at += 4 + length
    return []


def _data_start(data: memoryview, name: str, offset: int, path: str) -> int:
    """Where the data of a member start, behind its local header."""
    *_, names, extras = _unpack(_LOCAL, b"PK\3\4", data, offset, path)
    at = offset + _LOCAL.size
    if data[at : at + names] != name.encode():
        raise InvalidFile(f"{path}: its zip archive has another name for {name[:100]!r} in front of the data.")
    return at + names + extras


def _unpack(form: struct.Struct, signature: bytes, data: memoryview, at: int, path: str) -> tuple[Any, ...]:
    if not 0 <= at <= len(data) - form.size or data[at : at + 4] != signature:
        raise InvalidFile(f"{path}: its zip archive is truncated or damaged: no {signature!r} at byte {at:,}.")
    return form.unpack_from(data, at)


def _decode(name: memoryview, path: str) -> str:
    try:
        return str(name, "utf-8")
    except UnicodeDecodeError:
        raise InvalidFile(f"{path}: the name of a member of the zip archive is not UTF-8.") from None
