"""The picture of a plan: what a device holds, by kind and by layer, beside what it has."""

import math
import os
from pathlib import Path
from typing import Any

from mlax.inspect import gib
from mlax.place._description import Description, Row, grouped

COLOURS = {"weights": "#0077BB", "slots": "#33BBEE", "gradients": "#EE7733", "activations": "#009988"}
WORKING = "#BBBBBB"


def draw(description: Description, path: str | os.PathLike[str]) -> None:
    """Two rows of bars: what each memory holds at most, and the layers, the largest first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    layers = sorted(grouped(description.rows, most=16), key=lambda row: row.total)[-16:]
    layers = [row for row in layers if row.total > layers[-1].total / 200]  # or there is nothing to be seen
    memories = list(dict.fromkeys(row.memory for row in description.rows))
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(memories) + 0.28 * len(layers)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[len(memories) + 1, len(layers) + 1])
    for place, memory in enumerate(memories):
        left = 0.0
        sizes = {kind: description.held(kind, memory) for kind in Row.KINDS}
        if memory == "device" and description.working is not None:
            sizes = {"weights": sizes["weights"], "slots": sizes["slots"], "working memory": description.working}
        for kind, size in sizes.items():
            above.barh(place, size, left=left, color=COLOURS.get(kind, WORKING), label=kind if size else None)
            left += size
        above.text(left, place, f" {gib(left)}", va="center", fontsize="small")
    above.set_yticks(range(len(memories)), [f"each {memory}" if memory == "device" else "host" for memory in memories])
    above.set_title(f"{description.name} on {description.devices} x {description.device}", fontsize="medium")
    if description.memory is not None:
        above.axvline(description.memory, color="#CC3311", linestyle="--", label=f"memory, {gib(description.memory)}")
        above.set_xlim(0, 1.15 * max(description.needed, min(description.memory, 4 * description.needed)))
    for place, row in enumerate(layers):
        left = 0.0
        for kind in Row.KINDS:
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
        axes.xaxis.set_major_formatter(lambda size, _: gib(size) if size > 0 else "0")
        axes.tick_params(axis="x", labelsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    shown: dict[str, Any] = {}
    for axes in (below, above):
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), fontsize="small", loc="outside lower center", ncols=len(shown))
    figure.savefig(Path(path), dpi=130, facecolor="white")
