"""Random weights as a function of their names, and digests of gradients: what references and tests both compute."""

import zlib

import numpy as np


def fill(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random float32 weights, determined by the name and the shape; those of norms are near 1, variances positive.

    PyTorch's counters of steps are 0.
    """
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    draws = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("running_var"):
        return np.float32(1 + 0.3 * np.tanh(draws))
    if len(shape) == 1 and name.endswith("weight"):
        return np.float32(1 + 0.1 * draws)
    return np.float32(0.3 / max(1, len(shape) - 1) * draws)


def draw(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Random float32 inputs, or weights of outputs in a loss."""
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


def digest(name: str, gradient: np.ndarray, number: int = 12) -> np.ndarray:
    """The norm of a gradient and some of its elements, chosen by the name."""
    flat = np.asarray(gradient, np.float64).reshape(-1)
    places = np.random.default_rng(zlib.crc32(name.encode())).integers(0, flat.size, number)
    return np.concatenate([[np.linalg.norm(flat)], flat[places]]).astype(np.float32)
