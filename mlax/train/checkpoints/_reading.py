"""Reading a step: no byte reaches the caller before it hashes to what the manifest says."""

import os
from typing import Any

import numpy as np

from mlax.files import Header, Refused, opened, raw, read_header
from mlax.train.checkpoints._dtypes import BY_NAME, stored_shape
from mlax.train.checkpoints._manifest import ArrayRecord, PieceRecord, digest
from mlax.train.checkpoints._saving import read_manifest
from mlax.train.checkpoints._step_folders import MANIFEST, StepFolder
from mlax.train.checkpoints._tiling import common


class Reading:
    """A step on the disk, opened: its manifest is right, and stands in the folder that it belongs to."""

    def __init__(self, folder: StepFolder):
        self.path = folder.path
        self.manifest = read_manifest(os.path.join(folder.path, MANIFEST))
        if self.manifest.step != folder.step:
            raise Refused(f"{folder.path}: its manifest is that of step {self.manifest.step}; folders were swapped.")
        self._headers: dict[str, Header] = {}
        self._held: dict[PieceRecord, np.ndarray] = {}  # of the array that is being read

    def whole(self, name: str) -> np.ndarray:
        """All of an array."""
        return self.part(name, ())

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A block of an array: in slices of one step, as JAX asks for the part of one device."""
        record = self.manifest.arrays[name]
        full = index + (slice(None),) * (len(record.shape) - len(index))
        spans = [one.indices(length) for one, length in zip(full, record.shape, strict=True)]
        start, shape = tuple(span[0] for span in spans), tuple(max(0, span[1] - span[0]) for span in spans)
        self._held = {piece: array for piece, array in self._held.items() if piece in record.pieces}
        for piece in record.pieces:
            if (piece.start, piece.shape) == (start, shape):
                return self._piece(name, record, piece)
        block = np.empty(shape, BY_NAME[record.dtype])
        for piece in record.pieces:
            if both := common((start, shape), (piece.start, piece.shape)):
                block[both[0]] = self._piece(name, record, piece)[both[1]]
        return block

    def _piece(self, name: str, record: ArrayRecord, piece: PieceRecord) -> np.ndarray:
        if piece not in self._held:
            try:
                self._held[piece] = self._read(name, record, piece)
            except OSError as failure:
                words = f"{os.path.join(self.path, piece.file)}: it cannot be read ({failure.strerror})"
                raise Refused(f"{words}; it holds {name!r}.") from None
        return self._held[piece]

    def _read(self, name: str, record: ArrayRecord, piece: PieceRecord) -> np.ndarray:
        path, wanted = os.path.join(self.path, piece.file), self.manifest.files[piece.file]
        with opened(path) as (file, size):
            if size != wanted.size:
                raise Refused(f"{path}: it has {size:,} bytes and should have {wanted.size:,}; it holds {name!r}.")
            if piece.file not in self._headers:
                header = read_header(file, size, path)
                if digest(header.raw) != wanted.header:
                    raise Refused(f"{path}: its header is damaged, or another file's; it holds {name!r}.")
                self._headers[piece.file] = header
            entry: Any = self._headers[piece.file].entries.get(piece.name)
            dtype = BY_NAME[record.dtype]
            if entry is None or entry.shape != stored_shape(piece.shape, dtype) or entry.dtype not in (dtype, np.uint8):
                raise Refused(f"{path}: it does not hold {piece.name!r} as the manifest says.")
            block = np.empty(piece.shape, dtype)
            file.seek(entry.start)
            read = file.readinto(raw(block)) if block.size else 0  # pyright: ignore[reportAttributeAccessIssue]
            if read != block.nbytes or digest(raw(block)) != piece.xxh3_128:
                raise Refused(f"{path}: the array {name!r} is damaged: its hash does not match what the manifest says.")
        return block
