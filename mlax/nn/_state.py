"""The dtype that a layer keeps its state in."""

from typing import Any

import jax.numpy as jnp

from mlax.core._notes import brief
from mlax.core._paths import flat


def check_state_dtype(layer: Any, state: Any, dtype: Any) -> None:
    """Refuse state of another dtype than the one that the layer computes it in: nothing is cast unasked."""
    for path, leaf in flat(state).items():
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
            raise TypeError(
                f"{brief(layer)}: {path} is {leaf.dtype} but is computed in {dtype}, and nothing is cast unasked; "
                f"pass accum_dtype={str(leaf.dtype)!r} (mlax.dtypes.mixed_bfloat16 does), or cast the state."
            )
