"""What works around JAX and XLA: keys, host memory, shardings, barriers, custom derivatives, sums, scans, names."""

from mlax._jax._barrier import fusion_barrier
from mlax._jax._custom_jvp import with_jvps
from mlax._jax._custom_vjp import with_vjp
from mlax._jax._gather import take_rows
from mlax._jax._memory import (
    is_on_host,
    map_chunks,
    map_chunks_inplace,
    plan_chunks,
    slice_to_device,
    sum_chunks,
    to_device,
    to_host,
    to_memory_of,
    tree_add,
    write_slice,
)
from mlax._jax._name_stack import fused_op_names, layer_path, path_of, scopes_of_op_name, scopes_of_stack
from mlax._jax._private import with_weak_type
from mlax._jax._random import abstract_key, constant, is_typed_key, name_hash, named_key, sample
from mlax._jax._reductions import (
    broadcast_like,
    divide,
    divide_by_count,
    expand_last,
    is_narrow,
    reduce_mean,
    reduce_sum,
    sums_precisely,
)
from mlax._jax._scan import Apply, Function, ScanStep, add_feedback, batched_grad_scan, scan_with_residuals, time_vmap
from mlax._jax._sharding import explicit_sharding, is_unsharded_cpu, pcast_like, shard_like, with_auto_axes
from mlax._jax._trees import (
    all_stay_finite,
    at_least_float32,
    cast_scalar,
    count_non_finite,
    global_norm,
    leaves_with_paths,
    partition_inexact,
    tree_vdot,
    widest_dtype,
)

__all__ = [
    "Apply",
    "Function",
    "ScanStep",
    "abstract_key",
    "add_feedback",
    "all_stay_finite",
    "at_least_float32",
    "batched_grad_scan",
    "broadcast_like",
    "cast_scalar",
    "constant",
    "count_non_finite",
    "divide",
    "divide_by_count",
    "expand_last",
    "explicit_sharding",
    "fused_op_names",
    "fusion_barrier",
    "global_norm",
    "is_narrow",
    "is_on_host",
    "is_typed_key",
    "is_unsharded_cpu",
    "layer_path",
    "leaves_with_paths",
    "map_chunks",
    "map_chunks_inplace",
    "name_hash",
    "named_key",
    "partition_inexact",
    "path_of",
    "pcast_like",
    "plan_chunks",
    "reduce_mean",
    "reduce_sum",
    "sample",
    "scan_with_residuals",
    "scopes_of_op_name",
    "scopes_of_stack",
    "shard_like",
    "slice_to_device",
    "sum_chunks",
    "sums_precisely",
    "take_rows",
    "time_vmap",
    "to_device",
    "to_host",
    "to_memory_of",
    "tree_add",
    "tree_vdot",
    "widest_dtype",
    "with_auto_axes",
    "with_jvps",
    "with_vjp",
    "with_weak_type",
    "write_slice",
]
