"""Algorithms that wrap another one, here SGD."""

import numpy as np

from tests.optim.definitions._each_leaf import each_leaf


@each_leaf
def lookahead_sgd(w, grads, *, rate, every=6, alpha=0.5):
    """Algorithm 1 of https://arxiv.org/abs/1907.08610 with SGD; yields pairs of the fast and the slow weights."""
    slow = w
    for t, g in enumerate(grads, 1):
        w = w - rate * g
        if t % every == 0:
            w = slow = slow + alpha * (w - slow)
        yield w, slow


@each_leaf
def averages(w, path, *, decay):
    """Moving averages of the weights in `path`, without the initial `w`; bias-corrected like the mean in `adamw`."""
    average = 0.0
    for t, now in enumerate(path, 1):
        average = decay * average + (1 - decay) * now
        yield average / (1 - decay**t)


@each_leaf
def adaptively_clipped_sgd(w, grads, *, rate, limit=0.01, eps=1e-3):
    """SGD whose gradients are clipped by equation 3 of https://arxiv.org/abs/2102.06171, a unit being an output."""
    axes = tuple(range(w.ndim - 1)) if w.ndim > 1 else None
    for g in grads:
        size, weight = (np.sqrt((x**2).sum(axes, keepdims=True)) for x in (g, w))
        largest = limit * np.maximum(weight, eps)
        w = w - rate * g * np.minimum(1.0, largest / np.maximum(size, 1e-300))
        yield w


def sam_sgd(weights, gradient, *, steps, rate, radius=0.05):
    """Algorithm 1 of https://arxiv.org/abs/2010.01412 with SGD, p = 2; `gradient` is a function of the weights."""
    path = []
    for _ in range(steps):
        g = gradient(weights)
        length = np.sqrt(sum((leaf**2).sum() for leaf in g.values()))
        g = gradient({name: w + radius * g[name] / length for name, w in weights.items()})  # equation 2
        weights = {name: w - rate * g[name] for name, w in weights.items()}
        path.append(weights)
    return path
