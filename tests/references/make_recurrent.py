"""Write recurrent.npz: outputs and gradients of PyTorch's recurrent layers.

Run with a Python that has torch and numpy: python tests/references/make_recurrent.py
"""

from pathlib import Path

import numpy as np
import torch

CASES = {
    "rnn_tanh": (torch.nn.RNN, {"nonlinearity": "tanh"}),
    "rnn_relu": (torch.nn.RNN, {"nonlinearity": "relu"}),
    "gru": (torch.nn.GRU, {}),
    "lstm": (torch.nn.LSTM, {}),
    "lstm_projected": (torch.nn.LSTM, {"proj_size": 2}),
    "gru_both": (torch.nn.GRU, {"bidirectional": True}),
    "lstm_two": (torch.nn.LSTM, {"num_layers": 2}),
}
B, T, D, F = 3, 6, 4, 5
LENGTHS = (6, 1, 4)


def record(kind, options, lengths=None):
    """All arrays of a comparison: weights, inputs, outputs, and the gradients of a weighted sum of them."""
    torch.manual_seed(0)
    layer = kind(D, F, batch_first=True, **options)
    rows = (1 + layer.bidirectional) * layer.num_layers
    x = torch.randn(B, T, D, requires_grad=True)
    carry = [torch.randn(rows, B, layer.proj_size or F, requires_grad=True)]
    if kind is torch.nn.LSTM:
        carry.append(torch.randn(rows, B, F, requires_grad=True))
    given = tuple(carry) if kind is torch.nn.LSTM else carry[0]
    if lengths is None:
        y, last = layer(x, given)
    else:
        pack, unpack = torch.nn.utils.rnn.pack_padded_sequence, torch.nn.utils.rnn.pad_packed_sequence
        packed, last = layer(pack(x, lengths, batch_first=True, enforce_sorted=False), given)
        y, _ = unpack(packed, batch_first=True, total_length=T)
    last = list(last) if kind is torch.nn.LSTM else [last]
    factors = [torch.randn_like(out) for out in (y, *last)]
    sum((factor * out).sum() for factor, out in zip(factors, (y, *last), strict=True)).backward()
    found = {"x": x, "y": y, "x_grad": x.grad}
    for place, (first, end) in enumerate(zip(carry, last, strict=True)):
        found |= {f"first_{place}": first, f"last_{place}": end, f"first_{place}_grad": first.grad}
    found |= {f"factor_{place}": factor for place, factor in enumerate(factors)}
    for name, weight in layer.named_parameters():
        found |= {name: weight, f"{name}_grad": weight.grad}
    return found


arrays = {}
for name, (kind, options) in CASES.items():
    for suffix, lengths in (("", None), ("_lengths", LENGTHS)):
        if suffix and name not in ("gru", "lstm", "gru_both"):
            continue
        for key, value in record(kind, options, lengths).items():
            arrays[f"{name}{suffix}/{key}"] = value.detach().numpy()
np.savez_compressed(Path(__file__).with_name("recurrent.npz"), **arrays)
