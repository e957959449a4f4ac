"""Make experts.npz, what PyTorch computes for the layers that tests/nn/test_{moe,mamba,lora,mlp}.py compare with it.

    python tests/references/make_experts.py    # needs torch 2.13 on a CPU, and numpy

Each case holds the input, the weights, the output, and the gradients of `sum(y * probe)` by all of them, in float32.
Names are `case/x`, `case/w/path`, `case/y`, `case/probe`, `case/dx`, `case/dw/path`.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ARRAYS = {}


def draw(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def case(name, x, weights, function):
    """Run `function(x, weights)` in float64 and keep it all; losses beside the output are added to the probed sum."""
    tensors = {path: torch.tensor(w, dtype=torch.float64, requires_grad=True) for path, w in weights.items()}
    tx = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = function(tx, tensors)
    y, extra = y if isinstance(y, tuple) else (y, {})
    probe = draw(99, *y.shape)
    total = (y * torch.tensor(probe, dtype=torch.float64)).sum() + sum(loss.sum() for loss in extra.values())
    grads = torch.autograd.grad(total, [tx, *tensors.values()])
    ARRAYS.update({f"{name}/x": x, f"{name}/y": y, f"{name}/probe": probe, f"{name}/dx": grads[0]})
    ARRAYS.update({f"{name}/extra/{key}": loss for key, loss in extra.items()})
    ARRAYS.update({f"{name}/w/{path}": w for path, w in weights.items()})
    ARRAYS.update({f"{name}/dw/{path}": g for path, g in zip(tensors, grads[1:], strict=True)})


def mlp(x, w):
    first, second = torch.nn.Linear(6, 9, dtype=torch.float64), torch.nn.Linear(9, 4, dtype=torch.float64)
    model = torch.nn.Sequential(first, torch.nn.GELU("tanh"), second)
    named = {
        "0.weight": w["linear_0/kernel"].T,
        "0.bias": w["linear_0/bias"],
        "2.weight": w["linear_1/kernel"].T,
        "2.bias": w["linear_1/bias"],
    }
    return torch.func.functional_call(model, named, (x,))


def sigmoid_glu(x, w):
    return F.glu(torch.cat([x @ w["value/kernel"], x @ w["gate/kernel"]], -1))


def gated(activation):
    return lambda x, w: activation(F.linear(x, w["gate/kernel"].T)) * F.linear(x, w["value/kernel"].T)


def lora(x, w):
    return F.linear(x, w["kernel"].T, w["bias"]) + 2.0 * F.linear(F.linear(x, w["lora/down"].T), w["lora/up"].T)


def mamba(x, w):
    """With torch's own grouped convolution for the filter, and a loop over time for the scan."""
    states, rank, window = w["scan/log_rate"].shape[1], w["step/kernel"].shape[0], w["filter/kernel"].shape[0]
    x, gate = (x @ w["expand/kernel"]).chunk(2, -1)
    b, t, c = x.shape
    x = F.conv1d(x.mT, w["filter/kernel"].T[:, None], w["filter/bias"], padding=window - 1, groups=c)[..., :t].mT
    x = F.silu(x)
    step, write, read = (x @ w["select/kernel"]).split((rank, states, states), -1)
    step = F.softplus(step @ w["step/kernel"] + w["step/bias"])
    state, ys = x.new_zeros(b, c, states), []
    for i in range(t):
        decay = torch.exp(-step[:, i, :, None] * w["scan/log_rate"].exp())
        state = decay * state + (step[:, i] * x[:, i])[..., None] * write[:, i, None]
        ys.append(torch.einsum("bcn,bn->bc", state, read[:, i]) + w["scan/skip"] * x[:, i])
    return (torch.stack(ys, 1) * F.silu(gate)) @ w["contract/kernel"]


def moe(k, capacity):
    """A loop over rows, tokens and choices."""

    def function(x, w):
        experts = w["router/kernel"].shape[1]
        rows, balance, z = [], [], []
        for row in x:
            logits = row @ w["router/kernel"]
            probability = logits.softmax(-1)
            gates, best = probability.topk(k)
            gates = gates / gates.sum(-1, keepdim=True) if k > 1 else gates
            filled, ys = [0] * experts, []
            for token, gate, experts_of in zip(row, gates, best.tolist(), strict=True):
                y = token.new_zeros(w["experts/stacked/bias"].shape[1])
                for g, e in zip(gate, experts_of, strict=True):
                    if filled[e] < capacity:
                        y = y + g * (token @ w["experts/stacked/kernel"][e] + w["experts/stacked/bias"][e])
                    filled[e] += 1
                ys.append(y)
            rows.append(torch.stack(ys))
            share = F.one_hot(best, experts).double().mean((0, 1))
            balance.append(experts * (share * probability.mean(0)).sum())
            z.append((logits.logsumexp(-1) ** 2).mean())
        return torch.stack(rows), {"balance": torch.stack(balance), "z": torch.stack(z)}

    return function


def main():
    dense = {"linear_0/kernel": draw(1, 6, 9), "linear_0/bias": draw(2, 9), "linear_1/kernel": draw(3, 9, 4)}
    for name, shape in ("row", (5, 6)), ("rows", (2, 3, 6)), ("deep", (1, 2, 3, 6)):
        case(f"mlp {name}", draw(0, *shape), {**dense, "linear_1/bias": draw(4, 4)}, mlp)

    gates = {"gate/kernel": draw(5, 6, 4), "value/kernel": draw(6, 6, 4)}
    case("glu sigmoid", draw(7, 2, 3, 6), gates, sigmoid_glu)
    for name, activation in ("silu", F.silu), ("relu", F.relu), ("gelu", lambda x: F.gelu(x, approximate="tanh")):
        case(f"glu {name}", draw(7, 2, 3, 6), gates, gated(activation))

    low = {"kernel": draw(8, 6, 5), "bias": draw(9, 5), "lora/down": draw(10, 6, 2), "lora/up": draw(11, 2, 5)}
    case("lora", draw(12, 2, 3, 6), low, lora)

    for times, window, rank in (1, 4, 1), (11, 4, 2), (9, 1, 1):
        c, n = 10, 3
        weights = {
            "expand/kernel": draw(13, 5, 2 * c, scale=0.5),
            "filter/kernel": draw(14, window, c, scale=0.5),
            "filter/bias": draw(15, c),
            "select/kernel": draw(16, c, rank + 2 * n, scale=0.5),
            "step/kernel": draw(17, rank, c),
            "step/bias": draw(18, c) - 2,
            "scan/log_rate": draw(19, c, n, scale=0.5),
            "scan/skip": draw(20, c),
            "contract/kernel": draw(21, c, 5, scale=0.5),
        }
        case(f"mamba {times} {window} {rank}", draw(22, 2, times, 5), weights, mamba)

    experts = {
        "router/kernel": draw(23, 6, 4),
        "experts/stacked/kernel": draw(24, 4, 6, 5),
        "experts/stacked/bias": draw(25, 4, 5),
    }
    for k, capacity in (1, 2), (2, 3), (3, 8):
        case(f"moe {k} {capacity}", draw(26, 3, 8, 6), experts, moe(k, capacity))

    arrays = {name: np.asarray(a.detach() if torch.is_tensor(a) else a, np.float32) for name, a in ARRAYS.items()}
    np.savez_compressed(Path(__file__).with_name("experts.npz"), **arrays)


if __name__ == "__main__":
    main()
