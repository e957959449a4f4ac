"""The training that faults happen to: dropout, BatchNorm and gradient accumulation.

A script for `python`, `mlax train` and `mlax launch`. It trains on all devices of all processes, and can be made slow,
hang or die in any phase. The metrics identify the examples that a step saw.
"""

import argparse
import functools
import hashlib
import inspect
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import mlax
from mlax import nn, optim, train

EXAMPLES, FEATURES, CLASSES, BATCH = 120, 16, 4, 16


def model():
    return mlax.Series(
        up=nn.Linear(32, bias=False),  # the gradient of a bias before a norm is nothing but rounding errors
        norm=nn.BatchNorm(),
        gelu=mlax.F(jax.nn.gelu),
        drop=nn.Dropout(0.2),
        head=nn.Linear(CLASSES),
    )


def objective(batch, trainables, non_trainables, rng=None, inference_mode=False):
    logits, non_trainables = model().fwd(batch["x"], trainables, non_trainables, rng=rng, inference_mode=inference_mode)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
    seen = {"mean_id": batch["id"].astype(jnp.float32), "codes": (batch["id"] ** 2 % 127).astype(jnp.float32)}
    f1 = train.F1(logits.argmax(-1), batch["y"], classes=CLASSES)
    return {"loss": losses, "accuracy": logits.argmax(-1) == batch["y"], "f1": f1, **seen}, non_trainables


def data():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    y = (x[:, :CLASSES] @ draws.normal(size=(CLASSES, CLASSES))).argmax(-1).astype(np.int32)
    return {"x": x, "y": y, "id": np.arange(EXAMPLES, dtype=np.int32)}


def setup(fsdp=False, slow=0.0):
    """The step, the state and the feeds, on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def slowed(batch, generator):
        time.sleep(slow)
        return batch

    over = NamedSharding(mesh, PartitionSpec("data"))
    feed = train.Feed(data(), BATCH, seed=3, sharding=over, map_batch=slowed if slow else None, workers=1, prefetch=1)
    test = train.Feed(data(), 40, sharding=over)
    step = train.step(objective, optim.Accumulate(optim.AdamW(3e-3), 3))

    def place(leaf):
        split = fsdp and leaf.ndim and leaf.shape[0] % jax.device_count() == 0
        return jax.device_put(leaf, over if split else NamedSharding(mesh, PartitionSpec()))

    variables = jax.tree.map(place, model().init(jax.random.key(0), jnp.zeros((BATCH, FEATURES))))
    return step, step.init(jax.random.key(1), *variables), feed, test


class Faults:
    """Listens to the heartbeats of `fit`: prints them, prolongs a phase, or causes one fault."""

    def __init__(self, options):
        self.options = options
        self.lines = set()

    def __call__(self, step, phase):
        options = self.options
        if options.say and (step, phase) not in self.lines:
            self.lines.add((step, phase))
            print(f"at {step} {phase}", flush=True)
        if options.drag and phase == options.drag_phase:
            time.sleep(options.drag)
        here = options.process == jax.process_index() and step == options.at and phase == options.phase
        if here and not os.path.exists(f"{options.run}.happened"):
            Path(f"{options.run}.happened").touch()
            if options.fault == "sleep":
                time.sleep(1000)
            os.kill(os.getpid(), int(options.fault))


class Touch:
    """A logger that creates a file."""

    def __init__(self, path):
        self.path = Path(path)

    def start(self, run, step, config):
        self.path.touch()

    def log(self, step, values):
        pass

    def close(self):
        pass


def parse_options(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, help="simulated ones; `mlax launch` has an option for it")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds to make a batch")
    parser.add_argument("--slow-disk", type=float, default=0.0, help="seconds added to each fsync")
    parser.add_argument("--grace", type=float, help="seconds after SIGTERM")
    parser.add_argument("--drag", type=float, default=0.0, help="seconds added to each heartbeat of a phase")
    parser.add_argument("--drag-phase", default="step")
    parser.add_argument("--say", action="store_true", help="print each heartbeat")
    parser.add_argument("--digest", action="store_true", help="print hashes of the restored and of the final state")
    parser.add_argument(
        "--stop-in", type=int, help="the process whose callback alone stops the run, which then resumes"
    )
    parser.add_argument("--stop-at", type=int, default=5, help="the step at which it does so")
    parser.add_argument("--process", type=int, help="the process that the fault happens to, once")
    parser.add_argument("--at", type=int, default=0, help="the step of the fault")
    parser.add_argument("--phase", default="step", help="the phase of the fault")
    parser.add_argument("--fault", help="the fault: sleep, or the number of a signal")
    return parser.parse_args(argv)


def main(argv):
    options = parse_options(argv)
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    sys.modules["matplotlib"] = None  # as if it were not installed: curves take longer than the training
    inspect.getmodule(train.fit).write_html_report = lambda *_: None  # and so does this report
    faults = Faults(options)
    loop = inspect.getmodule(train.Loop)
    loop.heartbeat = lambda step, phase: (train.heartbeat(step, phase), faults(step, phase))
    if options.slow_disk:
        fsync = os.fsync
        os.fsync = lambda number: (time.sleep(options.slow_disk), fsync(number))
    step, state, feed, test = setup(options.fsdp, options.slow)
    if options.digest and (found := train.Checkpoints(f"{options.run}/checkpoints")).latest() is not None:
        print("restored", digest(found.restore(state).tree), flush=True)

    def each(at, state, metrics, scores):
        return "enough" if at == options.stop_at and jax.process_index() == options.stop_in else None

    fit = functools.partial(
        train.fit,
        step,
        feed=feed,
        steps=options.steps,
        run=options.run,
        evaluate=test,
        evaluate_every=options.evaluate_every,
        save_every=options.save_every,
        grace=options.grace,
        each=None if options.stop_in is None else each,
        each_every=options.stop_at,
    )
    fitted = fit(state, loggers=[Touch(f"{options.run}.logged-{jax.process_index()}")])
    if fitted.stopped and options.stop_in is not None:
        Path(f"{options.run}.stopped-{jax.process_index()}").write_text(f"{fitted.stopped} at {fitted.step}")
        fitted = fit(fitted.state, resume="anyway")
    if options.digest:
        print("left", digest(fitted.state), flush=True)


def digest(state):
    """A hash of a whole state, gathered from all processes."""
    state = state._replace(rng=jax.random.key_data(state.rng))
    whole = jax.tree.map(lambda leaf: np.asarray(multihost_utils.process_allgather(leaf, tiled=True)), state)
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(whole))).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
