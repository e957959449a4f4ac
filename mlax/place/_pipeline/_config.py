"""PipelineConfig: how a plan pipelines the Repeats of a model."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

from mlax.core import Documented, Layer, Repeat, find_layers, frozen, map_layers, match_paths, stacked_axes
from mlax.place._pipeline._layer import Pipelined, bubble_fraction
from mlax.place._pipeline._one_f_one_b import one_forward_one_backward

Schedule = Literal["gpipe", "1f1b"]


@frozen
class PipelineConfig(metaclass=Documented):
    """How a plan pipelines the Repeats of a model: the number of stages and of microbatches, and the schedule.

    "gpipe" runs all forward passes and then all backward passes; "1f1b" runs the backward pass of each microbatch as
    soon as it can, so that only about as many are in flight as there are stages. Both have the same `bubble`.
    """

    stages: int  # of devices
    microbatches: int  # of a batch
    schedule: Schedule = "1f1b"  # "gpipe" or "1f1b"
    axis: str = "stage"  # of the mesh
    at: tuple[str, ...] | None = None  # paths of the Repeats, or patterns; None: all of them

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"PipelineConfig: schedule is {self.schedule!r}, but must be one of {get_args(Schedule)}.")

    @property
    def bubble(self) -> float:
        """The fraction of its time for which a stage is idle, while the pipeline fills and drains."""
        return bubble_fraction(self.stages, self.microbatches)

    @property
    def backward(self) -> Callable[..., Any] | None:
        """The function that computes values and gradients over microbatches; None: JAX derives the backward pass."""
        return functools.partial(one_forward_one_backward, axis=self.axis) if self.schedule == "1f1b" else None

    def apply(self, model: Layer) -> Layer:
        """The model with its Repeats pipelined."""
        return pipeline_repeats(model, self.stages, microbatches=self.microbatches, axis=self.axis, at=self.at)

    def check_mesh(self, mesh: dict[str, int]) -> None:
        """Raise for two further mesh axes under 1F1B: XLA aborts on some of these programs."""
        others = [name for name, size in mesh.items() if name != self.axis and size > 1]
        if self.schedule == "1f1b" and len(others) > 1:
            raise ValueError(
                f"the pipeline schedule '1f1b' supports one further mesh axis, but there are {', '.join(others)}, and "
                "XLA aborts on some of these programs; pass schedule='gpipe'."
            )

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.microbatches} microbatches ({self.schedule}): {self.bubble:.0%} bubble"


def pipeline_repeats(
    model: Layer, stages: int, *, microbatches: int, axis: str = "stage", at: tuple[str, ...] | None = None
) -> Any:
    """A copy of a model in which each `Repeat`, or each at the paths or patterns `at`, is `Pipelined`.

    Variables are the same. Of nested Repeats the outermost is pipelined; one inside a stack of experts is not.
    """
    model = map_layers(model, "", lambda path, layer: layer.layer if isinstance(layer, Pipelined) else layer)
    outer = [each for each in find_layers(model, Repeat) if not stacked_axes(each[0])]
    if not outer:
        raise ValueError("pipeline_repeats: the model has no Repeat to pipeline; put its equal layers into a Repeat.")
    paths = [path for path, _ in outer] if at is None else match_paths(list(at), [path for path, _ in outer])

    def wrap(path: str, layer: Layer) -> Layer:
        is_chosen = (path, layer) in outer and path in paths
        return Pipelined(layer, stages, microbatches, axis) if is_chosen else layer

    return map_layers(model, "", wrap)


def find_pipelines(model: Layer) -> dict[str, Pipelined]:
    """The pipelined parts of a model by path; the leading axis of their variables belongs on their mesh axis."""
    return dict(find_layers(model, Pipelined))
