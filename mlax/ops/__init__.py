"""The mathematics of the layers: pure functions of arrays, without weights of their own."""

from mlax.ops._activations import quick_gelu, snake, soft_cap, squared_relu
from mlax.ops._alibi import alibi, alibi_slopes
from mlax.ops._alpha_dropout import alpha_dropout
from mlax.ops._attend import attend
from mlax.ops._attention import attention
from mlax.ops._attention_kernel import Kernel, attention_kernel
from mlax.ops._batch_norm import batch_norm, batch_statistics
from mlax.ops._checks import is_known
from mlax.ops._conv import check_groups, check_kernel, conv
from mlax.ops._conv_transpose import conv_transpose, stamps
from mlax.ops._dropout import dropout
from mlax.ops._embed import embed
from mlax.ops._global_pool import (
    PoolBy,
    adaptive_pool,
    adaptive_sizes,
    check_by,
    global_pool,
)
from mlax.ops._glu import glu
from mlax.ops._group_norm import group_norm
from mlax.ops._gru import blend, gru
from mlax.ops._layer_norm import layer_norm
from mlax.ops._layout import Layout, layout_of
from mlax.ops._linear import linear
from mlax.ops._lstm import lstm, lstm_memory, lstm_output
from mlax.ops._moe import (
    combine,
    dispatch,
    expert_capacity,
    expert_places,
    jitter,
    route,
)
from mlax.ops._pad import PadWith, check_pad, pad
from mlax.ops._patches import patches
from mlax.ops._pool import larger, mean_pool, pool, pool_windows
from mlax.ops._positions import sinusoids
from mlax.ops._reduce import mean
from mlax.ops._relative_bias import relative_bias, relative_buckets
from mlax.ops._rms_norm import rms_norm
from mlax.ops._rotary import linear_frequencies, llama3_frequencies, ntk_frequencies, rotary, rotary_frequencies
from mlax.ops._selective_scan import causal_filter, selective_scan
from mlax.ops._softmax import softmax
from mlax.ops._spectral_norm import power_iteration, spectral_norm, unit
from mlax.ops._weight_norm import output_norms, weight_norm
from mlax.ops._windows import Padding, Sizes, per_axis, windows

__all__ = [
    "adaptive_pool",
    "alibi",
    "alibi_slopes",
    "alpha_dropout",
    "attend",
    "attention",
    "attention_kernel",
    "batch_norm",
    "batch_statistics",
    "blend",
    "causal_filter",
    "combine",
    "conv",
    "conv_transpose",
    "dispatch",
    "dropout",
    "embed",
    "global_pool",
    "glu",
    "group_norm",
    "gru",
    "layer_norm",
    "linear",
    "linear_frequencies",
    "llama3_frequencies",
    "lstm",
    "lstm_memory",
    "lstm_output",
    "mean",
    "mean_pool",
    "ntk_frequencies",
    "pad",
    "patches",
    "pool",
    "quick_gelu",
    "relative_bias",
    "relative_buckets",
    "rms_norm",
    "rotary",
    "rotary_frequencies",
    "route",
    "selective_scan",
    "sinusoids",
    "snake",
    "soft_cap",
    "softmax",
    "spectral_norm",
    "squared_relu",
    "weight_norm",
]
