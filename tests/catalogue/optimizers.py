"""Rows of the optimizers: one for each public one, and the ways in which its structure can differ."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mlax import optim
from tests.catalogue.row import OptimizerRow

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


ADAM = optim.Adam(1e-2)
STACKED = {"stacked": ("stack/**",)}
ROWS = {
    "SGD": OptimizerRow(optim.SGD(0.1)),
    "SGD momentum": OptimizerRow(optim.SGD(optim.Cosine(0.1, 50), momentum=0.9, nesterov=True), variant=True),
    "Adagrad": OptimizerRow(optim.Adagrad(0.1)),
    "RMSProp": OptimizerRow(optim.RMSProp(0.01, momentum=0.9, centred=True)),
    "Adadelta": OptimizerRow(optim.Adadelta()),
    "Adam": OptimizerRow(ADAM),
    "AMSGrad": OptimizerRow(optim.AMSGrad(1e-2)),
    "AdamW": OptimizerRow(optim.AdamW(optim.WarmupCosine(1e-2, warmup=5, total=50))),
    "AdamW master": OptimizerRow(
        optim.AdamW(1e-2, rounding=optim.MasterWeights(), slot_dtypes=(("mean", "bfloat16"),)), variant=True
    ),
    "AdamW kahan": OptimizerRow(optim.AdamW(1e-2, rounding=optim.KahanSummation()), variant=True),
    "AdamW stochastic": OptimizerRow(optim.AdamW(1e-2, rounding=optim.StochasticRounding()), variant=True),
    "NAdam": OptimizerRow(optim.NAdam(1e-2)),
    "RAdam": OptimizerRow(optim.RAdam(1e-2)),
    "AdaBelief": OptimizerRow(optim.AdaBelief(1e-2)),
    "Adamax": OptimizerRow(optim.Adamax(1e-2), variant=True),
    "Yogi": OptimizerRow(optim.Yogi(1e-2), variant=True),
    "NAdamW": OptimizerRow(optim.NAdamW(1e-2), variant=True),
    "ADOPT": OptimizerRow(optim.ADOPT(1e-2), variant=True),
    "Adan": OptimizerRow(optim.Adan(1e-2), variant=True),
    "SignSGD": OptimizerRow(optim.SignSGD(1e-2, momentum=0.9), variant=True),
    "Rprop": OptimizerRow(optim.Rprop(), variant=True),
    "Prodigy": OptimizerRow(optim.Prodigy(start=1e-2)),
    "GaLore": OptimizerRow(optim.GaLore(1e-2, rank=2, every=3, **STACKED), ambiguous_slots=("projection",)),
    "Lion": OptimizerRow(optim.Lion(1e-3, decay=0.1)),
    "LAMB": OptimizerRow(optim.LAMB(1e-2, **STACKED)),
    "LARS": OptimizerRow(optim.LARS(0.1, **STACKED)),
    "Adafactor": OptimizerRow(optim.Adafactor(**STACKED)),
    "Muon": OptimizerRow(optim.Muon(**STACKED), no_inner_slots="`rest` has slots for its own leaves only"),
    "SOAP": OptimizerRow(optim.SOAP(1e-2, eps=1e-3, every=3, **STACKED), ambiguous_slots=("left_basis", "right_basis")),
    "SophiaG": OptimizerRow(optim.SophiaG(1e-2)),
    "ScheduleFree": OptimizerRow(optim.ScheduleFree(1e-2, warmup=3)),
    "ScheduleFreeSGD": OptimizerRow(optim.ScheduleFreeSGD(1e-2, warmup=3, decay=0.1), variant=True),
    "AdEMAMix": OptimizerRow(optim.AdEMAMix(1e-2, warmup=10)),
    "LBFGS": OptimizerRow(optim.LBFGS(history=3, max_search_steps=5), {"loss": loss}),
    "ClipValue": OptimizerRow(optim.ClipValue(ADAM, 0.5), variant=True),
    "ClipNorm": OptimizerRow(optim.ClipNorm(ADAM, 0.5), variant=True),
    "ClipGlobalNorm": OptimizerRow(optim.ClipGlobalNorm(ADAM, 0.5), variant=True),
    "ClipAdaptive": OptimizerRow(optim.ClipAdaptive(ADAM), variant=True),
    "GradientNoise": OptimizerRow(optim.GradientNoise(ADAM), variant=True),
    "Decay": OptimizerRow(optim.Decay(ADAM, 0.01), variant=True),
    "Freeze": OptimizerRow(
        optim.Freeze(optim.AdamW(1e-2, rounding=optim.MasterWeights()), ("**/bias",)),
        variant=True,
        no_inner_slots="frozen leaves have no slots",
    ),
    "Groups": OptimizerRow(
        optim.Groups(("**/kernel", optim.NAdam(1e-2)), ("**", optim.NAdam(1e-3))),
        variant=True,
        no_inner_slots="each leaf has the slots of its group only",
    ),
    "Accumulate": OptimizerRow(optim.Accumulate(optim.AdamW(1e-2, rounding=optim.MasterWeights()), 2), variant=True),
    "Average": OptimizerRow(optim.Average(ADAM), variant=True),
    "Average all": OptimizerRow(optim.Average(ADAM, None, start=2), variant=True),
    "Lookahead": OptimizerRow(optim.Lookahead(ADAM, 2), variant=True),
    "SAM": OptimizerRow(optim.SAM(ADAM), {"loss": loss}, variant=True),
    "SkipNonFinite": OptimizerRow(optim.SkipNonFinite(optim.NAdam(1e-2)), variant=True),
    "Rates": OptimizerRow(optim.Rates(ADAM, (("**/bias", 0.1),)), variant=True),
    "LayerwiseRates": OptimizerRow(
        optim.LayerwiseRates(ADAM, ("stack/**", "dense/**"), stacked=("stack/**",)), variant=True
    ),
    "Plateau": OptimizerRow(optim.Plateau(ADAM), {"value": 1.0}, variant=True, unbounded_slots=("best",)),
    "FromOptax": OptimizerRow(optim.from_optax(optax.adamw(1e-2)), no_slot_declarations="Optax computes as it likes"),
    "Everything": OptimizerRow(
        optim.SkipNonFinite(optim.Average(optim.ClipGlobalNorm(optim.Freeze(optim.Muon(**STACKED), ("temperature",))))),
        variant=True,
    ),
}
