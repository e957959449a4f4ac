"""The dtype that a layer keeps its state in."""

from typing import Any

import jax.numpy as jnp

from mlax.core import flatten_paths, short_repr


def check_state_dtype(layer: Any, state: Any, dtype: Any) -> None:
    """Refuse state of another dtype than the one that the layer computes it in: nothing is cast unasked."""
    for path, leaf in flatten_paths(state).items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
            raise TypeError(
                f"{short_repr(layer)}: {path} is {leaf.dtype} but is computed in {dtype}, and nothing is cast unasked; "
                f"pass accum_dtype={str(leaf.dtype)!r} (mlax.dtypes.mixed_bfloat16 does), or cast the state."
            )
