"""Metrics: numbers by name that lie on the device as one array."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax._jax import at_least_float32, widest_dtype
from mlax.core import NoMatch


class Metrics(Mapping[str, jax.Array]):
    """What a step gave, by name: each () or, with several steps a call, (many,), in float32 or wider.

    They are one array, so that all of them come to the host in one transfer: `metrics.numbers()`. Until something is
    read, nothing waits for the step.
    """

    def __init__(self, names: tuple[str, ...], packed: jax.Array):
        self.names = names
        self.packed = packed  # (names,) or (many, names)

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self.names:
            raise NoMatch(f"{name!r}; there are {', '.join(self.names)}")
        at = self.names.index(name)
        return lax.index_in_dim(self.packed, at, axis=-1, keepdims=False)  # whose index is part of the program

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Metrics({self.numbers()})"

    def numbers(self) -> dict[str, np.ndarray]:
        """All of them on the host; waits for the step."""
        return dict(zip(self.names, np.moveaxis(np.asarray(self.packed), -1, 0), strict=True))


def packed(metrics: Mapping[str, jax.Array]) -> jax.Array:
    """The metrics as one array, in the widest dtype that occurs; what is no float as 0, 1, ..."""
    dtype = widest_dtype(
        at_least_float32(value.dtype) for value in metrics.values() if jnp.issubdtype(value.dtype, jnp.floating)
    )
    return jnp.stack([value.astype(dtype) for value in metrics.values()], axis=-1)
