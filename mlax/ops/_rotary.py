"""Rotary positions: pairs of features turned by an angle that grows with the position."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from mlax.ops._positions import waves


def rotary(
    x: Float[Array, "b t h k"],
    positions: Integer[Array, "*b t"] | None = None,
    *,
    frequencies: tuple[float, ...] | None = None,
    interleaved: bool = False,
) -> Float[Array, "b t h k"]:
    """Turn each pair of features by position times the pair's frequency, in the dtype of `x`.

    `frequencies` are those of `rotary_frequencies(k)` unless given; n of them turn the first 2n features and leave
    the rest. Feature i is paired with i + n, as in Llama's weights, or 2i with 2i + 1 where `interleaved`, as in the
    paper: https://arxiv.org/abs/2104.09864, equation 34. Positions count from 0 unless given.
    """
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1])
    turned = 2 * len(frequencies)
    if turned > x.shape[-1]:
        raise ValueError(
            f"rotary: {len(frequencies)} frequencies turn {turned} features, but the input {x.shape} has {x.shape[-1]}."
        )
    if positions is None:
        positions = jnp.arange(x.shape[1], dtype=np.int32)
    cos, sin = (wave[..., None, :] for wave in waves(positions, frequencies, x.dtype))  # (b, t, 1, n)
    turning, rest = x[..., :turned], x[..., turned:]
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = jnp.split(turning, 2, axis=-1)
    new = first * cos - second * sin, second * cos + first * sin
    joined = jnp.stack(new, axis=-1).reshape(turning.shape) if interleaved else jnp.concatenate(new, axis=-1)
    return jnp.concatenate([joined, rest], axis=-1) if rest.shape[-1] else joined


def rotary_frequencies(width: int, base: float = 10_000.0) -> tuple[float, ...]:
    """The angle by position of each pair of `width` features: base^(-2i / width). Equation 15 of the paper."""
    if width < 2 or width % 2:
        raise ValueError(f"rotary: the width is {width}, but must be even, since features turn in pairs.")
    return tuple((base ** (-np.arange(0, width, 2, dtype=np.float64) / width)).tolist())


def linear_frequencies(frequencies: tuple[float, ...], factor: float) -> tuple[float, ...]:
    """All frequencies divided by `factor`: positions interpolated. https://arxiv.org/abs/2306.15595, equation 4."""
    return tuple(frequency / factor for frequency in frequencies)


def ntk_frequencies(width: int, base: float, factor: float) -> tuple[float, ...]:
    """The frequencies of a larger base: the highest stays, the lowest is divided by `factor`.

    https://arxiv.org/abs/2309.00071, definition 1 and the equation above it.
    """
    if width < 4:
        raise ValueError(
            f"rotary: the width is {width}, but NTK scaling needs 4 at least: a highest and a lowest pair."
        )
    return rotary_frequencies(width, base * factor ** (width / (width - 2)))


def llama3_frequencies(
    frequencies: tuple[float, ...], factor: float, low: float, high: float, length: int
) -> tuple[float, ...]:
    """Frequencies as Llama 3 scales them to contexts longer than the `length` of its first training.

    A wave that turns more than `high` times within `length` stays, one that turns less than `low` times is divided
    by `factor`, and between the two it is a mean of both, linear in the number of turns.
    https://arxiv.org/abs/2407.21783, section 3.4.2, and the model code that was published with the weights.
    """
    scaled: list[float] = []
    for frequency in frequencies:
        turns = length * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(kept * frequency + (1 - kept) * frequency / factor)
    return tuple(scaled)
