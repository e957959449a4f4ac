"""Checks of the arguments of attention."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mlax._jax import is_static, known_values
from mlax.ops._checks import check_same_dtype


def check_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    segments: Any,
    lengths: Any,
    positions: Any,
    mask: Any,
    bias: Any,
    sinks: Any,
    window: Any,
    softcap: Any,
    dropout: float,
    rng: Any,
) -> None:
    """Raise if the arguments of `attention` do not fit each other."""
    if mask is not None:
        _check_mask_dtype(mask)
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(
            f"attention: the bias is {bias.dtype}, but is added to the scores, so it must be {q.dtype}; pass a mask, "
            "True where a query attends to a key, as mask=."
        )
    check_same_dtype("attention", q=q, k=k, v=v, bias=bias, sinks=sinks)
    for name, array in {"q": q, "k": k, "v": v}.items():
        if array.ndim != 4:
            raise ValueError(f"attention: {name} has the shape {array.shape}, but must be (batch, time, heads, width).")
    (b, t, h, width), (_, s, g, _) = q.shape, k.shape
    if k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[3]) != (b, width):
        raise ValueError(
            f"attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit: k and v must have equal batch, time and "
            "heads, and q and k equal batch and width."
        )
    if g == 0 or h % g:
        raise ValueError(
            f"attention: {h} query heads are not a multiple of {g} key-value heads; pass keys and values with a number "
            "of heads that divides the queries'."
        )
    for name, array in {"mask": mask, "bias": bias}.items():
        if array is not None:
            _check_score_shape(name, array.shape, (b, h, t, s))
    _check_segments(segments, b, t, s)
    _check_pair("positions", positions, ((t,), (b, t), (1, t)), ((s,), (b, s), (1, s)))
    if sinks is not None and sinks.shape != (h,):
        raise ValueError(f"attention: sinks have the shape {sinks.shape}, but need one for each head: ({h},).")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(
            f"attention: window is {window}, but must be an integer of at least 1, the query's own position."
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap is {softcap}, but must be positive, since scores are divided by it.")
    if lengths is not None:
        check_lengths("attention", lengths, b, s, "keys")
    if dropout > 0.0 and rng is None:
        raise ValueError("attention: dropout needs a key; pass rng=.")


def check_lengths(name: str, lengths: Any, b: Any, most: Any, what: str) -> None:
    """Raise unless there is one length for each row, an integer from 0 to `most`."""
    if not hasattr(lengths, "dtype"):
        raise TypeError(f"{name}: lengths are a {type(lengths).__name__}; pass an array: jnp.asarray({lengths}).")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name}: lengths are {lengths.dtype}, but must be integers: how many {what} are not padding.")
    if lengths.shape != (b,):
        raise ValueError(f"{name}: lengths have the shape {lengths.shape}, but need one for each row: ({b},).")
    known = known_values(lengths)
    if known is None or not is_static(most):
        return
    if np.max(known, initial=0) > most:
        raise ValueError(f"{name}: lengths go up to {known.max()}, but there are only {most} {what}.")
    if np.min(known, initial=0) < 0:
        raise ValueError(f"{name}: lengths go down to {known.min()}, but must be at least 0.")


def _check_mask_dtype(mask: Any) -> None:
    if mask.dtype == np.bool_:
        return
    if jnp.issubdtype(mask.dtype, jnp.floating):
        advice = "Pass an additive mask, 0 and minus infinity, as bias=."
    else:
        advice = "Cast ones and zeros with .astype(bool)."
    raise TypeError(
        f"attention: the mask is {mask.dtype}, but must be boolean, True where a query attends to a key. {advice}"
    )


def _check_score_shape(name: str, shape: Any, sizes: Any) -> None:
    """Raise unless `shape` broadcasts to the scores, of `sizes` (b, h, t, s), with four axes."""
    if len(shape) == 4 and all(has in (1, size) for has, size in zip(shape, sizes, strict=True)):
        return
    raise ValueError(
        f"attention: the {name} has the shape {shape}, but needs four axes: batch, heads, queries, keys; each of the "
        f"size {sizes} or 1.{_indexing_advice(name, shape, sizes)}"
    )


def _indexing_advice(name: str, shape: Any, sizes: Any) -> str:
    """How a mask of fewer axes gets four, as a sentence: that of the first reading that fits."""
    b, h, t, s = sizes
    readings = {
        (t, s): ("queries and keys", "[None, None]"),
        (b, s): ("batch and keys", "[:, None, None]"),
        (b, t, s): ("batch, queries and keys", "[:, None]"),
        (h, t, s): ("heads, queries and keys", "[None]"),
        (s,): ("keys", "[None, None, None]"),
    }
    found = [(axes, index) for reading, (axes, index) in readings.items() if reading == shape]
    return " Or:".join(f" If its axes are {axes}, pass {name}{index}." for axes, index in found)


def _check_segments(segments: Any, b: Any, t: Any, s: Any) -> None:
    if segments is None:
        return
    if not isinstance(segments, tuple):
        if t != s:
            raise ValueError(
                f"attention: segments are one array, but there are {t} queries and {s} keys; pass a pair of arrays, "
                f"({b}, {t}) and ({b}, {s})."
            )
        segments = (segments, segments)
    _check_pair("segments", segments, ((b, t),), ((b, s),))


def _check_pair(name: str, pair: Any, query_shapes: Any, key_shapes: Any) -> None:
    """Raise unless `pair`, if given, is one array of integers for the queries and one for the keys, of these shapes."""
    if pair is None:
        return
    if not isinstance(pair, tuple) or len(pair) != 2 or any(each is None for each in pair):
        raise ValueError(f"attention: {name} must be a pair of arrays, those of the queries and those of the keys.")
    for of, array, shapes in zip(("queries", "keys"), pair, (query_shapes, key_shapes), strict=True):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"attention: the {name} of the {of} are {array.dtype}, but must be integers.")
        if array.shape not in shapes:
            wanted = " or ".join(map(str, shapes[:2]))
            raise ValueError(f"attention: the {name} of the {of} have the shape {array.shape}, but must be {wanted}.")
