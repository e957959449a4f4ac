"""The layers of PyTorch, eager, with images in its channels-last format. It has no rotary layer."""

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal attention with shared key-value heads, which nn.MultiheadAttention does not have."""

    def __init__(self, kv_heads: int):
        super().__init__()
        self.query, self.out = nn.Linear(256, 256), nn.Linear(256, 256)
        self.key, self.value = nn.Linear(256, 32 * kv_heads), nn.Linear(256, 32 * kv_heads)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, 32)).transpose(1, 2) for each in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


LAYERS = {
    "Linear": lambda: nn.Linear(512, 512),
    "Linear, 3 axes": lambda: nn.Linear(512, 512),
    "GELU MLP": lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU("tanh"), nn.Linear(1024, 256)),
    "Embed": lambda: nn.Embedding(8192, 256),
    "Conv": lambda: nn.Conv2d(32, 64, 3, padding=1),
    "Conv, strided": lambda: nn.Conv2d(32, 64, 3, stride=2, padding=1),
    "Conv, depthwise": lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64),
    "ConvTranspose": lambda: nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
    "MaxPool 2/2": lambda: nn.MaxPool2d(2),
    "MaxPool 3/2": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "MeanPool": lambda: nn.AvgPool2d(2),
    "BatchNorm": lambda: nn.BatchNorm2d(64),
    "LayerNorm": lambda: nn.LayerNorm(512),
    "RMSNorm": lambda: nn.RMSNorm(512),
    "GroupNorm": lambda: nn.GroupNorm(8, 64),
    "Dropout": lambda: nn.Dropout(0.1),
    "Attention": lambda: nn.MultiheadAttention(256, 8, batch_first=True),
    "Attention, grouped": lambda: Attention(kv_heads=2),
    "LSTM": lambda: nn.LSTM(256, 256),
    "GRU": lambda: nn.GRU(256, 256),
    "CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 64, 10),
    ),
}
CUDA = torch.cuda.is_available()


def build(name: str, array: np.ndarray, labels: np.ndarray | None, rate: float) -> dict[str, Callable[[], None]]:
    """The forward pass and the training step, both synchronous; with labels, the step updates the weights."""
    if not CUDA:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if CUDA else "cpu"
    model, x = LAYERS[name]().to(device), torch.from_numpy(array).to(device)
    if x.ndim == 4:
        model, x = model.to(memory_format=torch.channels_last), x.permute(0, 3, 1, 2)
    x.requires_grad_(x.is_floating_point() and labels is None)
    causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=device) if name == "Attention" else None
    optimizer = None if labels is None else torch.optim.SGD(model.parameters(), rate)
    targets = None if labels is None else torch.from_numpy(labels).long().to(device)

    def call():
        if name == "Attention":
            return model(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0]
        y = model(x)
        return y[0] if name in ("LSTM", "GRU") else y

    @torch.no_grad()
    def forward():
        call()
        if CUDA:
            torch.cuda.synchronize()

    ones = torch.ones_like(call())  # in the output's own memory format

    def training():
        model.zero_grad()
        x.grad = None
        if optimizer is None:
            call().backward(ones)
        else:
            functional.cross_entropy(call(), targets).backward()
            optimizer.step()
        if CUDA:
            torch.cuda.synchronize()

    return {"forward": forward, "training": training}
