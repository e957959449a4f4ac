"""Stages: how a plan pipelines the Repeats of a model."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

from mlax.core import Layer, Repeat, find_layers, frozen, map_layers, match_paths
from mlax.place._pipeline._layer import Pipelined, bubble_fraction
from mlax.place._pipeline._one_f_one_b import one_forward_one_backward

Schedule = Literal["gpipe", "1f1b"]


@frozen
class Stages:
    """How many stages there are, how many parts of a batch follow each other through them, and in which order.

    "gpipe" takes all parts forward and then all of them backward; "1f1b" takes each part backward as soon as it can, so
    that only as many are kept as there are stages, about. Each waits `bubble` of the time.
    """

    number: int
    microbatches: int
    schedule: Schedule = "1f1b"
    axis: str = "stage"
    at: tuple[str, ...] | None = None  # paths of the parts; None: all that are repeated

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"Stages: schedule is {self.schedule!r}, but must be one of {get_args(Schedule)}.")

    @property
    def bubble(self) -> float:
        """The share of its time that a stage waits, while the pipeline fills and drains."""
        return bubble_fraction(self.number, self.microbatches)

    @property
    def backward(self) -> Callable[..., Any] | None:
        """What computes values and gradients over the parts of a batch; None: whatever JAX derives."""
        return functools.partial(one_forward_one_backward, axis=self.axis) if self.schedule == "1f1b" else None

    def pipeline(self, model: Layer) -> Layer:
        """The model with its repeated parts cut."""
        return pipeline_repeats(model, self.number, microbatches=self.microbatches, axis=self.axis, at=self.at)

    def check(self, mesh: dict[str, int]) -> None:
        """Refuse a mesh over which XLA aborts, or would: one with two other axes, under the schedule 1f1b."""
        others = [name for name, size in mesh.items() if name != self.axis and size > 1]
        if self.schedule == "1f1b" and len(others) > 1:
            raise ValueError(
                f"a pipeline of the schedule '1f1b' goes with one more mesh axis, but there are {', '.join(others)}: "
                "XLA aborts over some such programs; take schedule='gpipe'."
            )

    def __str__(self) -> str:
        share = f"each stage waits {self.bubble:.0%} of the time"
        return f"{self.number} stages, {self.microbatches} parts of a batch ({self.schedule}): {share}"


def pipeline_repeats(
    model: Layer, stages: int, *, microbatches: int, axis: str = "stage", at: tuple[str, ...] | None = None
) -> Any:
    """A copy of a model in which each `Repeat` is `Pipelined`, or those at the paths, or patterns, `at`.

    No variable moves. A `Repeat` within another stays as it is: the outer one is cut.
    """
    model = map_layers(model, "", lambda where, layer: layer.layer if isinstance(layer, Pipelined) else layer)
    repeats = find_layers(model, Repeat)
    if not repeats:
        raise ValueError("pipeline_repeats: the model has no Repeat, so that nothing can be cut in stages.")
    within = {inner for where, layer in repeats for inner in find_layers(layer.layer, Repeat, where)}
    outer = [each for each in repeats if each not in within]
    chosen = [where for where, _ in outer] if at is None else match_paths(list(at), [where for where, _ in outer])

    def cut(where: str, layer: Layer) -> Layer:
        return Pipelined(layer, stages, microbatches, axis) if (where, layer) in outer and where in chosen else layer

    return map_layers(model, "", cut)


def find_pipelines(model: Layer) -> dict[str, Pipelined]:
    """The pipelined parts of a model by path; the leading axis of each of their variables belongs on their axis."""
    return dict(find_layers(model, Pipelined))
