"""Rows of mixture of experts, Mamba, LoRA, the MLP family, Flatten and Reshape."""

import jax
import numpy as np

import mlax
from mlax import nn
from tests.catalogue.core import affine, gelu
from tests.catalogue.row import LayerRow


def moe(x, router, expert, k, capacity, renormalize=True):
    """Token by token: `expert(index, token)` is computed while the expert has capacity."""
    t, experts = x.shape[1], router.shape[1]
    outputs, balance, z = [], [], []
    for row in x:
        logits = row @ router
        probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        filled, chosen, ys = np.zeros(experts, int), np.zeros(experts), []
        for token, p in zip(row, probability, strict=True):
            best = np.argsort(-p, kind="stable")[:k]
            gates = p[best] / (p[best].sum() if renormalize and k > 1 else 1)
            y = np.zeros_like(expert(0, token))
            for index, gate in zip(best, gates, strict=True):
                chosen[index] += 1
                if filled[index] < capacity:
                    y = y + gate * expert(index, token)
                filled[index] += 1
            ys.append(y)
        outputs.append(np.stack(ys))
        balance.append(experts * (chosen / (t * k)) @ probability.mean(0))
        z.append((np.log(np.exp(logits).sum(-1)) ** 2).mean())
    return np.stack(outputs), {"balance": np.array(balance), "z": np.array(z)}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mamba(x, w, states, window):
    """Step by step."""
    rank = w["step/kernel"].shape[0]
    x, gate = np.split(x @ w["expand/kernel"], 2, -1)
    b, t, c = x.shape
    seen = np.concatenate([np.zeros((b, window - 1, c)), x], 1)
    x = np.stack([(seen[:, i : i + window] * w["filter/kernel"]).sum(1) + w["filter/bias"] for i in range(t)], 1)
    x = x * sigmoid(x)
    step, write, read = np.split(x @ w["select/kernel"], (rank, rank + states), -1)
    step = np.log1p(np.exp(step @ w["step/kernel"] + w["step/bias"]))
    state, ys = np.zeros((b, c, states)), []
    for i in range(t):
        decay = np.exp(-step[:, i, :, None] * np.exp(w["scan/log_rate"]))
        state = decay * state + (step[:, i] * x[:, i])[..., None] * write[:, i, None]
        ys.append((state * read[:, i, None]).sum(-1) + w["scan/skip"] * x[:, i])
    return np.stack(ys, 1) * gate * sigmoid(gate) @ w["contract/kernel"]


MAMBA = {
    "expand/kernel": (6, 24),
    "filter/kernel": (3, 12),
    "filter/bias": (12,),
    "select/kernel": (12, 9),
    "step/kernel": (1, 12),
    "step/bias": (12,),
    "scan/log_rate": (12, 4),
    "scan/skip": (12,),
    "contract/kernel": (12, 6),
}
EXPERTS = {"router/kernel": (6, 4), "experts/stacked/kernel": (4, 6, 5), "experts/stacked/bias": (4, 5)}


def linear_expert(w):
    return lambda index, token: token @ w["experts/stacked/kernel"][index] + w["experts/stacked/bias"][index]


def folded(outputs, shape):
    y, losses = outputs
    return y.reshape(shape), losses


ROWS = {
    "MoE": LayerRow(
        lambda dtype: nn.MoE(nn.Linear(5), 4, k=2, capacity_factor=0.75),
        (3, 8, 6),
        (EXPERTS, {}),
        lambda x, w: moe(x, w["router/kernel"], linear_expert(w), 2, 3),
        tolerance=3e-6,
        no_sums="rounding changes which experts are chosen",
    ),
    "MoE unlimited": LayerRow(
        lambda dtype: nn.MoE(nn.Linear(5), 4, k=1, capacity_factor=None, noise=0.1),
        (3, 2, 4, 6),
        (EXPERTS, {}),
        lambda x, w: folded(moe(x.reshape(3, 8, 6), w["router/kernel"], linear_expert(w), 1, 8), (3, 2, 4, 5)),
        needs_key=True,
        tolerance=3e-6,
        variant=True,
    ),
    "Mamba": LayerRow(
        lambda dtype: nn.Mamba(6, states=4, window=3, chunk=3),
        (2, 7, 6),
        (MAMBA, {}),
        lambda x, w: mamba(x, w, 4, 3),
        tolerance=3e-6,
        large=(512, 24, 6),
    ),
    "Mamba decode": LayerRow(
        lambda dtype: nn.Mamba(6, states=4, window=3, chunk=3, decode=True),
        (1, 7, 6),
        (MAMBA, {"filter/window": (1, 2, 12), "scan/state": (1, 12, 4)}),
        lambda x, w: mamba(x, w, 4, 3),
        tolerance=3e-6,
        variant=True,
    ),
    "LoRA": LayerRow(
        lambda dtype: nn.LoRA(nn.Linear(5), rank=2, alpha=3.0, up_init=mlax.Normal(0.5)),
        (4, 3, 6),
        ({"kernel": (6, 5), "bias": (5,), "lora/down": (6, 2), "lora/up": (2, 5)}, {}),
        lambda x, w: x @ w["kernel"] + w["bias"] + 1.5 * x @ w["lora/down"] @ w["lora/up"],
        tolerance=3e-6,
    ),
    "MLP": LayerRow(
        lambda dtype: nn.MLP((8, 7, 5)),
        (4, 3, 6),
        (
            {
                "linear_0/kernel": (6, 8),
                "linear_0/bias": (8,),
                "linear_1/kernel": (8, 7),
                "linear_1/bias": (7,),
                "linear_2/kernel": (7, 5),
                "linear_2/bias": (5,),
            },
            {},
        ),
        lambda x, w: affine(gelu(affine(gelu(affine(x, w, "linear_0")), w, "linear_1")), w, "linear_2"),
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
    "GLU": LayerRow(
        lambda dtype: nn.GLU(5, activation=jax.nn.gelu),
        (4, 3, 6),
        ({"gate/kernel": (6, 5), "value/kernel": (6, 5)}, {}),
        lambda x, w: gelu(x @ w["gate/kernel"]) * (x @ w["value/kernel"]),
        tolerance=3e-6,
        no_sums="the layers that it is made of have rows",
    ),
    "Flatten": LayerRow(
        lambda dtype: nn.Flatten(), (4, 3, 2, 6), ({}, {}), lambda x, w: x.reshape(4, 36), no_sums="it sums nothing"
    ),
    "Reshape": LayerRow(
        lambda dtype: nn.Reshape((2, -1)),
        (4, 3, 6),
        ({}, {}),
        lambda x, w: x.reshape(4, 2, 9),
        no_sums="it sums nothing",
    ),
}
