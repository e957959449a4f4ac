"""Algorithms that treat a matrix, or all weights, as a whole."""

import numpy as np
from numpy.linalg import norm

from tests.optim.definitions._adaptive import adamw
from tests.optim.definitions._each_leaf import each_leaf


@each_leaf
def muon(w, grads, *, rate, momentum=0.95, nesterov=True, steps=5, decay=0.1):
    """https://kellerjordan.github.io/posts/muon/ with torch.optim.Muon's momentum; `w` is (inputs, outputs)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    average = 0.0
    for g in grads:
        average = momentum * average + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * average if nesterov else average
        x = x.T / norm(x)  # (outputs, inputs) from here on, as the post has it; its 1e-7 bends small gradients
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if tall else x
        w = w * (1 - rate * decay) - rate * np.sqrt(max(1.0, x.shape[0] / x.shape[1])) * x.T
        yield w


@each_leaf
def soap(w, grads, *, rate, b1=0.95, b2=0.95, eps=1e-8, decay=0.01, every=10):
    """Algorithm 3 of https://arxiv.org/abs/2409.11321 for a matrix, Adam for anything else.

    Choices: the first gradient makes left = (1 - b2) g g' and right = (1 - b2) g' g and gives the bases, their
    eigenvectors, largest first; as in the authors' code nothing else comes of it. Later steps, counted from 1, update
    in the bases of the step before, then average left and right, then, when t % every == 0, sort the bases by their
    estimated eigenvalues, the squares with them, and refresh by one power iteration and QR. The mean is kept
    unrotated. eps and decay are AdamW's: eps beside the corrected root, the decay of w as it was before the step.
    """
    if w.ndim != 2:
        yield from adamw.__wrapped__(w, grads, rate=rate, b1=b1, b2=b2, eps=eps, decay=decay)
        return
    m = v = left = right = 0.0
    for t, g in enumerate(grads):
        if t == 0:
            in_left, in_right = (np.linalg.eigh(square)[1][:, ::-1] for square in (g @ g.T, g.T @ g))
            left, right = (1 - b2) * g @ g.T, (1 - b2) * g.T @ g
            yield w
            continue
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * (in_left.T @ g @ in_right) ** 2
        u = in_left.T @ m @ in_right / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - rate * (in_left @ u @ in_right.T + decay * w)
        yield w
        left = b2 * left + (1 - b2) * g @ g.T
        right = b2 * right + (1 - b2) * g.T @ g
        if t % every == 0:
            by_left = np.argsort(-np.diag(in_left.T @ left @ in_left))
            by_right = np.argsort(-np.diag(in_right.T @ right @ in_right))
            v = v[by_left][:, by_right]
            in_left = np.linalg.qr(left @ in_left[:, by_left])[0]
            in_right = np.linalg.qr(right @ in_right[:, by_right])[0]


@each_leaf
def galore(w, grads, *, rate, rank, every, b1=0.9, b2=0.999, eps=1e-8, scale=0.25):
    """Algorithm 2 of https://arxiv.org/abs/2403.03507, for a matrix projected along its shorter side."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        x = g if g.shape[0] <= g.shape[1] else g.T
        if (t - 1) % every == 0:
            projection = np.linalg.svd(x, full_matrices=False)[0][:, :rank]
        r = projection.T @ x
        m = b1 * m + (1 - b1) * r
        v = b2 * v + (1 - b2) * r**2
        step = projection @ (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps))
        w = w - rate * scale * (step if g.shape[0] <= g.shape[1] else step.T)
        yield w


def lbfgs_direction(g, steps, changes):
    """Algorithm 7.4 of Nocedal and Wright, Numerical Optimization (2006), started from equation 7.20.

    `steps` are the last differences of the weights and `changes` those of the gradients, vectors, oldest first.
    """
    q, parts = g, []
    for s, y in zip(reversed(steps), reversed(changes), strict=True):
        parts.append(s @ q / (y @ s))
        q = q - parts[-1] * y
    r = q * (steps[-1] @ changes[-1]) / (changes[-1] @ changes[-1]) if steps else q
    for s, y, part in zip(steps, changes, reversed(parts), strict=True):
        r = r + s * (part - y @ r / (y @ s))
    return -r
