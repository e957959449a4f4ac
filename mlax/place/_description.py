"""Description: bytes by layer and transfers by part, as a table and as a picture."""

import collections
import dataclasses
import math
import os
from pathlib import Path
from typing import Any, ClassVar

from mlax.inspect import Transfers, format_bytes, summarize_events


class NotEnoughMemory(MemoryError):
    """A plan or a compiled function needs more memory than a device has; nothing was allocated or run."""


@dataclasses.dataclass(frozen=True)
class LayerMemory:
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
    rows: tuple[LayerMemory, ...]
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

    def check_fits(self) -> None:
        """Raise NotEnoughMemory, with what to change, if it does not."""
        if not self.fits:
            assert self.memory is not None
            raise NotEnoughMemory(
                f"{self.name} needs {format_bytes(self.needed)} on each device, but {self.device} has "
                f"{format_bytes(self.memory)}, {format_bytes(self.needed - self.memory)} too little. {self._advice()}"
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
        shown = group_rows(self.rows)
        header = ("layer", *LayerMemory.KINDS, "in")
        lines = [(row.layer or "(model)", *_format_row(row), row.memory) for row in shown]
        for memory in dict.fromkeys(row.memory for row in self.rows):
            name = "each device" if memory == "device" else "host, for each device"
            lines.append((name, *(_format_size(self.held(kind, memory)) for kind in LayerMemory.KINDS), memory))
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        table = [
            "  ".join(word.rjust(width) if i else word.ljust(width) for i, (word, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in [header, *lines])
        ]
        words = [
            f"{self.name} on {self.devices} x {self.device}",
            "",
            *table,
            "",
            f"batch          {format_bytes(self.batch)}",
        ]
        if self.working is not None:
            words.append(
                f"working memory {format_bytes(self.working)}, as compiled: gradients, activations, gathered weights"
            )
        words.append(f"needed         {format_bytes(self.needed)} on each device; {self._verdict()}")
        words += [self.stages] * bool(self.stages)
        if self.moved is not None:
            words += ["", "moved in a step", str(_by_part(self.moved))]
        return "\n".join(words)

    def _verdict(self) -> str:
        if self.memory is None:
            return "the device does not say how much it has"
        share = f"{self.needed / self.memory:.0%} of {format_bytes(self.memory)}"
        return f"fits, {share}" if self.fits else f"DOES NOT FIT, {share}. {self._advice()}"

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw what a device holds, by kind and by layer, beside what it has, as a picture."""
        draw_description(self, path)


def group_rows(rows: tuple[LayerMemory, ...], most: int = 24) -> list[LayerMemory]:
    """The rows, or as many levels of them as a table can show."""
    depth = max((row.layer.count("/") + 1 for row in rows), default=1)
    while True:
        groups: dict[tuple[str, str], list[Any]] = collections.defaultdict(lambda: [0] * len(LayerMemory.KINDS))
        for row in rows:
            key = "/".join(row.layer.split("/")[:depth]), row.memory
            groups[key] = [a + getattr(row, kind) for a, kind in zip(groups[key], LayerMemory.KINDS, strict=True)]
        if len(groups) <= most or depth == 1:
            return [LayerMemory(*key, *sizes) for key, sizes in groups.items()]
        depth -= 1


def _by_part(moved: Transfers) -> Transfers:
    """What moves, by the first name of the layer's path."""
    return summarize_events(
        event._replace(parts=tuple((layer.split("/")[0], size) for layer, size in event.parts))
        for event in moved.events
    )


def _format_row(row: LayerMemory) -> list[str]:
    return [_format_size(getattr(row, kind)) for kind in LayerMemory.KINDS]


def _format_size(size: int) -> str:
    return format_bytes(size) if size else "-"


COLOURS = {"weights": "#0077BB", "slots": "#33BBEE", "gradients": "#EE7733", "activations": "#009988"}
WORKING = "#BBBBBB"


def draw_description(description: Description, path: str | os.PathLike[str]) -> None:
    """Two rows of bars: what each memory holds at most, and the layers, the largest first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    layers = sorted(group_rows(description.rows, most=16), key=lambda row: row.total)[-16:]
    layers = [row for row in layers if row.total > layers[-1].total / 200]  # or there is nothing to be seen
    memories = list(dict.fromkeys(row.memory for row in description.rows))
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(memories) + 0.28 * len(layers)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[len(memories) + 1, len(layers) + 1])
    for place, memory in enumerate(memories):
        left = 0.0
        sizes = {kind: description.held(kind, memory) for kind in LayerMemory.KINDS}
        if memory == "device" and description.working is not None:
            sizes = {"weights": sizes["weights"], "slots": sizes["slots"], "working memory": description.working}
        for kind, size in sizes.items():
            above.barh(place, size, left=left, color=COLOURS.get(kind, WORKING), label=kind if size else None)
            left += size
        above.text(left, place, f" {format_bytes(left)}", va="center", fontsize="small")
    above.set_yticks(range(len(memories)), [f"each {memory}" if memory == "device" else "host" for memory in memories])
    above.set_title(f"{description.name} on {description.devices} x {description.device}", fontsize="medium")
    if description.memory is not None:
        above.axvline(
            description.memory, color="#CC3311", linestyle="--", label=f"memory, {format_bytes(description.memory)}"
        )
        above.set_xlim(0, 1.15 * max(description.needed, min(description.memory, 4 * description.needed)))
    for place, row in enumerate(layers):
        left = 0.0
        for kind in LayerMemory.KINDS:
            size = getattr(row, kind)
            hatch = "//" if row.memory == "host" else None
            below.barh(place, size, left=left, color=COLOURS[kind], hatch=hatch, label=kind if size else None)
            left += size
    names = [f"{row.layer or '(model)'}{' (host)' if row.memory == 'host' else ''}" for row in layers]
    below.set_yticks(range(len(layers)), names, fontsize="small")
    below.set_title("by layer", fontsize="medium")
    for axes in (above, below):
        step = 2.0 ** math.floor(math.log2(max(axes.get_xlim()[1], 8) / 5))
        axes.xaxis.set_major_locator(MultipleLocator(step))
        axes.xaxis.set_major_formatter(lambda size, _: format_bytes(size) if size > 0 else "0")
        axes.tick_params(axis="x", labelsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    shown: dict[str, Any] = {}
    for axes in (below, above):
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), fontsize="small", loc="outside lower center", ncols=len(shown))
    figure.savefig(Path(path), dpi=130, facecolor="white")
