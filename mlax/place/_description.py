"""Description: bytes by layer and what moves, as a table and as a picture."""

import collections
import dataclasses
import os
from typing import Any, ClassVar

from mlax.inspect import Transfers, collected, gib


class DoesNotFit(MemoryError):
    """A plan needs more memory than a device has; nothing was allocated."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The bytes of one layer on one device, or of its share in the host's memory."""

    KINDS: ClassVar[tuple[str, ...]] = ("weights", "slots", "gradients", "activations")

    layer: str
    memory: str
    weights: int
    slots: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.slots + self.gradients + self.activations


@dataclasses.dataclass(frozen=True)
class Description:
    """What each device would hold and what would move in a step; `print` it, or `draw` it.

    All devices hold the same number of bytes. `working` is what XLA needs besides arguments, which is gradients,
    activations and what it gathers for a moment, as compiled; the sum of `rows` is what there would be if everything
    was there at once.
    """

    name: str
    devices: int
    rows: tuple[Row, ...]
    batch: int
    working: int | None
    moved: Transfers | None
    memory: int | None
    device: str
    stages: str = ""  # of a pipeline, in words

    def held(self, kind: str, memory: str = "device") -> int:
        """The bytes of one kind, 'weights', 'slots', 'gradients' or 'activations', on each device."""
        return sum(getattr(row, kind) for row in self.rows if row.memory == memory)

    @property
    def arguments(self) -> int:
        """What stays on each device from step to step, and the batch."""
        return self.held("weights") + self.held("slots") + self.batch

    @property
    def needed(self) -> int:
        """What each device must have at once."""
        working = self.held("gradients") + self.held("activations") if self.working is None else self.working
        return self.arguments + working

    @property
    def fits(self) -> bool:
        """Whether the memory of a device is enough, as far as one knows."""
        return self.memory is None or self.needed <= self.memory

    def refuse_unless_fits(self) -> None:
        """Raise DoesNotFit, with what to change, if it does not."""
        if not self.fits:
            assert self.memory is not None
            raise DoesNotFit(
                f"{self.name} needs {gib(self.needed)} on each device, but {self.device} has {gib(self.memory)}, "
                f"{gib(self.needed - self.memory)} too little. {self._advice()}"
            )

    def _advice(self) -> str:
        """What to change, by what takes the most."""
        working = self.needed - self.arguments
        sizes = {"weights": self.held("weights"), "slots": self.held("slots"), "working": working}
        advice = {
            "weights": "Most of it is weights: split them (place.fsdp, place.tensor) or stream them (place.Stream).",
            "slots": "Most of it is optimizer slots: split them (place.zero, place.fsdp), keep them in host "
            "memory (slots=[('**', place.host)]), or take an optimizer with fewer (optim.Lion, optim.Adafactor).",
            "working": "Most of it is gradients and activations: take smaller batches, or the same in parts "
            "(accumulate=4), recompute (Repeat(mode='remat')), compute in bfloat16, or split the batch or the sequence "
            "over more devices.",
        }
        return advice[max(sizes, key=lambda kind: sizes[kind])]

    def __str__(self) -> str:
        shown = grouped(self.rows)
        header = ("layer", *Row.KINDS, "in")
        lines = [(row.layer or "(model)", *_sizes(row), row.memory) for row in shown]
        for memory in dict.fromkeys(row.memory for row in self.rows):
            name = "each device" if memory == "device" else "host, for each device"
            lines.append((name, *(_size(self.held(kind, memory)) for kind in Row.KINDS), memory))
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        table = [
            "  ".join(word.rjust(width) if i else word.ljust(width) for i, (word, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in [header, *lines])
        ]
        words = [f"{self.name} on {self.devices} x {self.device}", "", *table, "", f"batch          {gib(self.batch)}"]
        if self.working is not None:
            words.append(f"working memory {gib(self.working)}, as compiled: gradients, activations, gathered weights")
        words.append(f"needed         {gib(self.needed)} on each device; {self._verdict()}")
        words += [self.stages] * bool(self.stages)
        if self.moved is not None:
            words += ["", "moved in a step", str(_by_part(self.moved))]
        return "\n".join(words)

    def _verdict(self) -> str:
        if self.memory is None:
            return "the device does not say how much it has"
        share = f"{self.needed / self.memory:.0%} of {gib(self.memory)}"
        return f"fits, {share}" if self.fits else f"DOES NOT FIT, {share}. {self._advice()}"

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw what a device holds, by kind and by layer, beside what it has, as a picture."""
        from mlax.place._picture import draw

        draw(self, path)


def grouped(rows: tuple[Row, ...], most: int = 24) -> list[Row]:
    """The rows, or as many levels of them as a table can show."""
    depth = max((row.layer.count("/") + 1 for row in rows), default=1)
    while True:
        groups: dict[tuple[str, str], list[Any]] = collections.defaultdict(lambda: [0] * len(Row.KINDS))
        for row in rows:
            key = "/".join(row.layer.split("/")[:depth]), row.memory
            groups[key] = [a + getattr(row, kind) for a, kind in zip(groups[key], Row.KINDS, strict=True)]
        if len(groups) <= most or depth == 1:
            return [Row(*key, *sizes) for key, sizes in groups.items()]
        depth -= 1


def _by_part(moved: Transfers) -> Transfers:
    """What moves, by the first name of the layer's path."""
    return collected(
        event._replace(parts=tuple((layer.split("/")[0], size) for layer, size in event.parts))
        for event in moved.events
    )


def _sizes(row: Row) -> list[str]:
    return [_size(getattr(row, kind)) for kind in Row.KINDS]


def _size(size: int) -> str:
    return gib(size) if size else "-"
