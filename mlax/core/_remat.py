"""Remat: a layer whose inner values are computed again in the backward pass and not stored."""

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import jax

from mlax.core._frozen import frozen
from mlax.core._layer import Tree
from mlax.core._wrapper import Wrapper


@frozen
class Remat(Wrapper):
    """Trade time for memory on `layer` by `jax.checkpoint`; the numbers stay the same.

    `policy` is one of `jax.checkpoint_policies` and says what is stored all the same; None stores only inputs.
    `prevent_cse=False` is right inside a scan, where XLA cannot undo the trade anyway.
    """

    _: KW_ONLY
    policy: Callable[..., bool] | None = None
    prevent_cse: bool = True

    def fwd(self, x, trainables, non_trainables=None, *, rng=None, inference_mode=False):
        def run(x: Any, trainables: Tree, non_trainables: Tree, rng: jax.Array | None) -> tuple[Any, Tree]:
            return self.layer.fwd(x, trainables, non_trainables, rng=rng, inference_mode=inference_mode)

        again = jax.checkpoint(run, policy=self.policy, prevent_cse=self.prevent_cse)
        return again(x, trainables, non_trainables, rng)
