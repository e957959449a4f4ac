"""Write torch_layers.npz: state dicts of PyTorch's layers, an input and the output of each, and some gradients.

Run with a Python that has torch and numpy: python tests/references/make_torch_layers.py
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    """A residual block, of which a model has several in a ModuleList."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Embedded integers through three blocks to logits, whose weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(3))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class First(nn.Module):
    """The first output of a module that returns several, such as (y, carry)."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *x):
        return self.module(*x)[0]


IDS = torch.tensor([[1, 2, 0, 2], [6, 6, 2, 3], [2, 2, 2, 2]])
CASES = {
    "linear": (nn.Linear(6, 5), [(2, 3, 6)]),
    "linear_plain": (nn.Linear(6, 5, bias=False), [(2, 6)]),
    "sequential": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)), [(2, 6)]),
    "mlp": (nn.Sequential(nn.Linear(6, 5), nn.GELU("tanh"), nn.Linear(5, 3)), [(2, 6)]),
    "conv": (nn.Conv2d(4, 6, (3, 2), stride=2, padding=1), [(2, 4, 5, 6)]),
    "conv_line": (nn.Conv1d(4, 6, 3, groups=2), [(2, 4, 7)]),
    "conv_depthwise": (nn.Conv2d(4, 8, 3, groups=4, bias=False), [(2, 4, 5, 6)]),
    "transpose": (nn.ConvTranspose2d(4, 6, 3, stride=2), [(2, 4, 3, 4)]),
    "transpose_groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), [(2, 4, 3, 4)]),
    "batch_norm": (nn.BatchNorm2d(4), [(3, 4, 2, 3)]),
    "layer_norm": (nn.LayerNorm(6), [(2, 3, 6)]),
    "layer_norm_axes": (nn.LayerNorm((3, 6)), [(2, 3, 6)]),
    "rms_norm": (nn.RMSNorm(6, eps=1e-6), [(2, 3, 6)]),
    "group_norm": (nn.GroupNorm(2, 4), [(2, 4, 3)]),
    "instance_norm": (nn.InstanceNorm2d(4, affine=True), [(2, 4, 3, 5)]),
    "prelu": (nn.PReLU(), [(2, 3, 4)]),
    "prelu_channels": (nn.PReLU(3), [(2, 3, 4)]),
    "embedding": (nn.Embedding(7, 4), [IDS]),
    "embedding_padded": (nn.Embedding(7, 4, padding_idx=2), [IDS]),
    "bag_sum": (nn.EmbeddingBag(7, 4, mode="sum"), [IDS, None, (3, 4)]),
    "bag_mean": (nn.EmbeddingBag(7, 4, mode="mean", padding_idx=2), [IDS]),
    "bag_max": (nn.EmbeddingBag(7, 4, mode="max", padding_idx=2), [IDS]),
    "attention": (First(nn.MultiheadAttention(6, 2, batch_first=True)), [(2, 3, 6)] * 3),
    "attention_cross": (
        First(nn.MultiheadAttention(6, 2, kdim=5, vdim=5, batch_first=True)),
        [(2, 3, 6), (2, 4, 5), 1],
    ),
    "rnn": (First(nn.RNN(4, 3, nonlinearity="relu", batch_first=True)), [(2, 5, 4)]),
    "gru": (First(nn.GRU(4, 3, num_layers=2, bidirectional=True, batch_first=True)), [(2, 5, 4)]),
    "lstm": (First(nn.LSTM(4, 3, num_layers=2, batch_first=True)), [(2, 5, 4)]),
    "lstm_projected": (First(nn.LSTM(4, 3, proj_size=2, batch_first=True)), [(2, 5, 4)]),
    "lstm_plain": (First(nn.LSTM(4, 3, bias=False, batch_first=True)), [(2, 5, 4)]),
    "gru_cell": (nn.GRUCell(4, 3), [(2, 4), (2, 3)]),
    "blocks": (Blocks(), [IDS]),
}


def main():
    """Write the file beside this script."""
    torch.manual_seed(0)
    arrays = {}
    for case, (module, inputs) in CASES.items():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        if getattr(module, "padding_idx", None) is not None:
            with torch.no_grad():
                module.weight[2] = 0.0
        given = []
        for each in inputs:
            given.append(
                given[each] if isinstance(each, int) else torch.randn(each) if isinstance(each, tuple) else each
            )
        if case.startswith("attention") and len(inputs) == 3 and inputs[0] == inputs[1]:
            given = given[:1] * 3
        module.train()(*given)  # which changes the running statistics of BatchNorm
        module.eval()
        y = module(*given)
        arrays[f"{case}/y"] = y.detach().numpy()
        for number, each in enumerate(each for each in given if each is not None):
            arrays[f"{case}/x{number}"] = each.numpy()
        state = (module.module if isinstance(module, First) else module).state_dict()
        arrays |= {f"{case}/state/{name}": value.numpy() for name, value in state.items()}
        if case.startswith(("bag", "embedding", "prelu")):
            (gradient,) = torch.autograd.grad((y * y).sum(), [module.weight])
            arrays[f"{case}/gradient"] = gradient.numpy()
    np.savez_compressed(Path(__file__).with_name("torch_layers.npz"), **arrays)


if __name__ == "__main__":
    main()
