"""Imported before torchvision, transformers and diffusers: declares two operators that PyTorch's CPU build lacks.

PyPI's torchvision is built for CUDA. The models need none of its compiled operators, but importing it looks for these.
"""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
