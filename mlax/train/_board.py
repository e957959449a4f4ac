"""Board: the same metrics for TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Board:
    """Writes records as scalars into a folder that `tensorboard --logdir` shows. Without a folder, nothing.

    `start` is the step that training goes on from: what was written of later steps, which come again, is hidden.
    """

    def __init__(self, folder: Path | None, start: int | None = None):
        self._writer: Any = None
        if folder is not None:
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise ImportError("tensorboard=True needs tensorboardX; pip install 'mlax[train]'.") from None
            # Points from `purge_step` on are hidden, and that of `start` itself does not come again. A file is named by
            # the second in which it was made and written over by one of the same name: hence the step in the name.
            purged = None if start is None else start + 1
            self._writer = SummaryWriter(str(folder), purge_step=purged, filename_suffix=f".{start or 0:012}")

    def add(self, records: Sequence[Mapping[str, Any]], prefix: str = "train") -> None:
        """Add each number of each record."""
        if self._writer is None:
            return
        for record in records:
            for name, value in record.items():
                if name not in ("step", "seconds") and isinstance(value, int | float):
                    self._writer.add_scalar(f"{prefix}/{name}", value, record["step"])

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.close()
