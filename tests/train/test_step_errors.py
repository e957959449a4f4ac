"""Mistakes with a training step are refused by name, before anything is donated."""

import jax
import jax.numpy as jnp
import optax
import pytest

from mlax import optim, place, train
from tests.train.tasks import MODEL, OPTIMIZER, batch, feed, init_state, objective


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda b: {**b, "x": b["x"][:7]}, r"batch/x was float32\[8, 5\] and is now float32\[7, 5\]"),
        (lambda b: {**b, "y": b["y"].astype(jnp.int8)}, r"batch/y was int32\[8\] and is now int8\[8\]"),
        (lambda b: {**b, "z": b["y"]}, r"batch/z was missing and is now int32\[8\]"),
        (lambda b: {"x": b["x"], "id": b["id"]}, r"batch/y was int32\[8\] and is now missing"),
    ],
)
def test_a_batch_that_would_recompile_is_rejected_by_name_and_donates_nothing(other, words):
    step = train.step(objective, OPTIMIZER)
    state, _ = step(init_state(step), batch())
    with pytest.raises(train.RetraceError, match=words):
        step(state, other(batch()))
    step(state, batch())  # was not donated by the rejected call


def test_a_state_that_would_recompile_is_rejected_by_name():
    step = train.step(objective, OPTIMIZER)
    state, _ = step(init_state(step), batch())
    head = {**state.trainables["head"], "bias": jnp.zeros(3, jnp.bfloat16)}
    with pytest.raises(
        train.RetraceError,
        match=r"state/trainables/head/bias was float32\[3\] and is now bfloat16\[3\].*a new step",
    ):
        step(state._replace(trainables={**state.trainables, "head": head}), batch())


def test_an_error_of_the_objective_is_not_masked():
    def refusing(batch, *args, **kwargs):
        if len(batch["x"]) != 8:
            raise ValueError("my own words")
        return objective(batch, *args, **kwargs)

    step = train.step(refusing, OPTIMIZER, compilations=2)
    state, _ = step(init_state(step), batch(8))
    with pytest.raises(ValueError, match="my own words"):
        step(state, batch(16))


def test_accumulate_must_divide_the_batch():
    step = train.step(objective, OPTIMIZER, accumulate=3)
    with pytest.raises(ValueError, match=r"accumulate is 3, which does not divide the batch, .*\[8"):
        step(init_state(step), batch())


def test_a_step_that_does_not_fit_in_memory_is_rejected_before_the_state_is_donated():
    def greedy(batch, trainables, non_trainables, rng=None, inference_mode=False):
        big = jax.random.normal(rng, (1 << 20, 1 << 20))
        return jnp.sort(big, axis=0).sum() * trainables["w"], non_trainables

    step = train.step(greedy, optim.SGD(0.1))
    state = step.init(jax.random.key(0), {"w": jnp.ones(())})
    with pytest.raises(place.NotEnoughMemory, match=r"needs \d.* TiB more .* free; nothing was run.*accumulate=4"):
        step(state, {"x": jnp.ones(3)})
    assert not state.trainables["w"].is_deleted()


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (lambda v: v, TypeError, "must return a pair as `fwd` does"),
        (lambda v: ({"accuracy": v}, None), KeyError, "accuracy, but no 'loss'"),
        (lambda v: ({"loss": v.astype(jnp.int32)}, None), TypeError, r"loss is int32\[8\], but must be floating point"),
        (lambda v: ({"loss": v, "note": "good"}, None), TypeError, "'note' is a str, but must be an array"),
        (lambda v: ({"loss": v[:3]}, None), ValueError, r"'loss' is float32\[3\], but the mask is bool\[8\]"),
    ],
)
def test_wrong_outputs_of_an_objective_are_rejected(returned, error, words):
    def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return returned(trainables["w"] * batch["x"][:, 0])

    step = train.step(objective, optim.SGD(0.1))
    with pytest.raises(error, match=words):
        step(step.init(jax.random.key(0), {"w": jnp.ones(())}), {**batch(), "mask": jnp.ones(8, bool)})


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: train.step(objective, optax.adam(1e-3)), TypeError, "is not an optimizer of mlax; wrap one of Optax"),
        (lambda: train.step("loss", OPTIMIZER), TypeError, "must be a function like `fwd`"),
        (
            lambda: train.step(lambda batch, trainables, non_trainables: None, OPTIMIZER),
            TypeError,
            r"does not take .*'rng'\); define it as `def objective\(batch, trainables, non_trainables, rng=None",
        ),
        (
            lambda: train.step(objective, OPTIMIZER, steps_per_call=0),
            ValueError,
            "steps_per_call is 0, but must be an int of at least 1",
        ),
        (lambda: train.step(objective, OPTIMIZER, scaling=2.0), TypeError, r"pass train.DynamicLossScale\(\)"),
        (
            lambda: train.step(objective, OPTIMIZER, scaling=train.DynamicLossScale(), skip_nonfinite=False),
            ValueError,
            "skip_nonfinite must stay True",
        ),
        (lambda: train.DynamicLossScale(factor=1.0), ValueError, "must be above 1"),
        (lambda: train.DynamicLossScale(every=0), ValueError, "every is 0, but must be an int of at least 1"),
        (lambda: train.DynamicLossScale(2.0**30), ValueError, r"scale is 1\.07374e\+09, but must be between min_scale"),
        (lambda: train.StaticLossScale(float("inf")), ValueError, "scale is inf, but must be a finite number above 0"),
        (lambda: train.StaticLossScale("8"), ValueError, "scale is '8', but must be a finite number"),
        (lambda: train.step(objective, OPTIMIZER).init(7, {}), TypeError, "rng is 7, but must be a key"),
        (
            lambda: train.step(objective, OPTIMIZER).init({f"weight_{i}": jnp.ones(3) for i in range(9)}, {}),
            TypeError,
            r"rng is a dict, but must be a key; call step\.init\(rng, \*variables\)",
        ),
    ],
)
def test_invalid_options_are_rejected(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_an_evaluation_without_examples_is_an_error():
    step = train.step(objective, OPTIMIZER)
    with pytest.raises(ValueError, match=r"masks of the batches sum to 0, so that there is no example"):
        step.evaluation(init_state(step), [{**batch(), "mask": jnp.zeros(8, bool)}])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda step, state: step(batch(), state), TypeError, r"the state is a dict; call step\(state, batch\)"),
        (lambda step, state: step.evaluation(state, batch()), TypeError, "a dict is not a feed"),
        (lambda step, state: step.flops(), ValueError, r"nothing is compiled yet; call it, or step\.compile"),
        (lambda step, state: step.evaluation(feed(), state), TypeError, r"call evaluation\(state, feed\)"),
        (
            lambda step, state: step.init(jax.random.key(0), MODEL.init(jax.random.key(0), batch()["x"])),
            TypeError,
            r"step.init\(rng, \*model.init\(...\)\)",
        ),
        (
            lambda step, state: (step(state, batch()), step(state, batch())),
            ValueError,
            r"state/.* was donated to",
        ),
    ],
)
def test_wrong_calls_are_rejected_with_advice(call, error, words):
    step = train.step(objective, OPTIMIZER)
    with pytest.raises(error, match=words):
        call(step, init_state(step))


def test_the_same_array_in_two_places_is_rejected_by_name():
    shared = jnp.ones((3, 3))
    with pytest.raises(ValueError, match=r"trainables/b and trainables/a are the same array.*mlax.Tied"):
        train.step(objective, OPTIMIZER).init(jax.random.key(0), {"a": shared, "b": shared})


def test_many_steps_per_call_need_stacked_batches():
    step = train.step(objective, OPTIMIZER, steps_per_call=8)
    with pytest.raises(
        ValueError, match=r"steps_per_call is 8, so each array holds 8 batches.*feed.stream\(steps_per_call=8\)"
    ):
        step(init_state(step), {**batch(), "mask": jnp.ones(8, bool)})


def test_non_trainables_that_change_are_named():
    def drifting(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return trainables["w"] * batch["x"][:, 0], {"mean": non_trainables["mean"].astype(jnp.float32)}

    step = train.step(drifting, optim.SGD(0.1))
    state = step.init(jax.random.key(0), {"w": jnp.ones(())}, {"mean": jnp.ones(3, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"mean: bfloat16\[3\], and returned float32\[3\]"):
        step(state, batch())


def test_non_trainables_of_another_tree_are_named():
    def other(batch, trainables, non_trainables, rng=None):
        return trainables["w"] * batch["x"][:, 0], {"norm": non_trainables}

    step = train.step(other, optim.SGD(0.1))
    state = step.init(jax.random.key(0), {"w": jnp.ones(())}, {"mean": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"have mean: float32\[3\], and returned only norm/mean; return the new"):
        step(state, batch())
    with pytest.raises(TypeError, match=r"evaluation: the objective .*'inference_mode'\); define it as"):
        step.evaluation(state, [batch()])


def test_an_entry_that_the_batch_lacks_is_answered_with_those_it_has():
    step = train.step(lambda batch, trainables, non_trainables, rng: (batch["lable"], None), optim.SGD(0.1))
    with pytest.raises(KeyError, match="lable") as caught:
        step(step.init(jax.random.key(0), {"w": jnp.ones(())}), batch())
    assert "The batch has id, x, y." in caught.value.__notes__


def test_reserved_metric_names_are_rejected():
    def clashing(batch, trainables, non_trainables, rng=None, inference_mode=False):
        return {"loss": trainables["w"] * batch["x"][:, 0], "step": trainables["w"]}, non_trainables

    step = train.step(clashing, optim.SGD(0.1))
    with pytest.raises(ValueError, match="returned a value 'step'"):
        step(step.init(jax.random.key(0), {"w": jnp.ones(())}), batch())


def test_a_plan_must_be_a_plan():
    with pytest.raises(TypeError, match=r"plan is 'fsdp', but must be a place\.Plan"):
        train.step(lambda *args, **kwargs: (0.0, None), optim.SGD(0.1), plan="fsdp")  # pyright: ignore
