"""What the language models share."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def last_tokens(x: Any, lengths: Any = None) -> Any:
    """The last token of each row, (b, t, d) to (b, 1, d): the one before its padding, if there are lengths (b,)."""
    if lengths is None:
        return x[:, -1:]
    last = jnp.maximum(lengths.astype(np.int32), 1) - 1
    return jnp.take_along_axis(x, last[:, None, None], axis=1)
