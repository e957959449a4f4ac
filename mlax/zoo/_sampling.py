"""How the next token is chosen: greedily, or by sampling with temperature, top-k, top-p, min-p and a penalty."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlax.core import Documented, frozen, with_fields


@frozen
class Greedy(metaclass=Documented):
    """Greedy decoding: the likeliest token, and the first of several that are equally likely.

    >>> model = zoo.GPT2(vocabulary=50, positions=16, width=8, depth=2, heads=2)
    >>> trainables, _ = model.init(jax.random.key(0), model.example_input())
    >>> prompts = jnp.ones((2, 3), "int32")
    >>> zoo.generate(model, trainables, prompts, max_new_tokens=4, sampler=zoo.Greedy()).tokens.shape
    (2, 4)
    """

    def choose(self, rng: Any, logits: Any, seen: Any = None, numbers: Mapping[str, Any] | None = None) -> Any:
        """The next token (b,) of each row of logits (b, v), -1 if they are NaN."""
        return mark_invalid(logits, jnp.argmax(logits, axis=-1).astype(np.int32))

    def numbers(self) -> dict[str, Any]:
        """The numbers that may change without another compilation."""
        return {}

    def structure(self) -> "Greedy":
        """The sampler without its numbers: what a compiled program depends on."""
        return self

    @property
    def needs_seen(self) -> bool:
        """Whether `choose` reads which tokens are in a row already."""
        return False


@frozen
class Sample(metaclass=Documented):
    """Sample the next token from the softmax of the logits, after these filters, in this order, each None for none.

    Tokens of the prompt and of the text so far are made less likely by `repetition_penalty` (Keskar et al.,
    https://arxiv.org/abs/1909.05858, section 4.1); logits are divided by `temperature`; of all tokens `top_k` are kept,
    of these those that reach the probability `top_p` together (nucleus sampling, https://arxiv.org/abs/1904.09751), and
    of these those at least `min_p` times as likely as the likeliest (https://arxiv.org/abs/2407.01082). The order is
    that of Hugging Face's transformers. Another value recompiles only for `top_k`.

    >>> logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    >>> int(zoo.Sample(top_p=0.3).choose(jax.random.key(0), logits)[0])
    0
    """

    _: KW_ONLY
    temperature: float = 1.0  # below 1 sharper, above 1 more even
    top_k: int | None = None  # tokens to sample among, at most
    top_p: float | None = None  # the probability that those kept reach together, the likeliest first
    min_p: float | None = None  # the least probability, as a share of that of the likeliest
    repetition_penalty: float | None = None  # above 1: tokens of the text so far are less likely

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ValueError(
                f"Sample: temperature is {self.temperature}, but must be above 0; without randomness, use zoo.Greedy()."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Sample: top_k is {self.top_k}, but must be at least 1; None keeps all tokens.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"Sample: {name} is {value}, but must be a probability; None keeps all tokens.")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0.0:
            raise ValueError(f"Sample: repetition_penalty is {self.repetition_penalty}, but must be above 0.")

    def choose(self, rng: Any, logits: Any, seen: Any = None, numbers: Mapping[str, Any] | None = None) -> Any:
        """The next token (b,) of each row of logits (b, v), -1 if they are NaN.

        `seen` (b, v) says which tokens a row has already.
        """
        values, tokens = self.filter(logits, seen, numbers)
        token = jax.random.categorical(rng, values).astype(np.int32)
        if tokens is not None:
            token = jnp.take_along_axis(tokens, token[:, None], axis=-1)[:, 0]
        return mark_invalid(logits, token)

    def filter(self, logits: Any, seen: Any = None, numbers: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """The logits to sample from, -inf for what is filtered out, and their tokens (b, k) if they are sorted."""
        get = self.numbers() if numbers is None else numbers
        values, tokens = logits.astype(np.float32), None
        if self.repetition_penalty is not None:
            penalty = get["repetition_penalty"]
            values = jnp.where(seen, jnp.where(values < 0, values * penalty, values / penalty), values)
        values = values / get["temperature"]
        if self.top_k is not None and self.top_k < values.shape[-1]:
            values, tokens = lax.top_k(values, self.top_k)  # (b, k), the likeliest first
        if self.top_p is not None:
            values = _keep_nucleus(values, get["top_p"], is_sorted=tokens is not None)
        if self.min_p is not None:
            least = values.max(axis=-1, keepdims=True) + jnp.log(get["min_p"])
            values = jnp.where(values < least, -jnp.inf, values)
        return values, tokens

    def numbers(self) -> dict[str, Any]:
        """The numbers that may change without another compilation."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty")
        return {name: np.float32(getattr(self, name)) for name in names if getattr(self, name) is not None}

    def structure(self) -> "Sample":
        """The sampler without its numbers: what a compiled program depends on."""
        return with_fields(self, **dict.fromkeys(self.numbers(), 1.0))

    @property
    def needs_seen(self) -> bool:
        """Whether `choose` reads which tokens are in a row already."""
        return self.repetition_penalty is not None


def mark_invalid(logits: Any, token: Any) -> Any:
    """The token (b,), or -1 if its logit is NaN, which a maximum is if any is, or -inf, if all are.

    It reads one logit of each row, so that a loop over tokens has no further pass over all of them.
    """
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return jnp.where(chosen > -jnp.inf, token, np.int32(-1))


def _keep_nucleus(values: Any, top_p: Any, *, is_sorted: bool) -> Any:
    """The likeliest tokens, up to and with the one that reaches `top_p`; the others -inf."""
    ordered = values if is_sorted else -jnp.sort(-values, axis=-1)
    odds = jax.nn.softmax(ordered, axis=-1)
    is_kept = jnp.cumsum(odds, axis=-1) - odds < top_p  # by the probability of all that are likelier
    is_kept = is_kept.at[:, 0].set(True)
    if is_sorted:
        return jnp.where(is_kept, values, -jnp.inf)
    least = jnp.where(is_kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(values < least, -jnp.inf, values)
