"""Kernels for NVIDIA GPUs, in Pallas: which computations they replace, when, and how the next process reads them."""

from mlax._gpu._attention import attention_kernel, prefers_attention_kernel
from mlax._gpu._backend import compute_capability, is_hopper, kernel_backend, on_gpu, prefers_kernels
from mlax._gpu._decode import decode_attention, fastest_split, fused_linear, rows_linear, sum_and_norm
from mlax._gpu._mlp import (
    biased_product_kernel,
    gelu_product_gradient_kernel,
    gelu_product_kernel,
    prefers_mlp_kernels,
)
from mlax._gpu._products import kernel_gradients, prefers_product_kernels, sum_of_products
from mlax._gpu._records import Record, find_record, hash_files
from mlax._gpu._rows import (
    gelu_gradient_kernel,
    gelu_kernel,
    norm_gradient_kernel,
    norm_kernel,
    prefers_gelu_kernel,
    prefers_loss_kernel,
    prefers_norm_kernel,
    prefers_residual_norm_kernel,
    residual_norm_kernel,
    softmax_gradient_kernel,
    softmax_statistics_kernel,
)

__all__ = [
    "Record",
    "attention_kernel",
    "biased_product_kernel",
    "compute_capability",
    "decode_attention",
    "fastest_split",
    "find_record",
    "fused_linear",
    "gelu_gradient_kernel",
    "gelu_kernel",
    "gelu_product_gradient_kernel",
    "gelu_product_kernel",
    "hash_files",
    "is_hopper",
    "kernel_backend",
    "kernel_gradients",
    "norm_gradient_kernel",
    "norm_kernel",
    "on_gpu",
    "prefers_attention_kernel",
    "prefers_gelu_kernel",
    "prefers_kernels",
    "prefers_loss_kernel",
    "prefers_mlp_kernels",
    "prefers_norm_kernel",
    "prefers_product_kernels",
    "prefers_residual_norm_kernel",
    "residual_norm_kernel",
    "rows_linear",
    "softmax_gradient_kernel",
    "softmax_statistics_kernel",
    "sum_and_norm",
    "sum_of_products",
]
