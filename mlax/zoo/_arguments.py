"""What the functions that generate text check of their arguments, before anything is compiled."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mlax import nn
from mlax.core import Layer, check_layer, find_layers
from mlax.zoo._decoder import decoder
from mlax.zoo._llama import Llama
from mlax.zoo._sampling import Greedy, Sample

Padding = Literal["right", "left"]


def check_prompts(
    name: str, model: Layer, prompts: Any, lengths: Any, max_new_tokens: int, padding: Padding
) -> tuple[Any, Any]:
    """The prompts and lengths as arrays of int32, or an error that says what is wrong with them."""
    check_layer(name, "the model", model)
    _check_decoder(model)
    prompts = _as_array(name, prompts)
    if prompts.ndim != 2 or prompts.dtype.kind not in "iu" or 0 in prompts.shape:
        raise ValueError(
            f"{name}: prompts are {jnp.result_type(prompts)}{list(prompts.shape)}, but must be integers (b, t): pad "
            "texts of different lengths, and pass their lengths."
        )
    check_max_new_tokens(name, max_new_tokens)
    if padding not in ("right", "left"):
        raise ValueError(f"{name}: padding is {padding!r}, but must be 'right' or 'left'.")
    longest = prompts.shape[1] + max_new_tokens - 1
    request = f"prompts of {prompts.shape[1]} tokens and {max_new_tokens} new ones need {longest} positions"
    check_positions(name, model, longest, request, "pass fewer max_new_tokens, or shorter prompts")
    lengths = None if lengths is None else _check_lengths(name, prompts, lengths)
    check_vocabulary(name, model, _tokens_within(prompts, lengths, padding))
    return jnp.asarray(prompts, np.int32), None if lengths is None else jnp.asarray(lengths, np.int32)


@functools.lru_cache(maxsize=64)
def _check_decoder(model: Layer) -> None:
    decoder(model, 1)  # raises unless the model can be one


def _as_array(name: str, prompts: Any) -> Any:
    """An array, of NumPy if the values are on the host."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(prompts)):  # tracers, too
        return jnp.asarray(prompts)
    try:
        array = np.asarray(prompts)
    except ValueError:
        raise ValueError(
            f"{name}: prompts are rows of different lengths; pad them, and pass their lengths: [[1, 2, 3], [4, 0, 0]] "
            "and lengths=[3, 1]. A tokenizer does that: prompts, lengths = tokenizer.encode(texts)."
        ) from None
    if array.dtype.kind in "USO":
        raise ValueError(
            f"{name}: prompts are texts, but must be tokens (b, t): prompts, lengths = tokenizer.encode(texts), with "
            "zoo.load_tokenizer(folder), say."
        )
    return array


def _check_lengths(name: str, prompts: Any, lengths: Any) -> Any:
    b, t = prompts.shape
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if lengths.shape != (b,) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: lengths are {jnp.result_type(lengths)}{list(lengths.shape)}, but must be integers ({b},)."
        )
    if _is_known(lengths):
        lengths = np.asarray(lengths)
        if not (lengths.min() > 0 and lengths.max() <= t):
            raise ValueError(f"{name}: lengths are {lengths.min()} to {lengths.max()}, but must be between 1 and {t}.")
    return lengths


def _is_known(array: Any) -> bool:
    """Whether this process can read the values."""
    return not isinstance(array, Tracer) and (not isinstance(array, jax.Array) or array.is_fully_addressable)


def _tokens_within(prompts: Any, lengths: Any, padding: Padding) -> Any:
    """The tokens (n,) that are not padding, or None if they are not known."""
    if not _is_known(prompts) or not _is_known(lengths):
        return None
    prompts = np.asarray(prompts)
    if lengths is None:
        return prompts.ravel()
    places = np.arange(prompts.shape[1])
    places = places if padding == "right" else places[::-1]
    return prompts[places < np.asarray(lengths)[:, None]]


def check_vocabulary(name: str, model: Layer, tokens: Any) -> None:
    """Raise for tokens (n,) that the model has no embedding of; None: not known."""
    sizes = [layer.vocabulary for _, layer in find_layers(model, nn.Embed)]
    if tokens is None or not sizes:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= max(sizes):
        raise ValueError(
            f"{name}: the tokens of the prompts are {low} to {high}, but the model has {max(sizes)}, from 0; the "
            "tokenizer must be that of the model, and padding must be outside of the lengths."
        )


def check_positions(name: str, model: Layer, longest: int, request: str, remedy: str) -> None:
    """Raise if the model has fewer positions than the longest text."""
    for path, layer in find_layers(model, nn.LearnedPositions):
        if layer.length < longest:
            raise ValueError(f"{name}: {request}, but {path} has {layer.length} positions; {remedy}.")
    for _, layer in find_layers(model, Llama):
        if layer.positions < longest and layer.rotary.scaling is None:  # which is for longer texts
            raise ValueError(
                f"{name}: {request}, but Llama has {layer.positions} positions, those of its training; {remedy}, or "
                f"set more, at your own risk: dataclasses.replace(model, positions={longest})."
            )


def check_max_new_tokens(name: str, max_new_tokens: Any) -> None:
    """Raise unless it is a number of tokens."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"{name}: max_new_tokens is {max_new_tokens!r}, but must be an integer of at least 1.")


def check_inputs(name: str, inputs: Any) -> tuple[Any, ...]:
    """The inputs of an encoder, a tuple."""
    if not isinstance(inputs, tuple | list):
        raise ValueError(
            f"{name}: inputs is a {type(inputs).__name__}, but must be a tuple: inputs=(source, source_lengths), or "
            "inputs=(source,)."
        )
    return tuple(inputs)


def check_stop(name: str, stop: int | Sequence[int]) -> Any:
    """The stop tokens (k,), int32."""
    array = np.asarray(stop)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: stop is {stop!r}, but must be a token or a sequence of them, integers, as tokenizer.stop is; () "
            "for none."
        )
    return np.atleast_1d(array.astype(np.int32))


def check_sampler(name: str, sampler: Any, rng: Any) -> Any:
    """The key to sample with, None for Greedy, or an error if there is none."""
    if not isinstance(sampler, Greedy | Sample):
        raise ValueError(f"{name}: sampler is {sampler!r}, but must be zoo.Greedy() or zoo.Sample(...).")
    if isinstance(sampler, Greedy):
        return None  # so that a key changes nothing, nor recompiles
    if rng is None:
        raise ValueError(f"{name}: Sample needs a key; pass rng=jax.random.key(0), another one for another text.")
    dtype = getattr(rng, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32):
        raise ValueError(f"{name}: rng is {rng!r}, but must be a key: jax.random.key(0).")
    return rng


@contextlib.contextmanager
def explain_errors(name: str, model: Layer, prompts: Any, lengths: Any, inputs: tuple[Any, ...]) -> Iterator[None]:
    """Raise what a call of the model lacks in place of its error, if that is known."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        given = (prompts, lengths, *inputs) if lengths is not None or inputs else prompts
        if _accepts(model, given):
            raise
        model_name = type(model).__name__
        if not inputs and any(layer.cross for _, layer in find_layers(model, nn.MultiHeadAttention)):
            raise ValueError(
                f"{name}: {model_name} is an encoder-decoder, which needs a source; pass inputs=(source, "
                "source_lengths)."
            ) from error
        if lengths is not None and not inputs and _accepts(model, prompts):
            raise ValueError(
                f"{name}: {model_name} takes tokens, but no lengths: write wire(self, sub, tokens, lengths=None), and "
                'pass them on to attention, sub.attend({"x": x, "lengths": lengths}).'
            ) from error
        raise


def _accepts(model: Layer, inputs: Any) -> bool:
    """Whether `init` takes such inputs."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), inputs)
    try:
        jax.eval_shape(functools.partial(model.init, jax.random.key(0)), shapes)
    except Exception:  # whatever a layer raises
        return False
    return True
