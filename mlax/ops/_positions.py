"""Position encodings: sinusoidal, rotary, ALiBi and relative bias."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from mlax.ops._linear import gather_rows

RADIX = 1024  # positions are split into two digits to this base


def sinusoids(
    positions: Integer[Array, "*t"], width: int, dtype: Any, *, base: float = 10_000.0
) -> Float[Array, "*t {width}"]:
    """Alternating sines and cosines of each position, `width` of them, with frequencies from 1 to 1 / base.

    https://arxiv.org/abs/1706.03762, section 3.5.
    """
    if width % 2:
        raise ValueError(f"sinusoids: the width is {width}, but must be even: each frequency has a sine and a cosine.")
    frequencies = base ** (-np.arange(0, width, 2) / width)
    cos, sin = cos_and_sin(positions, tuple(frequencies.tolist()), dtype)
    return jnp.stack([sin, cos], axis=-1).reshape(*positions.shape, width)


def rotary(
    x: Float[Array, "b t h k"],
    positions: Integer[Array, "*b t"] | None = None,
    *,
    frequencies: tuple[float, ...] | None = None,
    interleaved: bool = False,
) -> Float[Array, "b t h k"]:
    """Rotate each pair of features by position times the pair's frequency, in the dtype of `x`.

    `frequencies` are `rotary_frequencies(k)` unless given; n of them rotate the first 2n features and leave the rest.
    Feature i is paired with i + n, as in Llama's weights, or 2i with 2i + 1 if `interleaved`, as in the paper:
    https://arxiv.org/abs/2104.09864, equation 34. Positions are 0, 1, 2, ... unless given.
    """
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1])
    width = 2 * len(frequencies)
    if width > x.shape[-1]:
        raise ValueError(
            f"rotary: {len(frequencies)} frequencies rotate {width} features, but the input {x.shape} has "
            f"{x.shape[-1]}."
        )
    if positions is None:
        positions = jnp.arange(x.shape[1], dtype=np.int32)
    positions = positions[None] if positions.ndim == 1 else positions  # (b or 1, t)
    cos, sin = (wave[..., None, :] for wave in cos_and_sin(positions, frequencies, x.dtype))  # (b, t, 1, n)
    pairs, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = pairs[..., ::2], pairs[..., 1::2]
    else:
        first, second = jnp.split(pairs, 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = jnp.stack(rotated, axis=-1).reshape(pairs.shape) if interleaved else jnp.concatenate(rotated, axis=-1)
    return jnp.concatenate([joined, rest], axis=-1) if rest.shape[-1] else joined


def rotary_frequencies(width: int, base: float = 10_000.0) -> tuple[float, ...]:
    """The angle per position of each pair of `width` features: base^(-2i / width). Equation 15 of the paper."""
    if width < 2 or width % 2:
        raise ValueError(f"rotary: the width is {width}, but must be even, since features are rotated in pairs.")
    return tuple((base ** (-np.arange(0, width, 2, dtype=np.float64) / width)).tolist())


def linear_frequencies(frequencies: tuple[float, ...], factor: float) -> tuple[float, ...]:
    """All frequencies divided by `factor`: position interpolation. https://arxiv.org/abs/2306.15595, equation 4."""
    return tuple(frequency / factor for frequency in frequencies)


def ntk_frequencies(width: int, base: float, factor: float) -> tuple[float, ...]:
    """The frequencies of a larger base: the highest stays, the lowest is divided by `factor`.

    https://arxiv.org/abs/2309.00071, definition 1 and the equation above it.
    """
    if width < 4:
        raise ValueError(
            f"rotary: the width is {width}, but NTK scaling needs at least 4: a highest and a lowest pair."
        )
    return rotary_frequencies(width, base * factor ** (width / (width - 2)))


def llama3_frequencies(
    frequencies: tuple[float, ...], factor: float, low: float, high: float, length: int
) -> tuple[float, ...]:
    """Frequencies as Llama 3 scales them to contexts longer than the `length` of its pretraining.

    A frequency with more than `high` periods within `length` stays, one with fewer than `low` is divided by `factor`,
    and between the two it is interpolated, linearly in the number of periods.
    https://arxiv.org/abs/2407.21783, section 3.4.2, and the model code that was published with the weights.
    """
    scaled: list[float] = []
    for frequency in frequencies:
        periods = length * frequency / (2 * math.pi)
        weight = min(max((periods - low) / (high - low), 0.0), 1.0)
        scaled.append(weight * frequency + (1 - weight) * frequency / factor)
    return tuple(scaled)


def alibi(
    heads: int, queries: Integer[Array, " t"], keys: Integer[Array, " s"], dtype: Any
) -> Float[Array, "1 {heads} t s"]:
    """The bias `-slope * |query position - key position|` to add to scores (b, h, t, s), in `dtype`.

    `attention(..., alibi=True)` adds the same without storing it.
    """
    distance = jnp.abs(queries[:, None] - keys[None, :]).astype(dtype)
    slopes = jnp.asarray(alibi_slopes(heads).astype(dtype))
    return -slopes[None, :, None, None] * distance


def alibi_slopes(heads: int) -> np.ndarray:
    """The slope of each head, (heads,) float64: 2^(-8/n), 2^(-16/n), ... for n = heads a power of 2.

    Otherwise the slopes of the power of 2 below, then every other one of the power above.
    https://arxiv.org/abs/2108.12409, section 3, and its authors' code for the latter.
    """
    below = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-8 / below * np.arange(1, below + 1))
    between = 2.0 ** (-4 / below * np.arange(1, 2 * (heads - below), 2))
    return np.concatenate([slopes, between])


def relative_bias(
    queries: Integer[Array, "b t"],
    keys: Integer[Array, "b s"],
    table: Float[Array, "n h"],
    *,
    bidirectional: bool = True,
    farthest: int = 128,
) -> Float[Array, "b h t s"]:
    """The row of `table` for the bucket of each distance between positions, heads first, in the table's dtype."""
    offsets = keys[:, None, :] - queries[:, :, None]  # (b, t, s), positive where the key is ahead
    buckets = relative_buckets(offsets, table.shape[0], bidirectional=bidirectional, farthest=farthest)
    return jnp.moveaxis(gather_rows(table, buckets, mode="clip"), -1, 1)


def relative_buckets(
    offsets: Integer[Array, "*t"], buckets: int, *, bidirectional: bool = True, farthest: int = 128
) -> Integer[Array, "*t"]:
    """The bucket, from 0 to `buckets` - 1, of each key's offset from its query.

    Half of the buckets are for one distance each, the rest for logarithmically wider ranges up to `farthest`, and the
    last for all beyond. If `bidirectional`, keys ahead have separate buckets, else they count as distance 0.
    https://arxiv.org/abs/1910.10683, section 2.1; the rounding is that of its authors' code.
    """
    if buckets < (4 if bidirectional else 2) or (bidirectional and buckets % 2):
        raise ValueError(f"relative_buckets: there are {buckets} buckets, but an even number of at least 4 is needed.")
    per_side = buckets // 2 if bidirectional else buckets
    distance = jnp.abs(offsets) if bidirectional else jnp.maximum(-offsets, 0)
    found = gather_rows(jnp.asarray(_bucket_of_distance(per_side, farthest)), distance, mode="clip")
    return jnp.where(offsets > 0, found + per_side, found) if bidirectional else found


def cos_and_sin(
    positions: Integer[Array, "*t"], frequencies: tuple[float, ...], dtype: Any
) -> tuple[Float[Array, "*t f"], Float[Array, "*t f"]]:
    """The cosine and sine of position times frequency, exact in `dtype`; NaN for positions outside 0 to 2^20 - 1.

    In a narrow dtype the product of a large position and a frequency has no fractional digits, and in float32 few. So
    the position is split into two digits, cosines and sines of each are looked up in tables computed in float64, and
    combined by the angle addition formulas.
    """
    name = jnp.dtype(dtype).name
    high_digit = positions // RADIX
    low_cos, low_sin = _lookup(_wave_table(frequencies, 1, name), positions - high_digit * RADIX)
    high_cos, high_sin = _lookup(_wave_table(frequencies, RADIX, name), jnp.where(positions < 0, RADIX, high_digit))
    return high_cos * low_cos - high_sin * low_sin, high_sin * low_cos + high_cos * low_sin


@functools.lru_cache(maxsize=64)
def _wave_table(frequencies: tuple[float, ...], step: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(0, RADIX * step, step)[:, None] * np.asarray(frequencies, np.float64)
    return np.cos(angles).astype(jnp.dtype(dtype)), np.sin(angles).astype(jnp.dtype(dtype))


def _lookup(table: tuple[np.ndarray, np.ndarray], digits: Any) -> tuple[Any, Any]:
    cos, sin = (gather_rows(jnp.asarray(each), digits, mode="fill") for each in table)
    return cos, sin


@functools.lru_cache(maxsize=64)
def _bucket_of_distance(buckets: int, farthest: int) -> np.ndarray:
    """The bucket of each distance from 0 to `farthest`."""
    exact = buckets // 2
    if farthest <= exact:
        raise ValueError(f"relative_buckets: farthest is {farthest}, but must be above {exact}, the exact distances.")
    distance = np.arange(farthest + 1)
    # in float32, as the models that were trained with these buckets computed them
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    share = np.log(ratio) / np.float32(np.log(farthest / exact))
    wide = exact + (share * np.float32(buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(wide, buckets - 1)).astype(np.int32)
