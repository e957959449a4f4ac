"""Writing the pieces that one process holds: which file each goes to, and what it hashes to."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from mlax.files import LaidOut, laid_out, write
from mlax.train.checkpoints._dtypes import stored
from mlax.train.checkpoints._manifest import ArrayRecord, FileRecord, PieceRecord, digest
from mlax.train.checkpoints._taken import Taken
from mlax.train.checkpoints._tiling import cut

PIECE_ENTRY = 512  # bytes that a piece takes in a manifest, about


class Planned(NamedTuple):
    """The files to be written; the arrays' records as far as they are known, by file and name of each piece."""

    files: dict[str, LaidOut]
    arrays: dict[str, ArrayRecord]

    @property
    def needed(self) -> int:
        """How many bytes that will be, with the manifest."""
        pieces = sum(len(record.pieces) for record in self.arrays.values())
        return sum(file.size for file in self.files.values()) + (pieces + len(self.arrays) + 8) * PIECE_ENTRY


def planned(arrays: Mapping[str, Taken], process: int, most: int) -> Planned:
    """Pieces to files of at most `most` bytes each, in the order of their names."""
    contents: list[dict[str, np.ndarray]] = [{}]
    records: dict[str, ArrayRecord] = {}
    room = most
    for name, array in arrays.items():
        blocks = [block for piece in array.pieces for block in cut(*piece, most)]
        pieces: list[PieceRecord] = []
        for start, block in blocks:
            if block.nbytes > room and contents[-1]:
                contents.append({})
                room = most
            label = name if block.shape == array.shape else f"{name}@{','.join(map(str, start))}"
            contents[-1][label] = stored(block)
            room -= block.nbytes
            pieces.append(PieceRecord(_file(process, len(contents)), label, start, block.shape, ""))
        records[name] = ArrayRecord(array.shape, array.dtype, array.key, tuple(pieces))
    files = {_file(process, number + 1): laid_out(content, {}) for number, content in enumerate(contents) if content}
    return Planned(files, records)


def written(plan: Planned, folder: str) -> tuple[dict[str, FileRecord], dict[str, ArrayRecord]]:
    """Write the files into the folder, synced, and give the records with all hashes."""
    files: dict[str, FileRecord] = {}
    hashes: dict[tuple[str, str], str] = {}
    for name, file in plan.files.items():
        whole = xxhash.xxh3_128(file.header)
        for label, view in file.arrays.items():
            hashes[name, label] = digest(view)
            whole.update(view)
        write(os.path.join(folder, name), [file.header, *file.arrays.values()])
        files[name] = FileRecord(file.size, digest(file.header), whole.hexdigest())
    arrays = {
        name: record._replace(
            pieces=tuple(piece._replace(xxh3_128=hashes[piece.file, piece.name]) for piece in record.pieces)
        )
        for name, record in plan.arrays.items()
    }
    return files, arrays


def _file(process: int, number: int) -> str:
    return f"process-{process:05d}-{number:05d}.safetensors"
