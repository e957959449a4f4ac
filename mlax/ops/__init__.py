"""The mathematics of the layers: pure functions of arrays, without weights."""

from mlax._gpu import kernel_backend
from mlax.core import name_types as name_types
from mlax.ops._activations import activate as activate
from mlax.ops._activations import exact_gelu, gelu, glu, prelu, quick_gelu, snake, soft_cap, softmax, squared_relu
from mlax.ops._attention import attention, attention_weights
from mlax.ops._attention_backend import AttentionBackend, attention_backend
from mlax.ops._attention_checks import check_lengths
from mlax.ops._attention_chunked import chunked_attention
from mlax.ops._attention_cudnn import cudnn_attention
from mlax.ops._attention_scores import ScoreInputs, ScoreSpec, causal_block_attention
from mlax.ops._channel_norms import batch_norm, batch_statistics, group_norm, normalize_batch
from mlax.ops._checks import check_floating, check_groups, check_kernel
from mlax.ops._conv import conv, conv_transpose, dimension_numbers
from mlax.ops._cpu import canonical_conv, materialize, prefers_canonical_conv
from mlax.ops._cross_entropy import softmax_cross_entropy
from mlax.ops._dropout import alpha_dropout, dropout
from mlax.ops._fused_linear import gelu_mlp as gelu_mlp
from mlax.ops._fused_linear import linears as linears
from mlax.ops._layout import Layout, kernel_output_axis, parse_layout
from mlax.ops._linear import embedding, embedding_bag, linear, tied_logits
from mlax.ops._linear_cross_entropy import linear_cross_entropy, tied_cross_entropy
from mlax.ops._losses import ctc_loss
from mlax.ops._moe import combine, dispatch, expert_capacity, expert_slots, jitter, route
from mlax.ops._norms import (
    layer_norm,
    local_response_norm,
    mean,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from mlax.ops._pool import (
    Reduction,
    adaptive_pool,
    adaptive_sizes,
    check_reduction,
    global_pool,
    max_pool,
    mean_pool,
    patches,
    pool,
    resolve_pool_windows,
)
from mlax.ops._positions import (
    alibi,
    alibi_slopes,
    check_positions,
    cos_and_sin,
    default_positions,
    dynamic_ntk_frequencies,
    linear_frequencies,
    llama3_frequencies,
    ntk_frequencies,
    relative_bias,
    relative_buckets,
    rotary,
    rotary_frequencies,
    sinusoids,
    yarn_frequencies,
)
from mlax.ops._quantize import (
    check_quantized_dtype,
    dequantize,
    is_quantized_dtype,
    kernel_axes,
    quantize,
    quantized_linear,
)
from mlax.ops._reparam import l2_normalize, output_norms, power_iteration, spectral_norm, weight_norm
from mlax.ops._resample import (
    Interpolation,
    check_interpolation,
    pixel_shuffle,
    pixel_unshuffle,
    shuffle_factors,
    unshuffle_factors,
    upsample,
)
from mlax.ops._rnn import blend, gru, lstm, lstm_memory, lstm_output
from mlax.ops._selective_scan import causal_filter, selective_scan
from mlax.ops._windows import (
    Padding,
    PadWith,
    Sizes,
    check_pad,
    pad,
    resolve_transposed_windows,
    resolve_windows,
    sizes_per_axis,
)

__all__ = [
    "adaptive_pool",
    "alibi",
    "alibi_slopes",
    "alpha_dropout",
    "attention",
    "attention_backend",
    "attention_weights",
    "batch_norm",
    "batch_statistics",
    "blend",
    "causal_filter",
    "combine",
    "conv",
    "conv_transpose",
    "ctc_loss",
    "dequantize",
    "dispatch",
    "dropout",
    "dynamic_ntk_frequencies",
    "embedding",
    "embedding_bag",
    "exact_gelu",
    "gelu",
    "global_pool",
    "glu",
    "group_norm",
    "gru",
    "kernel_backend",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_frequencies",
    "llama3_frequencies",
    "local_response_norm",
    "lstm",
    "lstm_memory",
    "lstm_output",
    "max_pool",
    "mean",
    "mean_pool",
    "ntk_frequencies",
    "pad",
    "patches",
    "pixel_shuffle",
    "pixel_unshuffle",
    "pool",
    "prelu",
    "quantize",
    "quantized_linear",
    "quick_gelu",
    "relative_bias",
    "relative_buckets",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "rotary",
    "rotary_frequencies",
    "route",
    "selective_scan",
    "sinusoids",
    "snake",
    "soft_cap",
    "softmax",
    "softmax_cross_entropy",
    "spectral_norm",
    "squared_relu",
    "tied_cross_entropy",
    "tied_logits",
    "upsample",
    "weight_norm",
    "yarn_frequencies",
]

name_types(globals())
