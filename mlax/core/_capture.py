"""capture: the outputs of parts of a model, returned beside its own."""

import functools
from typing import Any

import jax

from mlax._jax import abstract_key
from mlax.core._composite import Composite
from mlax.core._frozen import frozen, with_fields
from mlax.core._layer import Layer, Tree, split_outputs, variable_shapes
from mlax.core._parts import check_layer, parts_of
from mlax.core._paths import STACKED, match_paths
from mlax.core._surgery import layers
from mlax.core._wrappers import Tap, Wrapper


@frozen
class Capture:
    """A function with the signature of `model.fwd` that also returns the outputs of some parts; see `capture`."""

    model: Layer
    patterns: tuple[str, ...]

    def __call__(
        self,
        x: Any,
        trainables: Tree,
        non_trainables: Tree = None,
        *,
        rng: jax.Array | None = None,
        inference_mode: bool = False,
    ) -> tuple[Any, Tree, dict[str, Any]]:
        """(y, non_trainables, outputs), where `outputs` is a dict by path."""
        model = _tap_matches(self.model, self.patterns)
        y, new = model.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)
        return y, *split_outputs(new)


def capture(model: Layer, *patterns: str) -> Capture:
    """Capture intermediate activations, as forward hooks do elsewhere: `capture(model, "blocks/*")`.

    Returns a function with the signature of `model.fwd` that returns (y, non_trainables, outputs), where `outputs` is
    a dict {path: output} of the parts whose path matches any of the patterns; `"**"` matches every part. y and
    non_trainables are those of `model.fwd`, and gradients flow through the outputs. The function is pure, works under
    `jit`, `grad` and `vmap`, and is equal for equal models and patterns, so that they share one compilation.

    The layers of a `Repeat`, the slices of a `Map` and the steps of a `Recurrent` are stacked on a leading axis, in
    every mode. A second call of a part in one call of `wire` has the path "name#2", and a part that is not called, as
    in inference, none.
    """
    check_layer("capture", "the model", model)
    if not patterns:
        raise TypeError('capture: pass at least one pattern, such as "blocks/*"; "**" matches every part.')
    _tap_matches(model, patterns)  # raises for a pattern without a match
    return _shared(model, patterns)


def call_shapes(model: Layer, x: Any, *, inference_mode: bool) -> dict[str, tuple[Any, Any]]:
    """The shapes and dtypes of input and output of each part, by path, and of the model at "", on inputs like `x`."""
    tapped = _tap(model, "", frozenset(["", *layers(model)]), inputs=True)

    def fwd(x: Any, variables: tuple[Tree, Tree], rng: jax.Array) -> Any:
        return split_outputs(tapped.fwd(x, *variables, rng=rng, inference_mode=inference_mode)[1])[1]

    return jax.eval_shape(fwd, x, variable_shapes(model, x), abstract_key())


@functools.lru_cache(maxsize=4096)
def _shared(model: Layer, patterns: tuple[str, ...]) -> Capture:
    """One object for equal arguments, since JAX's compilation caches hold their function weakly."""
    return Capture(model, patterns)


@functools.lru_cache(maxsize=4096)
def _tap_matches(model: Layer, patterns: tuple[str, ...]) -> Layer:
    return _tap_parts(model, "", frozenset(match_paths(patterns, layers(model))))


def _tap_parts(layer: Layer, path: str, chosen: frozenset[str], *, inputs: bool = False) -> Layer:
    """The layer with a Tap around each chosen part below it; not around the layer itself."""
    if isinstance(layer, Composite):
        parts = parts_of(layer)
        tapped = {
            name: _tap(part, f"{path}/{name}" if path else name, chosen, inputs=inputs) for name, part in parts.items()
        }
        # as edits, so that the fields, which `wire` may read, stay as they are
        edits = dict(layer.edits) | {name: part for name, part in tapped.items() if part != parts[name]}
        return with_fields(layer, edits=tuple(edits.items())) if edits else layer
    if isinstance(layer, Wrapper):
        below = _tap(layer.layer, "/".join(filter(None, (path, STACKED))), chosen, inputs=inputs)
        inner = below if layer.has_stack else _tap_parts(layer.layer, path, chosen, inputs=inputs)
        return layer if inner == layer.layer else with_fields(layer, layer=inner)
    return layer


def _tap(layer: Layer, path: str, chosen: frozenset[str], *, inputs: bool = False) -> Layer:
    inner = _tap_parts(layer, path, chosen, inputs=inputs)
    return Tap(inner, inputs=inputs) if path in chosen else inner
