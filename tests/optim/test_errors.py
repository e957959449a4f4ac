"""Every mistake is an error in words: what came, what was wanted, what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlax import optim
from tests.asserts import assert_raises
from tests.catalogue.optimizers import tree

ADAM = optim.Adam(1e-2)
W = tree("float32")
G = tree("float32", 1)
NO_MATCH = ("nothing/*",)
OPTAX = optim.from_optax(optax.sgd(0.1))
ALONE = ["from_optax(", "cannot be wrapped", "Optax's own wrappers", "from_optax(optax.chain("]


def without(whole, layer, name):
    return {**whole, layer: {key: leaf for key, leaf in whole[layer].items() if key != name}}


def with_leaf(whole, layer, name, leaf):
    return {**whole, layer: {**whole[layer], name: leaf}}


def updated(optimizer=ADAM, grads=G, trainables=W, state=None, **extra):
    return lambda: optimizer.update(grads, state or optimizer.init(trainables), trainables, **extra)


def after(optimizer, trainables=W):
    return lambda: optimizer.init(trainables)


HALF = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), G)
WIDER = with_leaf(W, "dense", "kernel", jnp.zeros((8, 5)))

# what is done, which error it is, and the words that it must hold
MISTAKES = {
    "gradients of another tree": (updated(grads=[G]), ValueError, ["gradients", "another tree", "Differentiate"]),
    "a gradient too few": (
        updated(grads=without(G, "dense", "bias")),
        ValueError,
        ["gradients", "lack 'dense/bias'", "Differentiate"],
    ),
    "a gradient too many": (
        updated(grads=with_leaf(G, "dense", "shift", jnp.zeros(4))),
        ValueError,
        ["gradients", "also have 'dense/shift'", "Differentiate"],
    ),
    "a gradient that is None": (
        updated(grads=with_leaf(G, "dense", "bias", None)),
        ValueError,
        ["lack 'dense/bias'"],
    ),
    "a gradient of another shape": (
        updated(grads=with_leaf(G, "dense", "bias", jnp.zeros((1, 4)))),
        ValueError,
        ["dense/bias", "float32[1, 4]", "float32[4]", "pass gradients of that shape"],
    ),
    "a gradient of another dtype": (
        updated(grads=HALF),
        ValueError,
        ["dense/bias", "float16[4]", "float32[4]", "pass gradients"],
    ),
    "an integer gradient": (
        updated(grads=with_leaf(G, "dense", "bias", jnp.zeros(4, jnp.int32))),
        ValueError,
        ["int32[4]", "float32[4]", "pass gradients"],
    ),
    "an integer weight": (
        after(ADAM, with_leaf(W, "dense", "count", jnp.zeros(3, jnp.int32))),
        TypeError,
        ["dense/count", "int32[3]", "floating-point", "mlax.freeze"],
    ),
    "a NumPy array as a weight": (
        after(ADAM, {"kernel": np.ones((2, 2), np.float32)}),
        TypeError,
        ["kernel", "ndarray", "jax.Array", "jnp.asarray"],
    ),
    "a Python number as a weight": (
        after(ADAM, {"kernel": 1.0}),
        TypeError,
        ["kernel", "float", "jax.Array", "jnp.asarray"],
    ),
    "complex weights": (
        after(ADAM, {"kernel": jnp.ones(2, jnp.complex64)}),
        TypeError,
        ["kernel", "complex64[2]", "floating-point"],
    ),
    "a rate that is infinite": (lambda: optim.Adam(float("inf")), ValueError, ["Adam: rate is inf", "finite"]),
    "a rate that is NaN": (lambda: optim.SGD(float("nan")), ValueError, ["SGD: rate is nan", "finite"]),
    "a negative rate": (lambda: optim.SGD(-0.1), ValueError, ["rate is -0.1", "at least 0"]),
    "a rate that is a word": (
        lambda: optim.SGD("fast"),
        TypeError,
        ["rate is 'fast'", "a number, a schedule or a function"],
    ),
    "a rate that is an array": (
        lambda: optim.SGD(jnp.ones(())),
        TypeError,
        ["`rate` is an array", "plain Python values"],
    ),
    "a rate that is a class": (
        lambda: optim.SGD(optim.Cosine),
        TypeError,
        ["a number, a schedule or a function of the step."],
    ),
    "a rate that is True": (lambda: optim.SGD(True), TypeError, ["rate is True", "a number, a schedule or a function"]),
    "an infinite rate in update": (updated(rate=jnp.inf), ValueError, ["Adam: rate is inf", "finite"]),
    "a negative rate in update": (updated(rate=-1.0), ValueError, ["rate is -1", "at least 0"]),
    "several rates in update": (updated(rate=jnp.ones(3)), ValueError, ["rate has shape (3,)", "scalar"]),
    "a rate in update that is a word": (updated(rate="fast"), TypeError, ["rate is 'fast'", "number"]),
    "a rate in update that is None": (updated(rate=None), TypeError, ["rate is None", "number"]),
    "a negative beta": (lambda: optim.Adam(0.1, b1=-0.1), ValueError, ["b1 is -0.1", "at least 0 and below 1"]),
    "a beta of 1": (lambda: optim.Adam(0.1, b2=1.0), ValueError, ["b2 is 1", "at least 0 and below 1"]),
    "a beta of 1 in update": (updated(b2=1.0), ValueError, ["b2 is 1", "below 1"]),
    "a pattern that is a number": (
        lambda: optim.AdamW(0.1, decayed=(1,)),
        TypeError,
        ["AdamW: decayed is (1,)", "a pattern or a tuple of them"],
    ),
    "patterns within patterns": (
        lambda: optim.Freeze(ADAM, (("a", "b"),)),
        TypeError,
        ["Freeze: frozen is (('a', 'b'),)", "a pattern or a tuple of them"],
    ),
    "a negative limit": (lambda: optim.ClipGlobalNorm(ADAM, -1.0), ValueError, ["limit is -1", "at least 0"]),
    "decayed that match nothing": (
        after(optim.AdamW(0.1, decayed=NO_MATCH)),
        KeyError,
        ["nothing/*", "matches nothing"],
    ),
    "decayed of Decay that match nothing": (after(optim.Decay(ADAM, decayed=NO_MATCH)), KeyError, ["matches nothing"]),
    "frozen that match nothing": (after(optim.Freeze(ADAM, NO_MATCH)), KeyError, ["nothing/*", "matches nothing"]),
    "a misspelled pattern": (after(optim.Freeze(ADAM, ("dense/kernal",))), KeyError, ["did you mean 'dense/kernel'"]),
    "a group that matches nothing": (
        after(optim.Groups(("nothing/*", ADAM), ("**", ADAM))),
        KeyError,
        ["nothing/*", "matches nothing"],
    ),
    "a pattern inside a group that matches nothing": (
        after(optim.Groups(("**/kernel", optim.AdamW(0.1, decayed=NO_MATCH)), ("**", ADAM))),
        KeyError,
        ["nothing/*", "matches nothing"],
    ),
    "rates that match nothing": (after(optim.Rates(ADAM, (("nothing/*", 0.1),))), KeyError, ["matches nothing"]),
    "layers that match nothing": (after(optim.LayerwiseRates(ADAM, NO_MATCH)), KeyError, ["matches nothing"]),
    "stacked that match nothing": (after(optim.LAMB(0.1, stacked=NO_MATCH)), KeyError, ["matches nothing"]),
    "matrices that match nothing": (after(optim.Muon(matrices=NO_MATCH)), KeyError, ["matches nothing"]),
    "stacked that are not layers": (
        lambda: optim.LayerwiseRates(ADAM, ("dense/**",), stacked=("stack/**",)),
        ValueError,
        ["'stack/**' is stacked", "not one of the layers"],
    ),
    "a vector named as a matrix": (after(optim.Muon(matrices=("**",))), ValueError, ["dense/bias", "not a matrix"]),
    "the state of another optimizer": (
        updated(state=optim.SGD(0.1, momentum=0.9).init(W)),
        ValueError,
        ["step, momentum", "step, mean, square", "`init` of the same"],
    ),
    "a dict as the state": (updated(state=W), ValueError, ["dict", "step, mean, square", "`init`"]),
    "the state of other weights": (
        updated(state=ADAM.init(WIDER)),
        ValueError,
        ["mean at 'dense/kernel'", "float32[8, 5]", "float32[8, 4]", "`init`"],
    ),
    "the state of another tree": (updated(state=ADAM.init(without(W, "dense", "bias"))), ValueError, ["mean", "lack"]),
    "the state in another dtype": (
        updated(state=ADAM.init(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), W))),
        ValueError,
        ["mean at 'dense/bias'", "bfloat16[4]", "float32[4]"],
    ),
    "an unknown hyperparameter": (updated(learning_rate=0.1), TypeError, ["'learning_rate'", "b1, b2, eps, rate"]),
    "a hyperparameter that no optimizer has": (
        updated(optim.SkipNonFinite(optim.SGD(0.1)), limit=0.1),
        TypeError,
        ["'limit'", "momentum, rate"],
    ),
    "a hyperparameter that two optimizers have": (
        updated(optim.Decay(optim.AdamW(0.1), 0.1), decay=0.1),
        TypeError,
        ["'decay'", "AdamW and of Decay", "schedule"],
    ),
    "a leaf without a group": (
        after(optim.Groups(("**/kernel", ADAM))),
        KeyError,
        ["no pattern matches 'dense/bias'", '("**", ...)'],
    ),
    "groups that are not pairs": (
        lambda: optim.Groups(ADAM),
        TypeError,
        ["not a pair of a pattern and an optimizer", "pass"],
    ),
    "a dtype of no slot": (
        after(optim.Adam(0.1, slot_dtypes=(("variance", "float32"),))),
        ValueError,
        ["'variance'", "mean, square"],
    ),
    "SAM without the loss": (updated(optim.SAM(ADAM)), TypeError, ["SAM", "loss=loss"]),
    "LBFGS without the loss": (updated(optim.LBFGS()), TypeError, ["LBFGS", "loss=loss", "max_search_steps=0"]),
    "Plateau without the value": (updated(optim.Plateau(ADAM)), TypeError, ["Plateau", "value=loss"]),
    "Nesterov without momentum": (lambda: optim.SGD(0.1, nesterov=True), ValueError, ["momentum", "pass momentum=0.9"]),
    "a wrapper around a class": (lambda: optim.Average(optim.Adam), TypeError, ["Average", "is not an optimizer"]),
    "a wrapper around a number": (lambda: optim.ClipNorm(0.1), TypeError, ["ClipNorm", "0.1", "is not an optimizer"]),
    "two averages": (after(optim.Average(optim.Average(ADAM))), ValueError, ["Average", "slot 'average' already"]),
    "two schedules of accumulation": (
        after(optim.Accumulate(optim.Accumulate(ADAM, 2), 2)),
        ValueError,
        ["'gathered'"],
    ),
    "two that skip": (after(optim.SkipNonFinite(optim.SkipNonFinite(ADAM))), ValueError, ["scalar 'skipped' already"]),
    "two that watch": (after(optim.Plateau(optim.Plateau(ADAM))), ValueError, ["scalar 'best' already"]),
    "no steps to accumulate": (lambda: optim.Accumulate(ADAM, 0), ValueError, ["every is 0", "at least 1"]),
    "the average of another state": (
        lambda: optim.Average(ADAM).eval_trainables(ADAM.init(W), W),
        ValueError,
        ["step, mean, square", "step, mean, square, average", "`init` of the same"],
    ),
    "hyperparameters for Optax": (
        updated(optim.from_optax(optax.sgd(0.1)), rate=0.1),
        TypeError,
        ["'rate'", "inject_hyperparams"],
    ),
    "Optax inside of a wrapper": (lambda: optim.ClipNorm(OPTAX), TypeError, ["ClipNorm", *ALONE]),
    "Optax inside of groups": (lambda: optim.Groups(("**", OPTAX)), TypeError, ["Groups", *ALONE]),
    "Optax beside Muon": (lambda: optim.Muon(rest=OPTAX), TypeError, ["Muon", *ALONE]),
    "the slots of Optax": (lambda: OPTAX.slots("dense/bias", jnp.zeros(4)), TypeError, ALONE),
    "a rest of Muon that is a number": (lambda: optim.Muon(rest=0.1), TypeError, ["Muon: 0.1 is not an optimizer"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_say_what_was_passed_and_what_is_needed(mistake):
    assert_raises(*MISTAKES[mistake])
