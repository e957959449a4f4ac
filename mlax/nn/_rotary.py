"""Rotary: queries and keys turned by their positions, and the ways to stretch them to longer contexts."""

import abc
from dataclasses import KW_ONLY

from mlax.core import Layer, frozen
from mlax.ops import linear_frequencies, llama3_frequencies, ntk_frequencies, rotary, rotary_frequencies


@frozen
class RotaryScaling(abc.ABC):
    """A description of how rotary frequencies change for contexts longer than those trained on."""

    @abc.abstractmethod
    def frequencies(self, width: int, base: float) -> tuple[float, ...]:
        """The frequencies of `width` features."""


@frozen
class LinearScaling(RotaryScaling):
    """All frequencies divided by `factor`. https://arxiv.org/abs/2306.15595, equation 4."""

    factor: float

    def frequencies(self, width, base):
        return linear_frequencies(rotary_frequencies(width, base), self.factor)


@frozen
class NTKScaling(RotaryScaling):
    """A larger base, so that only the lowest frequency is divided by `factor`. https://arxiv.org/abs/2309.00071."""

    factor: float

    def frequencies(self, width, base):
        return ntk_frequencies(width, base, self.factor)


@frozen
class Llama3Scaling(RotaryScaling):
    """Low frequencies divided by `factor`, high ones kept, as Llama 3.1 does: the defaults are its numbers.

    A wave is low below `low` turns in `length` positions, and high above `high`. https://arxiv.org/abs/2407.21783
    """

    _: KW_ONLY
    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    length: int = 8192

    def frequencies(self, width, base):
        return llama3_frequencies(rotary_frequencies(width, base), self.factor, self.low, self.high, self.length)


@frozen
class Rotary(Layer):
    """Turn pairs of features by angles that grow with the position: (b, t, h, k) to the same, in its dtype.

    Positions count from 0; the input may also be a pair of it and its positions, (t,) or (b, t). `width` features,
    all unless given, are turned and the rest left. `interleaved` pairs neighbours, as GPT-J does, and otherwise
    halves, as Llama and GPT-NeoX do. https://arxiv.org/abs/2104.09864, equation 34.
    """

    _: KW_ONLY
    base: float = 10_000.0
    width: int | None = None
    scaling: RotaryScaling | None = None
    interleaved: bool = False

    def __post_init__(self):
        if self.width is not None and (not isinstance(self.width, int) or self.width < 2 or self.width % 2):
            raise ValueError(
                f"Rotary: width is {self.width!r}, but must be an even number, since features turn in pairs."
            )

    def init(self, rng, x):
        x = x[0] if isinstance(x, tuple) else x
        if x.ndim != 4:
            raise ValueError(f"{self}: the input has the shape {x.shape}, but must be (batch, time, heads, width).")
        width = x.shape[-1] if self.width is None else self.width
        if width % 2:
            raise ValueError(
                f"{self}: the input {x.shape} has heads of width {width}, which is odd, but features turn in pairs; "
                "make it even, or turn only an even number of them with width=."
            )
        if width > x.shape[-1]:
            raise ValueError(f"{self}: the input {x.shape} has heads of width {x.shape[-1]} only.")
        return None, None

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        x, positions = x if isinstance(x, tuple) else (x, None)
        width = x.shape[-1] if self.width is None else self.width
        if self.scaling is None:
            frequencies = rotary_frequencies(width, self.base)
        else:
            frequencies = self.scaling.frequencies(width, self.base)
        return rotary(x, positions, frequencies=frequencies, interleaved=self.interleaved), non_trainables
