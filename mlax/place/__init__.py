"""Placement: where variables are stored, how arrays are sharded, and where layers are computed."""

from mlax.core import name_types as name_types
from mlax.place._auto import auto
from mlax.place._distributed import ClusterEnv as ClusterEnv
from mlax.place._distributed import ProcessInfo, initialize_distributed
from mlax.place._distributed import detect_cluster as detect_cluster
from mlax.place._distributed import local_gpus as local_gpus
from mlax.place._guard import UnplannedTransfer, check_shardings, guard
from mlax.place._pipeline import PipelineConfig, Pipelined, one_forward_one_backward, pipeline_repeats
from mlax.place._pipeline import find_pipelines as find_pipelines
from mlax.place._plan import Plan
from mlax.place._plan import warn_unless_parallelized as warn_unless_parallelized
from mlax.place._presets import data, expert, fsdp, pipeline, sequence, single, tensor, zero
from mlax.place._report import Description, NotEnoughMemory
from mlax.place._rules import Placement, host, shard_largest_axis, shard_last_axes
from mlax.place._stream import Stream
from mlax.place._wrappers import AllGatherWeights, ExpertAllToAll, On, ShardingConstraint

__all__ = [
    "AllGatherWeights",
    "Description",
    "ExpertAllToAll",
    "NotEnoughMemory",
    "On",
    "PipelineConfig",
    "Pipelined",
    "Placement",
    "Plan",
    "ProcessInfo",
    "ShardingConstraint",
    "Stream",
    "UnplannedTransfer",
    "auto",
    "check_shardings",
    "data",
    "expert",
    "fsdp",
    "guard",
    "host",
    "initialize_distributed",
    "one_forward_one_backward",
    "pipeline",
    "pipeline_repeats",
    "sequence",
    "shard_largest_axis",
    "shard_last_axes",
    "single",
    "tensor",
    "zero",
]

name_types(globals())
