"""Every optimizer comes to the minima of the classic test functions when its rate falls to zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mlax import optim

STEPS = 5_000


def falling(rate):
    return optim.Cosine(rate, STEPS)


def rosenbrock(kernel):
    """A curved valley; its minimum, 0, is at (1, 1)."""
    x, y = kernel.ravel()
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def beale(kernel):
    """A plateau between steep walls; its minimum, 0, is at (3, 0.5)."""
    x, y = kernel.ravel()
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def quadratic(kernel):
    """A bowl a thousand times as steep along one axis as along another; its minimum, 0, is at zero."""
    return jnp.sum(jnp.asarray(np.logspace(0, 3, 6).reshape(3, 2), kernel.dtype) * kernel**2) / 2


# each function's leaf is a kernel, for Muon and SOAP to take it as a matrix
FUNCTIONS = {
    "rosenbrock": (rosenbrock, [[-1.2], [1.0]]),
    "beale": (beale, [[1.0], [1.0]]),
    "quadratic": (quadratic, np.ones((3, 2))),
}

# the optimizer, and how far from zero each of the three may end, at least ten times what it was found to be
OPTIMIZERS = {
    "SGD": (optim.SGD(falling(0.002)), 5e-2),
    "SGD momentum": (optim.SGD(falling(0.002), momentum=0.9), 1e-6),
    "SGD nesterov": (optim.SGD(falling(0.001), momentum=0.9, nesterov=True), 1e-6),
    "Adagrad": (optim.Adagrad(falling(1.0)), 5e-2),
    "RMSProp": (optim.RMSProp(falling(0.005)), 1e-4),
    "RMSProp centred": (optim.RMSProp(falling(0.005), centred=True), 1e-2),
    "Adadelta": (optim.Adadelta(falling(1.0)), 1e-3),
    "Adam": (optim.Adam(falling(0.1)), 1e-6),
    "AMSGrad": (optim.AMSGrad(falling(0.5)), 1e-6),
    "AdamW": (optim.AdamW(falling(0.1), decay=0.0), 1e-6),
    "NAdam": (optim.NAdam(falling(0.05)), 1e-4),
    "RAdam": (optim.RAdam(falling(0.002), b2=0.9), 1e-6),
    "AdaBelief": (optim.AdaBelief(falling(0.1)), 1e-6),
    "Lion": (optim.Lion(falling(0.002)), 1e-6),
    "LAMB": (optim.LAMB(falling(0.02), decay=0.0), 1e-6),
    "LARS": (optim.LARS(falling(2.0), decay=0.0), 1e-6),
    "Adafactor": (optim.Adafactor(falling(0.02)), 2e-2),
    "Muon": (optim.Muon(falling(0.01), decay=0.0), 1e-6),
    "SOAP": (optim.SOAP(falling(0.005), decay=0.0), 1e-6),
    "SophiaG": (optim.SophiaG(falling(0.003), decay=0.0), 1e-5),
    "ScheduleFree": (optim.ScheduleFree(falling(0.2)), 1e-3),
    "ScheduleFreeSGD": (optim.ScheduleFreeSGD(falling(0.002)), 5e-2),
    "AdEMAMix": (optim.AdEMAMix(falling(0.1), b3=0.99, alpha=2.0), 1e-6),
    "Adamax": (optim.Adamax(falling(0.1)), 1e-6),
    "Yogi": (optim.Yogi(falling(0.1)), 1e-6),
    "NAdamW": (optim.NAdamW(falling(0.1), decay=0.0), 1e-6),
    "ADOPT": (optim.ADOPT(falling(0.1), b2=0.99), 1e-6),
    "Adan": (optim.Adan(falling(0.1), decay=0.0), 1e-6),
    "SignSGD": (optim.SignSGD(falling(0.002), momentum=0.9), 5e-2),
    "Rprop": (optim.Rprop(), 1e-6),
    "Prodigy": (optim.Prodigy(falling(1.0)), 1e-6),
    "GaLore": (optim.GaLore(falling(0.4), decay=0.0, rank=1, every=50), 1e-6),
    "LBFGS": (optim.LBFGS(), 1e-6),
    "Lookahead": (optim.Lookahead(optim.Adam(falling(0.1))), 1e-6),
    "Average": (optim.Average(optim.Adam(falling(0.1)), decay=0.9), 1e-6),
    "SAM": (optim.SAM(optim.Adam(falling(0.1)), radius=1e-4), 1e-4),
    "ClipGlobalNorm": (optim.ClipGlobalNorm(optim.SGD(falling(0.002), momentum=0.9), 100.0), 1e-4),
    "ClipAdaptive": (optim.ClipAdaptive(optim.Adam(falling(0.1))), 1e-4),
}


def values(trainables):
    return {name: function(trainables[name]["kernel"]) for name, (function, _) in FUNCTIONS.items()}


def loss(trainables):
    return sum(values(trainables).values())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough)
        if name in ("SGD", "SGD nesterov", "RMSProp centred", "AdamW")  # with other numbers in other rows
        else name
        for name in OPTIMIZERS
    ],
)
def test_every_optimizer_reaches_the_minimum(name):
    optimizer, tolerance = OPTIMIZERS[name]
    steps = 200 if isinstance(optimizer, optim.LBFGS) else STEPS

    def step(carry, _):
        trainables, state = carry
        value, grads = jax.value_and_grad(loss)(trainables)
        if isinstance(optimizer, optim.SophiaG):
            state = optimizer.estimate(grads, state, 1)
        return optimizer.update(grads, state, trainables, value=value, loss=loss), None

    trainables = {name: {"kernel": jnp.asarray(start, jnp.float32)} for name, (_, start) in FUNCTIONS.items()}
    (trainables, state), _ = lax.scan(step, (trainables, optimizer.init(trainables)), length=steps)
    for function, value in values(optimizer.eval_trainables(state, trainables)).items():
        assert value < tolerance, f"{function}: {value}"
