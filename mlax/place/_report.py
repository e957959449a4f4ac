"""Description: the memory and the transfers of a step under a plan, as a table and as a plot."""

import collections
import dataclasses
import math
import os
from pathlib import Path
from typing import Any, ClassVar

from mlax.core import Documented
from mlax.inspect import Transfers, format_bytes, summarize_events


class NotEnoughMemory(MemoryError, metaclass=Documented):
    """A plan or a compiled function needs more memory than a device has; nothing was allocated or run."""


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """The bytes of one layer on each device, or in host memory for each device."""

    KINDS: ClassVar[tuple[str, ...]] = ("weights", "slots", "gradients", "activations")

    layer: str
    memory: str
    weights: int
    slots: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """The bytes of all kinds."""
        return self.weights + self.slots + self.gradients + self.activations


@dataclasses.dataclass(frozen=True, repr=False)
class Description(metaclass=Documented):
    """The memory of each device and the transfers of a step; `print` it, or `plot` it.

    All devices need the same number of bytes. `working` is the size of the compiled step's temporary buffers:
    gradients, activations and all-gathered weights while they are in use. The rows assume that all gradients and
    activations exist at once. A plan that shards more than the examples of a batch (tensor, sequence or pipeline
    parallelism) leaves it to XLA how activations are sharded: they are not `activations_known`, and without `working`
    `needed` is a lower bound.
    """

    name: str  # of the plan
    devices: int  # how many
    rows: tuple[LayerMemory, ...]  # by layer and memory
    batch: int  # bytes of a batch
    working: int | None  # bytes of temporary buffers; None: not compiled
    transfers: Transfers | None  # in a step; None: not compiled
    memory: int | None  # bytes that a device has; None: unknown
    device: str  # its kind
    pipeline: str = ""  # its stages, microbatches and bubble, in a sentence
    activations_known: bool = True  # or left to XLA
    cache: int = 0  # bytes of the KV caches on each device, which the weights include

    def bytes_of(self, kind: str, memory: str = "device") -> int:
        """The bytes of 'weights', 'slots', 'gradients' or 'activations' on each device, or in host memory for it."""
        return sum(getattr(row, kind) for row in self.rows if row.memory == memory)

    @property
    def arguments(self) -> int:
        """The bytes of the weights, slots and batch on each device."""
        return self.bytes_of("weights") + self.bytes_of("slots") + self.batch

    @property
    def needed(self) -> int:
        """The bytes that each device needs at once; at least these if `is_lower_bound`."""
        working = self.bytes_of("gradients") + self.bytes_of("activations") if self.working is None else self.working
        return self.arguments + working

    @property
    def is_lower_bound(self) -> bool:
        """Whether activations are missing from `needed`, since they are unknown until the step is compiled."""
        return self.working is None and not self.activations_known

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory; True if its memory is unknown, or if a lower bound fits."""
        return self.memory is None or self.needed <= self.memory

    def check_fits(self) -> None:
        """Raise NotEnoughMemory, with what to change, if a device has too little memory."""
        if not self.fits:
            raise NotEnoughMemory(self.shortage())

    def shortage(self) -> str:
        """How much memory each device lacks, and what to change, in two sentences."""
        memory = self.memory or 0
        return (
            f"{self.name} needs {self._at_least()}{format_bytes(self.needed)} on each device, but {self.device} has "
            f"{format_bytes(memory)}, {format_bytes(self.needed - memory)} too little. {self._advice()}"
        )

    def _advice(self) -> str:
        """What to change about the kind that needs the most memory."""
        working = self.needed - self.arguments
        sizes = {"weights": self.bytes_of("weights"), "slots": self.bytes_of("slots"), "working": working}
        advice = {
            "weights": "Most of it is weights: shard them (place.fsdp, place.tensor) or stream them (place.Stream).",
            "slots": "Most of it is optimizer slots: shard them (place.zero, place.fsdp), offload them to host memory "
            "(slots=[('**', place.host)]), or use an optimizer with fewer slots (optim.Lion, optim.Adafactor).",
            "working": "Most of it is gradients and activations: use smaller batches, accumulate gradients "
            "(accumulate=4), rematerialize (Repeat(mode='remat')), compute in bfloat16, or shard the batch or the "
            "sequence over more devices.",
        }
        return advice[max(sizes, key=lambda kind: sizes[kind])]

    def __str__(self) -> str:
        lines = [
            f"{self.name} on {self.devices} x {self.device}",
            "",
            *self._table(),
            "",
            f"batch          {format_bytes(self.batch)}",
        ]
        if self.cache:
            lines.append(f"KV cache       {format_bytes(self.cache)}, among the weights")
        if self.working is not None:
            lines.append(f"working memory {format_bytes(self.working)}: gradients, activations, all-gathered weights")
        lines.append(f"needed         {self._at_least()}{format_bytes(self.needed)} on each device; {self._verdict()}")
        lines += [self.pipeline] * bool(self.pipeline)
        if self.transfers is not None:
            lines += ["", "transfers in a step", str(_group_by_part(self.transfers))]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)  # so that it need not be printed in a notebook

    def _table(self) -> list[str]:
        cells = [("layer", *LayerMemory.KINDS, "in")]
        cells += [(row.layer or "(model)", *_format_row(row), row.memory) for row in group_rows(self.rows)]
        for memory in dict.fromkeys(row.memory for row in self.rows):
            name = "each device" if memory == "device" else "host, for each device"
            sizes = [_format_size(self.bytes_of(kind, memory)) for kind in LayerMemory.KINDS]
            if memory == "device" and self.bytes_of("gradients") and not self.activations_known:
                sizes[-1] = "unknown"
            cells.append((name, *sizes, memory))
        layer_width, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
        return ["  ".join([layer.ljust(layer_width), *map(str.rjust, sizes, widths)]) for layer, *sizes in cells]

    def _at_least(self) -> str:
        return "at least " * self.is_lower_bound

    def _verdict(self) -> str:
        if self.memory is None:
            return "the device does not report its memory"
        share = f"{self.needed / self.memory:.0%} of {format_bytes(self.memory)}"
        if self.fits and self.is_lower_bound:
            return f"{share}; the activations of this plan are unknown, pass compile=True to know whether it fits"
        return f"fits, {share}" if self.fits else f"DOES NOT FIT, {share}. {self._advice()}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the memory that a device needs, by kind and by layer, and the memory that it has, to an image file."""
        _plot(self, path)


def group_rows(rows: tuple[LayerMemory, ...], limit: int = 24) -> list[LayerMemory]:
    """The rows summed by the longest prefix of their paths that gives at most `limit` rows."""
    depth = max((row.layer.count("/") + 1 for row in rows), default=1)
    while True:
        groups: dict[tuple[str, str], list[Any]] = collections.defaultdict(lambda: [0] * len(LayerMemory.KINDS))
        for row in rows:
            key = "/".join(row.layer.split("/")[:depth]), row.memory
            groups[key] = [a + getattr(row, kind) for a, kind in zip(groups[key], LayerMemory.KINDS, strict=True)]
        if len(groups) <= limit or depth == 1:
            return [LayerMemory(*key, *sizes) for key, sizes in groups.items()]
        depth -= 1


def _group_by_part(transfers: Transfers) -> Transfers:
    """The transfers by the first name of the layer's path."""
    return summarize_events(
        event._replace(bytes_by_layer=tuple((layer.split("/")[0], size) for layer, size in event.bytes_by_layer))
        for event in transfers.events
    )


def _format_row(row: LayerMemory) -> list[str]:
    return [_format_size(getattr(row, kind)) for kind in LayerMemory.KINDS]


def _format_size(size: int) -> str:
    return format_bytes(size) if size else "-"


COLOURS = {"weights": "#0077BB", "slots": "#33BBEE", "gradients": "#EE7733", "activations": "#009988"}
WORKING = "#BBBBBB"


def _plot(description: Description, path: str | os.PathLike[str]) -> None:
    """Bars of what each memory needs, above bars of the layers, the largest first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    layers = sorted(group_rows(description.rows, limit=16), key=lambda row: row.total)[-16:]
    layers = [row for row in layers if row.total > layers[-1].total / 200]  # smaller bars are not visible
    memories = list(dict.fromkeys(row.memory for row in description.rows))
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(memories) + 0.28 * len(layers)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[len(memories) + 1, len(layers) + 1])
    for y, memory in enumerate(memories):
        left = 0.0
        sizes = {kind: description.bytes_of(kind, memory) for kind in LayerMemory.KINDS}
        if memory == "device" and description.working is not None:
            sizes = {"weights": sizes["weights"], "slots": sizes["slots"], "working memory": description.working}
        for kind, size in sizes.items():
            above.barh(y, size, left=left, color=COLOURS.get(kind, WORKING), label=kind if size else None)
            left += size
        above.text(left, y, f" {format_bytes(left)}", va="center", fontsize="small")
    above.set_yticks(range(len(memories)), [f"each {memory}" if memory == "device" else "host" for memory in memories])
    above.set_title(f"{description.name} on {description.devices} x {description.device}", fontsize="medium")
    if description.memory is not None:
        above.axvline(
            description.memory, color="#CC3311", linestyle="--", label=f"memory, {format_bytes(description.memory)}"
        )
        above.set_xlim(0, 1.15 * max(description.needed, min(description.memory, 4 * description.needed)))
    for y, row in enumerate(layers):
        left = 0.0
        for kind in LayerMemory.KINDS:
            size = getattr(row, kind)
            hatch = "//" if row.memory == "host" else None
            below.barh(y, size, left=left, color=COLOURS[kind], hatch=hatch, label=kind if size else None)
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
