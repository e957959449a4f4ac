"""Divergence: a jump of the loss that ends in NaN, and one example that spoils the statistics of BatchNorm.

After the jump all of the last checkpoints hold spoilt weights; a rollback must find one from before. The example makes
the running variance infinite while loss and gradient are finite; its step must be skipped, and its id logged.
"""

import contextlib
import functools
import inspect
import io
import random
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mlax import optim, train
from mlax.train import Divergence, read_records
from tests.faults.results import Result, main
from tests.train.tasks import OPTIMIZER, arrays, init_state, objective

STEPS = 120


def run(trials=8, seed=0):
    # As if Matplotlib were not installed; and each rollback prints a line.
    with mock.patch.dict(sys.modules, matplotlib=None), contextlib.redirect_stderr(io.StringIO()):
        return [
            run_trials("a jump of the loss, then NaN", JumpingRun().faults, trials, seed),
            run_trials("an example that spoils the statistics", SpoilingRun().faults, trials, seed),
        ]


def run_trials(name, attempt, trials, seed):
    began, failures = time.monotonic(), []
    for trial in range(trials):
        with tempfile.TemporaryDirectory(prefix="diverged-") as parent:
            what, faults = attempt(Path(parent) / "run", random.Random(f"{seed} {trial}"))
        if faults:
            failures.append(f"trial {trial}, {what}: {faults}")
    return Result.of(name, trials, failures, began)


class JumpingRun:
    """Fits y = 2 x. At one step the weight jumps and then stays; with it, what comes late gives NaN."""

    def __init__(self):
        def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
            losses = (trainables["w"] * batch["x"] - 2 * batch["x"]) ** 2
            spoilt = batch["late"] & (abs(trainables["w"]) > 100)
            return jnp.where(spoilt, jnp.nan, losses), non_trainables

        self.step = train.step(objective, optim.SGD(0.1))

    def fit(self, folder, *, jump, late, steps=STEPS, **options):
        state = self.step.init(jax.random.key(0), {"w": jnp.zeros(())})
        feed = train.Feed({"x": np.ones(STEPS, np.float32), "late": np.arange(STEPS) >= late}, 1)

        def rate(step):
            return {"rate": 1e5 if step == jump else 0.0 if jump < step < late else 0.1}

        module = inspect.getmodule(train.fit)
        with mock.patch.object(module, "Divergence", functools.partial(Divergence, patience=4)):
            return train.fit(self.step, state, feed, steps=steps, run=folder, hyperparams=rate, **options)

    def faults(self, folder, draws):
        what = {"jump": draws.randint(10, 25), "late": draws.randint(40, 60)}
        options = {"save_every": draws.choice([1, 2, 3, 5]), "keep": draws.choice([1, 2, 3])}
        try:
            fitted = self.fit(folder, **what, **options, show=False)
        except train.Diverged as error:
            return (what, options), [f"it raises {error!r}"]
        weight = float(fitted.state.trainables["w"])
        return (what, options), [f"the weight is {weight}, not 2"] * (abs(weight - 2) > 0.1)


class SpoilingRun:
    """A training in which one example is 1e20: its square overflows in the running variance."""

    def __init__(self):
        self.step = train.step(objective, OPTIMIZER)

    def faults(self, folder, draws):
        data, bad = arrays(), draws.randrange(75)
        data["x"][bad] = 1e20
        feeds = train.Feed(data, batch=8, seed=0), train.Feed(arrays(30, seed=1), batch=8)
        fitted = train.fit(
            self.step,
            init_state(self.step),
            feeds[0],
            steps=20,
            run=folder,
            evaluate=feeds[1],
            save_every=2,
            show=False,
        )
        events = [record for record in read_records(folder / "metrics.jsonl") if "event" in record]
        hit = [step + 1 for step in range(20) if bad in feeds[0].padded_indices(step)]
        faults = [f"steps {[e['step'] for e in events]} were skipped, not {hit}"] * ([e["step"] for e in events] != hit)
        faults += ["its id is not logged"] * (not all(bad in event["ids"] for event in events))
        faults += [f"the scores are {fitted.scores}"] * (not all(map(np.isfinite, fitted.scores.values())))
        checkpoints = train.Checkpoints(folder / "checkpoints")
        for step in checkpoints.steps():
            state = checkpoints.restore(fitted.state, step=step).tree
            leaves = jax.tree.leaves((state.trainables, state.non_trainables))
            faults += [f"checkpoint {step} is spoilt"] * (not all(np.isfinite(leaf).all() for leaf in leaves))
        return f"example {bad}", faults


if __name__ == "__main__":
    main(run, 8)
