"""Dropout of elements, of channels, of whole examples (stochastic depth), and alpha dropout."""

import abc
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax

from mlax import ops
from mlax.core import Layer, check_array, frozen
from mlax.nn._variables import num_channels


@frozen
class _RandomDrop(Layer):
    """What the dropout layers share: the identity in inference mode and at rate 0, and otherwise `drop`."""

    needs_floating_input: ClassVar[bool] = True

    rate: float = 0.5  # the probability of zero, in training

    def __post_init__(self):
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"{type(self).__name__}: rate is {self.rate}, but must be a probability, from 0 to 1.")

    @abc.abstractmethod
    def drop(self, x: jax.Array, rng: jax.Array) -> jax.Array:
        """The input with some of it dropped."""

    def init(self, rng, x):
        check_array(self, x)
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        if self.rate == 0.0 or inference_mode:
            return x, non_trainables
        if rng is None:
            raise ValueError(f"{self}: dropout needs a key; pass rng=, or inference_mode=True.")
        return self.drop(x, rng), non_trainables


@frozen
class Dropout(_RandomDrop):
    """Dropout: set each element to 0 with probability `rate` and divide the others by `1 - rate`.

    Shape and dtype of the input. The identity in inference mode and at rate 0. https://arxiv.org/abs/1207.0580

    >>> layer, x = nn.Dropout(0.1), jnp.ones((8, 16))
    >>> layer.fwd(x, None, rng=jax.random.key(0))[0].shape
    (8, 16)
    """

    def drop(self, x, rng):
        return ops.dropout(x, rng, self.rate)


@frozen
class ChannelDropout(_RandomDrop):
    """Channel dropout: set each channel of each example to 0 with probability `rate`, divide the others by `1 - rate`.

    (b, ..., c), with the channels along `axis`; shape and dtype of the input. The identity in inference mode and at
    rate 0. For inputs whose neighbors are correlated, such as images. https://arxiv.org/abs/1411.4280, section 3.2.

    >>> layer, x = nn.ChannelDropout(0.1), jnp.ones((8, 28, 28, 16))
    >>> layer.fwd(x, None, rng=jax.random.key(0))[0].shape
    (8, 28, 28, 16)
    """

    _: KW_ONLY
    axis: int = -1  # of the channels

    def init(self, rng, x):
        num_channels(self, x)
        return None, None

    def drop(self, x, rng):
        return ops.dropout(x, rng, self.rate, axes=(0, self.axis))


@frozen
class PathDropout(Layer):
    """Stochastic depth (drop path): set each example to 0 with probability `rate` and divide the others by `1 - rate`.

    (b, ...), of any rank; shape and dtype of the input. The identity in inference mode and at rate 0. As the last part
    of a residual block it is stochastic depth, https://arxiv.org/abs/1603.09382, with the factor of equation 5 moved
    from inference to training. With several rates, all below 1, the input is a pair of it and an index, an integer ()
    that says which applies: that of a block in a `Repeat`.

    >>> layer, x = nn.PathDropout(0.1), jnp.ones((8, 20, 64))
    >>> layer.fwd(x, None, rng=jax.random.key(0))[0].shape
    (8, 20, 64)
    """

    needs_floating_input: ClassVar[bool] = True

    rate: float | tuple[float, ...] = 0.5  # the probability of zero, in training; several: one for each index

    def __post_init__(self):
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ValueError(f"PathDropout: rate is {self.rate}, but must be a probability, from 0 to 1.")
        if isinstance(self.rate, tuple) and max(rates) == 1.0:
            raise ValueError(f"PathDropout: the rates are {self.rate}, but of several all must be below 1.")

    def init(self, rng, x):
        x, _ = self._split_index(x)
        if x.ndim == 0:
            raise ValueError(f"{self}: the input is a scalar but needs a batch axis; reshape it to (1,).")
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, index = self._split_index(x)
        if self.rate == 0.0 or inference_mode:
            return x, non_trainables
        if rng is None:
            raise ValueError(f"{self}: dropout needs a key; pass rng=, or inference_mode=True.")
        return ops.dropout(x, rng, self.rate, axes=(0,), index=index), non_trainables

    def _split_index(self, x: Any) -> tuple[Any, Any]:
        """The input, and which of several rates applies; None: there is one rate."""
        if isinstance(x, tuple) != isinstance(self.rate, tuple):
            wanted = "a pair of x and an index" if isinstance(self.rate, tuple) else "an array, for one rate"
            raise ValueError(f"{self}: the input must be {wanted}.")
        return x if isinstance(x, tuple) else (x, None)


@frozen
class AlphaDropout(_RandomDrop):
    """Alpha dropout: set elements to the negative limit of SELU with probability `rate`, then scale and shift all.

    Inputs of mean 0 and variance 1, such as the outputs of SELU, keep both. Shape and dtype of the input. The identity
    in inference mode and at rate 0. https://arxiv.org/abs/1706.02515, section 3.

    >>> layer, x = nn.AlphaDropout(0.1), jnp.ones((8, 16))
    >>> layer.fwd(x, None, rng=jax.random.key(0))[0].shape
    (8, 16)
    """

    def drop(self, x, rng):
        return ops.alpha_dropout(x, rng, self.rate)
