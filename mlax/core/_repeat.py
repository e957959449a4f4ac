"""Repeat: one layer n times in a row, over one stacked set of variables."""

import functools
from dataclasses import KW_ONLY
from typing import Any, Literal, get_args

import jax
from jax import lax

from mlax.core._fence import fenced
from mlax.core._frozen import frozen
from mlax.core._layer import Tree, cached_by_shape, variables_like
from mlax.core._notes import brief, located, signature
from mlax.core._remat import Remat
from mlax.core._shape_key import shape_key
from mlax.core._stacked import init_stacked, unstacked
from mlax.core._wrapper import Wrapper

Mode = Literal["scan", "remat", "unroll"]


@frozen
class Repeat(Wrapper):
    """Apply `layer` `times` times, each time to the output of the time before, with variables of its own.

    Output like input. Variables: those of `layer`, each with a leading axis of `times`, in every mode:
    - "scan" compiles the layer once, whatever `times` is;
    - "remat" is a scan that stores only each layer's input for the backward pass;
    - "unroll" writes the layer out `times` times, which compiles longer and may run faster.
    """

    times: int
    _: KW_ONLY
    mode: Mode = "scan"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.times, int) or self.times < 1:
            raise ValueError(f"Repeat: times is {self.times!r}, but must be a whole number of at least 1.")
        if self.mode not in get_args(Mode):
            raise ValueError(f"Repeat: mode is {self.mode!r}, but must be one of {', '.join(get_args(Mode))}.")

    def init(self, rng, x):
        _refuse_changing(self, x)
        return init_stacked(self.layer, rng, x, self.times)

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        keys = None if rng is None else jax.random.split(rng, self.times)
        return self.with_keys(x, trainables, non_trainables, keys, inference_mode)

    def with_keys(
        self, x: Any, trainables: Tree, non_trainables: Tree, keys: jax.Array | None, inference_mode: bool
    ) -> tuple[Any, Tree]:
        """As `fwd`, the key of each time given."""
        layer = Remat(self.layer, prevent_cse=False) if self.mode == "remat" else self.layer

        def step(x: Any, own: tuple[Tree, Tree, jax.Array | None]) -> tuple[Any, Tree]:
            trainables, non_trainables, key = own
            y, new = layer.fwd(x, trainables, non_trainables, rng=key, inference_mode=inference_mode)
            if signature(y) != signature(x):
                raise ValueError(
                    f"{brief(self)}: the layer turns {signature(x)} into {signature(y)}, but each time is fed with the "
                    "output of the time before; its output must be like its input."
                )
            return y, new

        stacked = (trainables, non_trainables, keys)
        if self.mode != "unroll":
            return lax.scan(step, x, stacked, length=self.times)
        news = []  # unfenced, 48 blocks compile two to four times as long on a CPU and run slower, fused time and again
        for time, own in enumerate(unstacked(stacked, self.times)):
            with located(str(time), x):
                x, new = step(*fenced((x, own)))
                news.append(new)
        return x, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *news)

    def check_variables(self, x: Any, trainables: Tree, non_trainables: Tree) -> None:
        for leaf in jax.tree.leaves((trainables, non_trainables)):
            if leaf.shape[:1] != (self.times,):
                raise ValueError(
                    f"{brief(self)}: a variable has the shape {leaf.shape}, but each must have a leading axis of "
                    f"{self.times}; pass what init returned for this layer."
                )


@cached_by_shape
def _refuse_changing(repeat: Repeat, x: Any) -> None:
    """Trace `fwd`, which refuses a layer that changes the shape, in the way of a composite, which then need not."""
    each = variables_like(repeat.layer, x)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((repeat.times, *leaf.shape), leaf.dtype), each)
    fwd = jax.jit(repeat.fwd, static_argnames="inference_mode")
    jax.eval_shape(functools.partial(fwd, inference_mode=True), x, *stacked, rng=shape_key())
