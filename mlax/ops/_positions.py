"""Position encodings: sinusoidal, rotary, ALiBi and relative bias."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, Real

from mlax._jax import is_static, known_values
from mlax.core import check_is_dtype
from mlax.ops._linear import gather_rows

RADIX = 1024  # positions are split into two digits to this base
POSITIONS = RADIX * RADIX  # those with known cosines and sines


def sinusoids(
    positions: Real[Array | np.ndarray, "*t"],
    width: int,
    dtype: Any,
    *,
    base: float = 10_000.0,
    accum_dtype: Any = "float32",
) -> Float[Array, "*t {width}"]:
    """Sinusoidal position embeddings: alternating sines and cosines of each position, `width` of them, with frequencies
    from 1 to 1 / base.

    They are computed in `accum_dtype`, or `dtype` if that is wider or None is given, for positions as in `rotary`; or
    for floating ones, such as the time of a diffusion model, usually multiplied by 1000: for these the products with
    the frequencies are rounded to that dtype.
    https://arxiv.org/abs/1706.03762, section 3.5.
    """
    check_is_dtype("sinusoids", dtype=dtype, accum_dtype=accum_dtype)
    if width % 2:
        raise ValueError(f"sinusoids: the width is {width}, but must be even: each frequency has a sine and a cosine.")
    frequencies = base ** (-np.arange(0, width, 2) / width)
    if jnp.issubdtype(positions.dtype, jnp.floating):
        wide = max(map(jnp.dtype, (dtype, accum_dtype or dtype)), key=lambda each: jnp.finfo(each).bits)
        angles = jnp.asarray(positions, wide)[..., None] * frequencies.astype(wide)
        waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype)
        return waves.reshape(*positions.shape, width)
    check_positions("sinusoids", positions, POSITIONS)
    cos, sin = cos_and_sin(positions, tuple(frequencies.tolist()), dtype, accum_dtype)
    return jnp.stack([sin, cos], axis=-1).reshape(*positions.shape, width)


def rotary(
    x: Float[Array, "b t h k"],
    positions: Integer[Array | np.ndarray, "*b t"] | None = None,
    *,
    frequencies: tuple[float, ...] | None = None,
    interleaved: bool = False,
    magnitude: float = 1.0,
    accum_dtype: Any = "float32",
) -> Float[Array, "b t h k"]:
    """Rotary position embeddings (RoPE): rotate each pair of features by position times the pair's frequency, in the
    dtype of `x`.

    `frequencies` are `rotary_frequencies(k)` unless given; n of them rotate the first 2n features and leave the rest.
    Feature i is paired with i + n, as in Llama's weights, or 2i with 2i + 1 if `interleaved`, as in the paper:
    https://arxiv.org/abs/2104.09864, equation 34. The rotated features are scaled by `magnitude`.

    Positions are 0, 1, 2, ... unless given, and at most 2^20 - 1; one outside of that range is an error where it is
    known, as it is outside of `jit`, and gives NaN where it is traced. Cosines and sines are exact up to a rounding in
    `accum_dtype`, and then rounded to the dtype of `x`; with None all is in that dtype, and four roundings from
    position 1,024 on. Positions below 1,024 that are not given take no arithmetic at all.
    """
    check_is_dtype("rotary", accum_dtype=accum_dtype)
    if x.ndim != 4:
        raise ValueError(f"rotary: the input has the shape {x.shape}, but must be (batch, time, heads, width).")
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1])
    width = 2 * len(frequencies)
    if width > x.shape[-1]:
        raise ValueError(
            f"rotary: {len(frequencies)} frequencies rotate {width} features, but the input {x.shape} has "
            f"{x.shape[-1]}."
        )
    at: Any = default_positions(x.shape[1]) if positions is None else positions
    check_positions("rotary", at, POSITIONS, x.shape[:2])
    waves = cos_and_sin(at[None] if at.ndim == 1 else at, frequencies, x.dtype, accum_dtype)
    cos, sin = ((wave if magnitude == 1.0 else wave * magnitude)[:, :, None] for wave in waves)  # (b, t, 1, n)
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


def dynamic_ntk_frequencies(width: int, base: float, factor: float, length: int, time: int) -> tuple[float, ...]:
    """`ntk_frequencies` by a factor that grows with the sequence's length `time`, from 1 at the pretraining's `length`.

    The factor is `factor * time / length - (factor - 1)`. https://arxiv.org/abs/2309.00071, section 3.3, as Hugging
    Face's Transformers scales it.
    """
    return ntk_frequencies(width, base, factor * max(time, length) / length - (factor - 1))


def yarn_frequencies(
    width: int, base: float, factor: float, length: int, fast: float = 32.0, slow: float = 1.0
) -> tuple[float, ...]:
    """Frequencies by NTK-by-parts: those with many periods within the pretraining's `length` stay.

    With more than `fast` periods a frequency stays, with fewer than `slow` it is divided by `factor`, and between the
    two it is interpolated, linearly in its index, from a whole index to a whole index.
    https://arxiv.org/abs/2309.00071, section 3.2.
    """
    frequencies = rotary_frequencies(width, base)

    def index_of(periods: float) -> float:
        return width * math.log(length / (periods * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(index_of(fast)), 0), min(math.ceil(index_of(slow)), width - 1)
    shares = [min(max((i - first) / max(last - first, 1e-3), 0.0), 1.0) for i in range(width // 2)]
    return tuple(
        share * frequency / factor + (1 - share) * frequency
        for share, frequency in zip(shares, frequencies, strict=True)
    )


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
    """ALiBi: the bias `-slope * |query position - key position|` to add to scores (b, h, t, s), in `dtype`.

    `attention(..., alibi=True)` adds the same without storing it.
    """
    check_is_dtype("alibi", dtype=dtype)
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
    """Relative position bias: the row of `table` for the bucket of each distance between positions, heads first, in the
    table's dtype.
    """
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


def default_positions(time: Any) -> Any:
    """The positions 0, 1, 2, ..., (t,) int32: constants, unless `time` is symbolic."""
    return np.arange(time, dtype=np.int32) if is_static(time) else jnp.arange(time, dtype=np.int32)


def check_positions(name: str, positions: Any, end: int, sizes: Any = None) -> None:
    """Raise unless positions are integers, where known from 0 to `end` - 1, and of a shape that fits `sizes` (b, t)."""
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"{name}: positions are {positions.dtype}, but must be integers.")
    if sizes is not None and positions.shape not in (sizes, (1, sizes[1]), sizes[1:]):
        raise ValueError(
            f"{name}: positions have the shape {positions.shape}, but must be ({sizes[1]},) or {sizes}: one for each "
            "token."
        )
    known = known_values(positions)
    if known is not None and known.size and (known.min() < 0 or known.max() >= end):
        raise ValueError(f"{name}: positions go from {known.min()} to {known.max()}, but must be from 0 to {end - 1}.")


def cos_and_sin(
    positions: Integer[Array | np.ndarray, "*t"], frequencies: tuple[float, ...], dtype: Any, accum_dtype: Any = None
) -> tuple[Float[Array, "*t f"], Float[Array, "*t f"]]:
    """The cosine and sine of position times frequency, in `dtype`; NaN for positions outside 0 to 2^20 - 1.

    In a narrow dtype the product of a large position and a frequency has no fractional digits, and in float32 few. So
    the position is split into two digits, cosines and sines of each are looked up in tables computed in float64, and
    combined by the angle addition formulas, in `accum_dtype` if it is given and wider than `dtype`. Few positions that
    are constants give constants.
    """
    if isinstance(positions, np.ndarray) and positions.size <= RADIX:
        angles = positions[..., None] * np.asarray(frequencies, np.float64)
        return jnp.asarray(np.cos(angles).astype(jnp.dtype(dtype))), jnp.asarray(
            np.sin(angles).astype(jnp.dtype(dtype))
        )
    positions = jnp.asarray(positions)
    wide = max(map(jnp.dtype, (dtype, accum_dtype or dtype)), key=lambda each: jnp.finfo(each).bits)
    high_digit = positions // RADIX
    low_cos, low_sin = _lookup(_wave_table(frequencies, 1, wide.name), positions - high_digit * RADIX)
    high_digit = jnp.where(positions < 0, RADIX, high_digit)
    high_cos, high_sin = _lookup(_wave_table(frequencies, RADIX, wide.name), high_digit)
    cos, sin = high_cos * low_cos - high_sin * low_sin, high_sin * low_cos + high_cos * low_sin
    return cos.astype(dtype), sin.astype(dtype)


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
