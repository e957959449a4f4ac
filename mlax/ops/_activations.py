"""Activations that are in use and that `jax.nn` does not have."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`max(x, 0) ** 2`, in the dtype of `x`. https://arxiv.org/abs/2109.08668, section 3."""
    positive = jax.nn.relu(x)
    return positive * positive


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x * sigmoid(1.702 x)`, in the dtype of `x`: the GELU that CLIP was trained with.

    https://arxiv.org/abs/1606.08415, section 2.
    """
    return x * jax.nn.sigmoid(1.702 * x)


def snake(x: Float[Array, "..."], frequency: float = 1.0) -> Float[Array, "..."]:
    """`x + sin(frequency x)^2 / frequency`, in the dtype of `x`: periodic about the identity, for waves.

    https://arxiv.org/abs/2006.08195, equation 3.
    """
    sine = jnp.sin(frequency * x)
    return x + sine * sine / frequency


def soft_cap(x: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """`cap * tanh(x / cap)`, in the dtype of `x`: near the identity around 0, and never beyond `cap`.

    Used on logits by Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """
    return cap * jnp.tanh(x / cap)
