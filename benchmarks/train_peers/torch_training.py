"""PyTorch, eager, with images in its channels-last format."""

import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def linear(weights, path):
    kernel, bias = weights[f"{path}/kernel"], weights.get(f"{path}/bias")
    layer = nn.Linear(*kernel.shape, bias=bias is not None)
    layer.weight.data = torch.from_numpy(kernel.T.copy())
    if bias is not None:
        layer.bias.data = torch.from_numpy(bias.copy())
    return layer


def norm(weights, path):
    scale = weights[f"{path}/scale"]
    layer = nn.RMSNorm(scale.shape, eps=1e-6)
    layer.weight.data = torch.from_numpy(scale.copy())
    return layer


def conv(weights, path):
    kernel = weights[f"{path}/kernel"].transpose(0, 3, 1, 2)  # OHWI as OIHW
    layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2:], padding="same")
    layer.weight.data = torch.from_numpy(kernel.copy())
    layer.bias.data = torch.from_numpy(weights[f"{path}/bias"].copy())
    return layer


def apply_rotary(x):
    """Rotate x (b, h, t, k), feature i paired with i + k / 2."""
    t, k = x.shape[-2:]
    angles = np.arange(t)[:, None] * 10_000.0 ** (-np.arange(0, k, 2) / k)  # (t, k / 2)
    cos, sin = (torch.from_numpy(wave(angles).astype(np.float32)) for wave in (np.cos, np.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, weights, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(weights, "norm1"), norm(weights, "norm2")
        self.query, self.key = linear(weights, "attend/query"), linear(weights, "attend/key")
        self.value, self.out = linear(weights, "attend/value"), linear(weights, "attend/out")
        self.query_norm, self.key_norm = norm(weights, "attend/query_norm"), norm(weights, "attend/key_norm")
        self.up, self.down = linear(weights, "think/linear_0"), linear(weights, "think/linear_1")

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        q, k = apply_rotary(self.query_norm(q)), apply_rotary(self.key_norm(k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LanguageModel(nn.Module):
    def __init__(self, weights, blocks, heads):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.from_numpy(weights["embed/table"].copy()), freeze=False)
        self.blocks = nn.Sequential(*[Block(block, heads) for block in blocks])
        self.norm, self.head = norm(weights, "norm"), linear(weights, "head")

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x))))


def cnn(weights):
    kernel = weights["head/kernel"]
    channels_first = kernel.reshape(4, 4, -1, 10).transpose(2, 0, 1, 3).reshape(kernel.shape)
    return nn.Sequential(
        conv(weights, "edges"),
        nn.ReLU(),
        conv(weights, "corners"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        conv(weights, "strokes"),
        nn.ReLU(),
        nn.Flatten(),
        linear({**weights, "head/kernel": channels_first}, "head"),
    ).to(memory_format=torch.channels_last)


def build(model, rate, decay):
    """step(x, y) -> loss, of NumPy arrays."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay, fused=True)

    def step(x, y):
        x, y = torch.from_numpy(x), torch.from_numpy(y).long()
        logits = model(x.permute(0, 3, 1, 2) if x.ndim == 4 else x)
        loss = functional.cross_entropy(logits.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
