"""in_stages: a model whose repeated parts are pipelined."""

from typing import Any

from mlax.core import Layer, Repeat, find_layers, map_layers, match_paths
from mlax.place._pipelined import Pipelined


def in_stages(
    model: Layer, stages: int, *, microbatches: int, axis: str = "stage", at: tuple[str, ...] | None = None
) -> Any:
    """A copy of a model in which each `Repeat` is `Pipelined`, or those at the paths, or patterns, `at`.

    No variable moves. A `Repeat` within another stays as it is: the outer one is cut.
    """
    model = map_layers(model, "", lambda where, layer: layer.layer if isinstance(layer, Pipelined) else layer)
    repeats = find_layers(model, Repeat)
    if not repeats:
        raise ValueError("in_stages: the model has no Repeat, so that nothing can be cut in stages.")
    within = {inner for where, layer in repeats for inner in find_layers(layer.layer, Repeat, where)}
    outer = [each for each in repeats if each not in within]
    chosen = [where for where, _ in outer] if at is None else match_paths(list(at), [where for where, _ in outer])

    def cut(where: str, layer: Layer) -> Layer:
        return Pipelined(layer, stages, microbatches, axis) if (where, layer) in outer and where in chosen else layer

    return map_layers(model, "", cut)


def pipelines(model: Layer) -> dict[str, Pipelined]:
    """The pipelined parts of a model by path; the leading axis of each of their variables belongs on their axis."""
    return dict(find_layers(model, Pipelined))
