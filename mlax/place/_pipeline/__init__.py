"""Pipeline parallelism: the pipelined layer, its stages, and the schedule that splits the jaxpr of a loss."""

from mlax.place._pipeline._config import PipelineConfig, Schedule, find_pipelines, pipeline_repeats
from mlax.place._pipeline._layer import Pipelined
from mlax.place._pipeline._one_f_one_b import one_forward_one_backward

__all__ = [
    "PipelineConfig",
    "Pipelined",
    "Schedule",
    "find_pipelines",
    "one_forward_one_backward",
    "pipeline_repeats",
]
