"""Rows of the optimizers: one for each public one, and the ways in which its structure can differ."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mlax import optim

SHAPES = {"dense": {"bias": (4,), "kernel": (8, 4)}, "stack": {"kernel": (2, 4, 8)}, "temperature": ()}


def tree(dtype: str, seed: int = 0) -> Any:
    """Trainables, or gradients."""
    draws = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(draws.normal(size=shape), dtype), SHAPES, is_leaf=lambda node: isinstance(node, tuple)
    )


def loss(trainables: Any) -> jax.Array:
    """A loss whose gradient differs from place to place."""
    leaves = jax.tree.leaves(trainables)
    return sum((jnp.sum(leaf * leaf / 2 + jnp.cos(leaf)) for leaf in leaves), jnp.zeros((), leaves[0].dtype))


@dataclasses.dataclass(frozen=True)
class Row:
    """An optimizer, and what its `update` needs besides."""

    optimizer: optim.Optimizer
    extra: tuple[tuple[str, Any], ...] = ()
    declares: bool = True  # its slots; Optax does not

    @property
    def update(self) -> Callable[..., Any]:
        """`update`, ready for `jax.jit`: the method itself if nothing is missing."""
        return functools.partial(self.optimizer.update, **dict(self.extra)) if self.extra else self.optimizer.update


ADAM = optim.Adam(1e-2)
STACKED = {"stacked": ("stack/**",)}
ROWS = {
    "SGD": Row(optim.SGD(0.1)),
    "SGD momentum": Row(optim.SGD(optim.Cosine(0.1, 50), momentum=0.9, nesterov=True)),
    "Adagrad": Row(optim.Adagrad(0.1)),
    "RMSProp": Row(optim.RMSProp(0.01, momentum=0.9, centred=True)),
    "Adadelta": Row(optim.Adadelta()),
    "Adam": Row(ADAM),
    "AMSGrad": Row(optim.AMSGrad(1e-2)),
    "AdamW": Row(optim.AdamW(optim.WarmupCosine(1e-2, warmup=5, total=50))),
    "AdamW master": Row(optim.AdamW(1e-2, rounding=optim.MasterWeights(), slot_dtypes=(("mean", "bfloat16"),))),
    "AdamW kahan": Row(optim.AdamW(1e-2, rounding=optim.KahanSummation())),
    "AdamW stochastic": Row(optim.AdamW(1e-2, rounding=optim.StochasticRounding())),
    "NAdam": Row(optim.NAdam(1e-2)),
    "RAdam": Row(optim.RAdam(1e-2)),
    "AdaBelief": Row(optim.AdaBelief(1e-2)),
    "Lion": Row(optim.Lion(1e-3, decay=0.1)),
    "LAMB": Row(optim.LAMB(1e-2, **STACKED)),
    "LARS": Row(optim.LARS(0.1, **STACKED)),
    "Adafactor": Row(optim.Adafactor(**STACKED)),
    "Muon": Row(optim.Muon(**STACKED)),
    "SOAP": Row(optim.SOAP(1e-2, eps=1e-3, every=3, **STACKED)),
    "SophiaG": Row(optim.SophiaG(1e-2)),
    "ScheduleFree": Row(optim.ScheduleFree(1e-2, warmup=3)),
    "AdEMAMix": Row(optim.AdEMAMix(1e-2, warmup=10)),
    "LBFGS": Row(optim.LBFGS(history=3, search=5), (("loss", loss),)),
    "ClipValue": Row(optim.ClipValue(ADAM, 0.5)),
    "ClipNorm": Row(optim.ClipNorm(ADAM, 0.5)),
    "ClipGlobalNorm": Row(optim.ClipGlobalNorm(ADAM, 0.5)),
    "ClipAdaptive": Row(optim.ClipAdaptive(ADAM)),
    "Decay": Row(optim.Decay(ADAM, 0.01)),
    "Freeze": Row(optim.Freeze(optim.AdamW(1e-2, rounding=optim.MasterWeights()), ("**/bias",))),
    "Groups": Row(optim.Groups(("**/kernel", optim.NAdam(1e-2)), ("**", optim.NAdam(1e-3)))),
    "Accumulate": Row(optim.Accumulate(optim.AdamW(1e-2, rounding=optim.MasterWeights()), 2)),
    "Average": Row(optim.Average(ADAM)),
    "Average all": Row(optim.Average(ADAM, None, start=2)),
    "Lookahead": Row(optim.Lookahead(ADAM, 2)),
    "SAM": Row(optim.SAM(ADAM), (("loss", loss),)),
    "SkipNonFinite": Row(optim.SkipNonFinite(optim.NAdam(1e-2))),
    "Rates": Row(optim.Rates(ADAM, (("**/bias", 0.1),))),
    "LayerwiseRates": Row(optim.LayerwiseRates(ADAM, ("stack/**", "dense/**"), stacked=("stack/**",))),
    "Plateau": Row(optim.Plateau(ADAM), (("value", 1.0),)),
    "FromOptax": Row(optim.from_optax(optax.adamw(1e-2)), declares=False),
    "Everything": Row(
        optim.SkipNonFinite(optim.Average(optim.ClipGlobalNorm(optim.Freeze(optim.Muon(**STACKED), ("temperature",)))))
    ),
}
