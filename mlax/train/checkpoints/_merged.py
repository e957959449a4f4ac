"""The parts that processes have written, as one step."""

from collections.abc import Sequence

from mlax.files import Refused
from mlax.train.checkpoints._manifest import ArrayRecord, Manifest


def merged(parts: Sequence[Manifest]) -> tuple[dict[str, str], Manifest]:
    """New names for the files, by their old ones; and the manifest of all."""
    files = {name: record for part in parts for name, record in part.files.items()}
    order = sorted(files)
    names = {old: f"arrays-{at + 1:05d}-of-{len(order):05d}.safetensors" for at, old in enumerate(order)}
    arrays: dict[str, ArrayRecord] = {}
    for index, part in enumerate(parts):
        if part.save != parts[0].save or part.arrays.keys() != parts[0].arrays.keys():
            raise Refused(f"Process {index} saves other arrays than process 0; save one and the same tree in all.")
        for name, record in part.arrays.items():
            before = arrays.get(name, record._replace(pieces=()))
            if before[:3] != record[:3]:
                raise Refused(f"{name!r} is {record[:2]} in process {index} but {before[:2]} in another.")
            moved = tuple(piece._replace(file=names[piece.file]) for piece in record.pieces)
            arrays[name] = before._replace(pieces=before.pieces + moved)
    return names, parts[0]._replace(files={names[old]: files[old] for old in order}, arrays=arrays)
