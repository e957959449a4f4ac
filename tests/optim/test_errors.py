"""Every mistake is an error in words: what came, what was wanted, what to do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mlax import optim
from mlax.core import frozen, with_fields
from tests.asserts import assert_raises
from tests.catalogue.optimizers import ROWS, tree

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


@frozen
class Clashing(optim.SGD):
    """An optimizer with a slot that is called as a scalar of NAdam."""

    def leaf_slots(self, path, w):
        return {"product": optim.Slot()}


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
    "a group of a number": (lambda: optim.Groups((3, ADAM)), TypeError, ["(3, Adam(", "not a pair of a pattern"]),
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
    "a decay of no leaf": (
        after(optim.AdamW(0.1), {"weight": jnp.ones(3)}),
        KeyError,
        ["AdamW: decay is 0.01", "no leaf is named kernel or table", "'weight'", "decayed=", "decay=0.0"],
    ),
    "a decay of no leaf by Optax": (
        lambda: optim.to_optax(optim.Lion(0.1, decay=0.1)).init({"weight": jnp.ones(3)}),
        KeyError,
        ["Lion: decay is 0.1", "no leaf is named"],
    ),
    "a decay of packed weights": (
        after(optim.SkipNonFinite(optim.SOAP(0.1)), optim.Packing.of(W).pack(W)),
        KeyError,
        ["SOAP: decay is 0.01", "'float32'"],
    ),
    "a scheduled decay of no leaf": (
        after(optim.Decay(ADAM, optim.Cosine(0.1, 9)), {"weight": jnp.ones(3)}),
        KeyError,
        ["Decay: decay is Cosine(0.1, 9)", "no leaf is named"],
    ),
    "no matrices for Muon": (after(optim.Muon(), {"weight": jnp.ones((3, 2))}), KeyError, ["Muon", "matrices="]),
    "no matrices for GaLore": (
        after(optim.GaLore(0.1, decay=0.0), {"weight": jnp.ones((3, 2))}),
        KeyError,
        ["GaLore", "matrices="],
    ),
    "a dead group": (
        after(optim.Groups(("**", ADAM), ("**/kernel", optim.SGD(0.1)))),
        KeyError,
        ["no leaf is left for ('**/kernel', SGD(0.1))", "put it before them"],
    ),
    "a slot with the name of a scalar": (
        after(optim.Groups(("**/kernel", Clashing(0.1)), ("**", optim.NAdam(0.1)))),
        ValueError,
        ["two fields 'product'", "rename"],
    ),
    "a schedule that reaches 1": (
        lambda: optim.Adam(0.1, b2=optim.ConstantSchedule(1.0)),
        ValueError,
        ["Adam: b2 is ConstantSchedule(1.0), which reaches 1", "below 1"],
    ),
    "a schedule that float32 rounds to 1": (
        lambda: optim.Adam(0.1, b2=optim.ConstantSchedule(1 - 1e-9)),
        ValueError,
        ["which reaches 1", "below 1"],
    ),
    "a schedule that becomes negative": (
        lambda: optim.SGD(optim.Warmup(optim.LinearSchedule(0.1, -0.1, 9), 5)),
        ValueError,
        ["which reaches -0.1", "at least 0"],
    ),
    "a rate that is missing": (lambda: optim.Adam(None), TypeError, ["rate is None", "a number, a schedule"]),
    "a complex rate in update": (updated(rate=jnp.asarray(1j)), TypeError, ["rate is complex64", "real number"]),
    "no momentum for b1 of ScheduleFree": (
        lambda: optim.ScheduleFree(0.1, b1=0.0),
        ValueError,
        ["b1 is 0", "at least 0.01 and below 1"],
    ),
    "a schedule for b1 of ScheduleFree": (
        lambda: optim.ScheduleFree(0.1, b1=optim.Cosine(0.9, 5)),
        TypeError,
        ["b1 is Cosine(0.9, 5)", "a number that does not change"],
    ),
    "an integer dtype of a slot": (
        lambda: optim.Adam(0.1, slot_dtypes=(("mean", "int8"),)),
        TypeError,
        ["the slot 'mean' is 'int8'", "floating-point"],
    ),
    "slot_dtypes without pairs": (
        lambda: optim.Adam(0.1, slot_dtypes=("mean", "bfloat16")),
        TypeError,
        ["slot_dtypes is ('mean', 'bfloat16')", "pairs of a slot and a dtype"],
    ),
    "a complex accum_dtype": (
        lambda: optim.LBFGS(accum_dtype=jnp.complex64),
        TypeError,
        ["LBFGS: accum_dtype", "complex64", "floating-point"],
    ),
    "a narrow accum_dtype for eigenvectors": (
        lambda: optim.SOAP(0.1, accum_dtype="bfloat16"),
        ValueError,
        ["SOAP: accum_dtype is bfloat16", "'float32'"],
    ),
    "a narrow accum_dtype for singular vectors": (
        lambda: optim.GaLore(0.1, accum_dtype=jnp.float16),
        ValueError,
        ["GaLore: accum_dtype is float16", "'float32'"],
    ),
    "an integer dtype of an average": (lambda: optim.Average(ADAM, dtype="int32"), TypeError, ["Average: dtype is"]),
    "a momentum in update without one": (
        updated(optim.SGD(0.1), momentum=0.9),
        TypeError,
        ["SGD: update cannot set momentum", "the state has no momentum"],
    ),
    "a momentum of RMSProp in update without one": (
        updated(optim.RMSProp(0.1), momentum=0.9),
        TypeError,
        ["RMSProp: update cannot set momentum"],
    ),
    "a decay in update of a uniform average": (
        updated(optim.Average(ADAM, None), decay=0.9),
        TypeError,
        ["Average: update cannot set decay: it is None"],
    ),
    "a Wolfe constant in update without a search": (
        updated(optim.LBFGS(max_search_steps=0), c1=0.1),
        TypeError,
        ["LBFGS: update cannot set c1", "max_search_steps=0"],
    ),
    "a value that is not a scalar": (
        updated(optim.Plateau(ADAM), value=jnp.ones(3)),
        ValueError,
        ["value has shape (3,)", "scalar"],
    ),
    "one pair for factors": (lambda: optim.Rates(ADAM, ("kernel", 0.5)), TypeError, ["Rates: 'kernel' is not a pair"]),
    "a negative factor": (
        lambda: optim.Rates(ADAM, (("**", -1.0),)),
        TypeError,
        ["('**', -1.0) is not a pair of a pattern and a factor of at least 0"],
    ),
    "two leaves of one path": (
        after(ADAM, {"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}),
        ValueError,
        ["Two leaves have the path 'a/b'", "rename"],
    ),
    "a packing of two leaves of one path": (
        lambda: optim.Packing.of({"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}),
        ValueError,
        ["Two leaves have the path 'a/b'"],
    ),
    "the state in place of the gradients": (
        lambda: ADAM.update(ADAM.init(W), G, W),
        TypeError,
        ["the state came as gradients", "update(grads, state, trainables)"],
    ),
    "the state in place of the trainables": (
        lambda: ADAM.update(G, W, ADAM.init(W)),
        TypeError,
        ["the state came as trainables", "update(grads, state, trainables)"],
    ),
    "the trainables in place of the state": (
        lambda: ADAM.eval_trainables(W, ADAM.init(W)),
        TypeError,
        ["the state came as trainables", "eval_trainables(state, trainables)"],
    ),
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


COUNTS = [
    (row.optimizer, name, number.range.minimum)
    for row in {type(row.optimizer): row for row in ROWS.values()}.values()
    for name, number in optim.number_fields(type(row.optimizer)).items()
]


@pytest.mark.parametrize(
    ("optimizer", "name", "minimum"), COUNTS, ids=lambda part: part if isinstance(part, str) else type(part).__name__
)
def test_no_number_may_be_below_its_minimum(optimizer, name, minimum):
    below = minimum - 1 if isinstance(minimum, int) else -0.5
    assert_raises(lambda: with_fields(optimizer, **{name: below}), ValueError, [f"{name} is {below:g}", "must be"])


def test_every_integer_and_number_of_an_optimizer_has_a_range():
    for row in ROWS.values():
        ranged = optim.number_fields(type(row.optimizer))
        for field in dataclasses.fields(row.optimizer):
            number = isinstance(getattr(row.optimizer, field.name), int | float | optim.Schedule)
            assert field.name in ranged or field.name == "seed" or not number or field.type is bool, (row, field.name)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_say_what_was_passed_and_what_is_needed(mistake):
    assert_raises(*MISTAKES[mistake])
