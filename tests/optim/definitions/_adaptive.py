"""Algorithms that scale each element, or each leaf, by its past gradients."""

import numpy as np
from numpy.linalg import norm

from tests.optim.definitions._each_leaf import each_leaf


@each_leaf
def adamw(w, grads, *, rate, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    """Algorithm 2 of https://arxiv.org/abs/1711.05101, with PyTorch's decay, which the rate multiplies too.

    With decay 0 it is Adam, Algorithm 1 of https://arxiv.org/abs/1412.6980.
    """
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        w = w - rate * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w)
        yield w


@each_leaf
def adabelief(w, grads, *, rate, b1=0.9, b2=0.999, eps=1e-16):
    """Algorithm 2 of https://arxiv.org/abs/2010.07468: eps is part of the average, and added to its root."""
    m = s = 0.0
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m) ** 2 + eps
        w = w - rate * m / (1 - b1**t) / (np.sqrt(s / (1 - b2**t)) + eps)
        yield w


@each_leaf
def lion(w, grads, *, rate, b1=0.9, b2=0.99, decay=0.0):
    """Algorithm 2 of https://arxiv.org/abs/2302.06675; the sign of zero is zero."""
    m = 0.0
    for g in grads:
        w = w - rate * (np.sign(b1 * m + (1 - b1) * g) + decay * w)
        m = b2 * m + (1 - b2) * g
        yield w


@each_leaf
def lamb(w, grads, *, rate, b1=0.9, b2=0.999, eps=1e-6, decay=0.01):
    """Algorithm 2 of https://arxiv.org/abs/1904.00962, phi the identity; the ratio is 1 where a norm is zero."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + decay * w
        ratio = norm(w) / norm(u) if norm(w) and norm(u) else 1.0
        w = w - rate * ratio * u
        yield w


@each_leaf
def lars(w, grads, *, rate, momentum=0.9, trust=0.001, decay=1e-4):
    """Algorithm 1 of https://arxiv.org/abs/1708.03888; the ratio is 1 where a norm is zero."""
    v = 0.0
    for g in grads:
        ratio = trust * norm(w) / (norm(g) + decay * norm(w)) if norm(w) and norm(g) else 1.0
        v = momentum * v + rate * ratio * (g + decay * w)
        w = w - v
        yield w


@each_leaf
def adafactor(w, grads, *, rate=0.01, power=0.8, eps=2.0**-52, scale_eps=1e-3, clip=1.0, decay=0.0):
    """Algorithms 4 (matrices) and 5 (others) of https://arxiv.org/abs/1804.04235, as torch.optim.Adafactor has them.

    Against the paper: means in place of sums, eps a floor under the averages in place of a term in g**2, the relative
    step min(rate, 1 / sqrt(t)), decay by `rate` itself, and the scale of the weights before the decay.
    """
    rows = columns = v = 0.0
    for t, g in enumerate(grads, 1):
        scale = max(scale_eps, norm(w) / np.sqrt(w.size)) * min(rate, t**-0.5)
        new = t**-power  # 1 - b2
        if w.ndim == 2:
            rows = (1 - new) * rows + new * (g**2).mean(1, keepdims=True)
            columns = (1 - new) * columns + new * (g**2).mean(0, keepdims=True)
            v = rows * columns / max(rows.mean(), eps)
        else:
            v = (1 - new) * v + new * g**2
        u = g / np.sqrt(np.maximum(v, eps**2))
        w = w * (1 - rate * decay) - scale * u / max(1.0, norm(u) / np.sqrt(w.size) / clip)
        yield w


@each_leaf
def sophia_g(w, grads, sampled, *, rate, batch, every, b1=0.96, b2=0.99, gamma=0.01, eps=1e-12, decay=0.1):
    """Algorithms 2 and 3 of https://arxiv.org/abs/2305.14342; curvature before the update at steps 1, 1 + every, ...

    `sampled` are the gradients for labels sampled from the model, one for each estimate.
    """
    m = h = 0.0
    for t, g in enumerate(grads):
        if t % every == 0:
            h = b2 * h + (1 - b2) * batch * sampled[t // every] ** 2
        m = b1 * m + (1 - b1) * g
        w = w - rate * decay * w - rate * np.clip(m / np.maximum(gamma * h, eps), -1, 1)
        yield w


@each_leaf
def schedule_free(w, grads, *, rate, b1=0.9, b2=0.999, eps=1e-8, decay=0.0, warmup=0):
    """Algorithm 1 of https://arxiv.org/abs/2405.15682 as AdamWScheduleFree of facebookresearch/schedule_free has it.

    Yields pairs: y, where gradients are computed, and x, the average to evaluate. Against the paper the bias of v is
    corrected at v and not in the rate, so x weights steps by the largest warmed rate so far, squared.
    """
    x = y = z = w
    v = total = largest = 0.0
    for t, g in enumerate(grads, 1):
        warmed = rate * (min(1.0, t / warmup) if warmup else 1.0)
        largest = max(largest, warmed)
        total += largest**2
        v = b2 * v + (1 - b2) * g**2
        z = z - warmed * (g / (np.sqrt(v / (1 - b2**t)) + eps) + decay * y)
        x = x + largest**2 / total * (z - x)
        y = (1 - b1) * z + b1 * x
        yield y, x


@each_leaf
def ademamix(w, grads, *, rate, b1=0.9, b2=0.999, b3=0.9999, alpha=5.0, warmup=0, eps=1e-8, decay=0.0):
    """Algorithm 1 of https://arxiv.org/abs/2409.03137, its schedules f_alpha and f_b3 (from b1 to b3) over `warmup`."""
    fast = slow = v = 0.0
    for t, g in enumerate(grads, 1):
        part = min(1.0, t / warmup) if warmup else 1.0
        b3_now = np.exp(np.log(b1) * np.log(b3) / ((1 - part) * np.log(b3) + part * np.log(b1)))
        fast = b1 * fast + (1 - b1) * g
        slow = b3_now * slow + (1 - b3_now) * g
        v = b2 * v + (1 - b2) * g**2
        u = (fast / (1 - b1**t) + part * alpha * slow) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - rate * (u + decay * w)
        yield w


@each_leaf
def yogi(w, grads, *, rate, b1=0.9, b2=0.999, eps=1e-3, start=1e-6):
    """Algorithm 2 of Zaheer et al., Adaptive Methods for Nonconvex Optimization, with Adam's bias correction."""
    m, v = 0.0, start
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * np.sign(v - g**2) * g**2
        w = w - rate * m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        yield w


@each_leaf
def adan(w, grads, *, rate, b1=0.98, b2=0.92, b3=0.99, eps=1e-8, decay=0.02):
    """Algorithm 1 of https://arxiv.org/abs/2208.06677, with the bias correction of the authors' code."""
    m = v = n = 0.0
    previous = grads[0]
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (g - previous)
        n = b3 * n + (1 - b3) * (g + b2 * (g - previous)) ** 2
        u = (m / (1 - b1**t) + b2 * v / (1 - b2**t)) / (np.sqrt(n / (1 - b3**t)) + eps)
        w = (w - rate * u) / (1 + rate * decay)
        previous = g
        yield w
