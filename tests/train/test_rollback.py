"""Rollbacks: after a jump of the loss, weights from before it are still there and are found."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlax import files, optim, train
from mlax.train import Divergence, read_records

JUMP, LATE, STEPS = 20, 40, 70


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    """Fit y = 2 x; with weights that are far off, what comes late gives NaN."""
    losses = (trainables["w"] * batch["x"] - 2 * batch["x"]) ** 2
    spoilt = batch["late"] & (abs(trainables["w"]) > 100)
    return jnp.where(spoilt, jnp.nan, losses), non_trainables


def rate(step):
    """Makes the weight jump once, and then leaves it there."""
    return {"rate": 1e5 if step == JUMP else 0.0 if JUMP < step < LATE else 0.1}


@pytest.fixture
def fit(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect.getmodule(train.fit), "Divergence", functools.partial(Divergence, patience=4))
    arrays = {"x": np.ones(STEPS, np.float32), "late": np.arange(STEPS) >= LATE}
    step = train.step(objective, optim.SGD(0.1))

    def run(steps=STEPS, **options):
        state = step.init(jax.random.key(0), {"w": jnp.zeros(())})
        options = {"keep": 2, "show": False, "hyperparams": rate, **options}
        return train.fit(step, state, train.Feed(arrays, 1), steps=steps, run=tmp_path / "run", **options)

    return run


def events(tmp_path):
    return [record["event"] for record in read_records(tmp_path / "run" / "metrics.jsonl") if "event" in record]


@pytest.mark.parametrize("save_every", [1, 3])
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_second_rollback_restores_weights_from_before_the_jump(fit, tmp_path, save_every, interrupted):
    if interrupted:  # what is known of the losses is saved, too
        fit(steps=30, save_every=save_every)
    fitted = fit(save_every=save_every, resume="anyway")
    steps = [int(event.split()[-1]) for event in events(tmp_path) if event.startswith("rolled back")]
    assert len(steps) == 2 and JUMP < steps[0] <= LATE and steps[1] <= JUMP
    assert abs(float(fitted.state.trainables["w"]) - 2) < 0.1


def test_a_damaged_checkpoint_is_passed_over_by_a_rollback(fit, tmp_path, monkeypatch, capsys):
    real = train.Checkpoints.restore

    def damaged(self, target, *, step=None, **options):
        if step is not None and step > JUMP:
            raise files.InvalidFile(f"step {step} is damaged")
        return real(self, target, step=step, **options)

    monkeypatch.setattr(train.Checkpoints, "restore", damaged)
    fitted = fit(save_every=3, show=True)
    assert abs(float(fitted.state.trainables["w"]) - 2) < 0.1
    assert "cannot be restored: step 39 is damaged" in capsys.readouterr().out
