"""Waves over positions, exact to the last digit of any dtype, and the sinusoids made of them."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from mlax.ops._rows import rows

DIGIT = 1024  # positions are written in two digits to this base


def waves(
    positions: Integer[Array, "*t"], frequencies: tuple[float, ...], dtype: Any
) -> tuple[Float[Array, "*t f"], Float[Array, "*t f"]]:
    """The cosine and sine of position times frequency, in `dtype`; NaN outside of positions 0 to 2^20 - 1.

    A product of a large position and a frequency has no digits left after the point in a narrow dtype, and few in
    float32. So the waves of each digit of the position are tabled in float64 and joined by the sum of angles.
    """
    count = positions // DIGIT
    low = _rows(_table(frequencies, 1, jnp.dtype(dtype).name), positions - count * DIGIT)
    high = _rows(_table(frequencies, DIGIT, jnp.dtype(dtype).name), jnp.where(positions < 0, DIGIT, count))
    cos = high[0] * low[0] - high[1] * low[1]
    sin = high[1] * low[0] + high[0] * low[1]
    return cos, sin


def sinusoids(
    positions: Integer[Array, "*t"], width: int, dtype: Any, *, base: float = 10_000.0
) -> Float[Array, "*t {width}"]:
    """A sine and a cosine of each position in turn, `width` numbers, their frequencies falling from 1 to 1 / base.

    https://arxiv.org/abs/1706.03762, section 3.5.
    """
    if width % 2:
        raise ValueError(f"sinusoids: the width is {width}, but must be even: each frequency has a sine and a cosine.")
    frequencies = base ** (-np.arange(0, width, 2) / width)
    cos, sin = waves(positions, tuple(frequencies.tolist()), dtype)
    return jnp.stack([sin, cos], axis=-1).reshape(*positions.shape, width)


@functools.lru_cache(maxsize=64)
def _table(frequencies: tuple[float, ...], step: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(0, DIGIT * step, step)[:, None] * np.asarray(frequencies, np.float64)
    return np.cos(angles).astype(jnp.dtype(dtype)), np.sin(angles).astype(jnp.dtype(dtype))


def _rows(table: tuple[np.ndarray, np.ndarray], digits: Any) -> tuple[Any, Any]:
    cos, sin = (rows(jnp.asarray(each), digits, mode="fill") for each in table)
    return cos, sin
