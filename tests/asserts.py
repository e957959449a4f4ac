"""Assertions that the tests share: about pytrees, leaf by leaf, and about errors."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def assert_close(found: Any, wanted: Any, rtol: float = 1e-6, atol: float | None = None, message: str = "") -> None:
    """Every leaf is within `rtol` of the wanted one, relative, plus `atol`, absolute; `rtol` where none is given."""
    for path, one, other in _pairs(found, wanted):
        np.testing.assert_allclose(one, other, rtol, rtol if atol is None else atol, err_msg=f"{path} {message}")


def assert_close_to_scale(found: Any, wanted: Any, tolerance: float = 1e-5, least: float = 1.0) -> None:
    """Every leaf is within `tolerance`, relative, plus `tolerance` times its largest magnitude, or times `least`."""
    for path, one, other in _pairs(found, wanted):
        scale = np.abs(other).max(initial=least)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * scale, err_msg=path)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The compilations inside the block, found or not in JAX's cache on disk."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def raised(kind: type[Exception], function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The error of a call, and its notes."""
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    return str(caught.value), "\n".join(getattr(caught.value, "__notes__", []))


def assert_raises(call: Callable[[], Any], error: type[Exception], words: Iterable[str]) -> None:
    """The call raises this error, with all of these words in its message."""
    with pytest.raises(error) as caught:
        call()
    message = caught.value.args[0]  # of a KeyError, not its repr
    missing = [word for word in words if word not in message]
    assert not missing, message


def unequal_leaves(found: Any, wanted: Any) -> list[str]:
    """The paths of the leaves that differ in dtype, shape or any bit; the trees have to have the same structure."""
    return [path for path, one, other in _leaf_pairs(found, wanted) if _bits(one) != _bits(other)]


def _pairs(found: Any, wanted: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Leaves in float64, which have to have the same shapes."""
    pairs = [(path, np.asarray(a, np.float64), np.asarray(b, np.float64)) for path, a, b in _leaf_pairs(found, wanted)]
    shapes = {path: (one.shape, other.shape) for path, one, other in pairs if one.shape != other.shape}
    assert not shapes
    return pairs


def _leaf_pairs(found: Any, wanted: Any) -> list[tuple[str, Any, Any]]:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    leaves = jax.tree.leaves_with_path(found)
    return [
        (jax.tree_util.keystr(path), one, other)
        for (path, one), other in zip(leaves, jax.tree.leaves(wanted), strict=True)
    ]


def _bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = jax.random.key_data(leaf) if jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key) else leaf
    return str(getattr(leaf, "dtype", type(leaf))), np.shape(array), np.asarray(array).tobytes()
