"""Errors of the disk: the n-th system call of some kind fails once, in a save or in a restore.

A failed save leaves the older steps as they were and nothing else, its error names a path, and the next save works. A
restore whose file cannot be read falls back to the step before, and deletes nothing.
"""

import builtins
import errno
import inspect
import io
import itertools
import os
import random
import shutil
import tempfile
import time
from unittest import mock

from mlax import files, train
from tests.asserts import unequal_leaves
from tests.faults.results import Result, example_tree, main

WRITING = ("mkdir", "open", "write", "fsync", "rename")  # deleting opens, too, and may fail
ERRORS = (errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE)
SIZE = 300


def run(trials=60, seed=0):
    return [
        run_trials("a save whose system call fails", faults_of_a_save, trials, seed),
        run_trials("a restore whose read fails", faults_of_a_restore, trials, seed),
        run_trials("the folder is removed between or during saves", faults_of_removal, max(1, trials // 6), seed),
    ]


def run_trials(name, attempt, trials, seed):
    began, failures = time.monotonic(), []
    for trial in range(trials):
        draws = random.Random(f"{seed} {name} {trial}")
        with tempfile.TemporaryDirectory(prefix="errors-") as parent:
            folder = os.path.join(parent, "checkpoints")
            faults = attempt(folder, draws, seed)
        if faults:
            failures.append(f"trial {trial}: {faults}")
    return Result.of(name, trials, failures, began)


def faults_of_a_save(folder, draws, seed):
    checkpoints, name, error = train.Checkpoints(folder, keep=2), draws.choice(WRITING), draws.choice(ERRORS)
    save(checkpoints, seed, 1, 2)
    failure = None
    with failing_call(name, draws.randint(1, 8), error) as happened:
        checkpoints.save(3, example_tree(seed, 3, SIZE))
        try:
            checkpoints.wait()
        except OSError as caught:
            failure = caught
    what = f"os.{name} fails with {errno.errorcode[error]}: {failure!r}"
    is_saved = failure is None or "step 3 is saved" in str(failure)
    faults = [f"{what}, silently"] * (failure is None and bool(happened) and name != "open")
    if failure is not None and (failure.errno != error or folder not in str(failure)):
        faults.append(f"{what}, without a path")
    left = set(os.listdir(folder)) - {".lock", "step-00000001", "step-00000002"}
    faults += [f"{what}, and there are {left}"] * (not is_saved and bool(left))
    faults += differences(folder, seed, {2, 3} if is_saved else {1, 2})
    save(checkpoints, seed, 4)
    return faults + differences(folder, seed, {3, 4} if is_saved else {2, 4})


def faults_of_a_restore(folder, draws, seed):
    reports = []
    save(train.Checkpoints(folder, keep=None), seed, 1, 2, 3)
    before = sorted(os.listdir(folder))
    checkpoints = train.Checkpoints(folder, report=reports.append)
    with failing_read(draws.randint(1, 6)) as happened:
        restored = checkpoints.restore(example_tree(seed, 0, SIZE))
    wanted = 2 if happened else 3
    faults = [f"step {restored.step} is restored, not {wanted}"] * (restored.step != wanted)
    faults += ["it has other values"] * bool(unequal_leaves(restored.tree, example_tree(seed, restored.step, SIZE)))
    faults += [f"it reports {reports}"] * (bool(happened) != any("Input/output error" in line for line in reports))
    faults += [f"there are {os.listdir(folder)}"] * (sorted(os.listdir(folder)) != before)
    return faults


def faults_of_removal(folder, draws, seed):
    """The folder is removed; what was saved is gone, but the next save is not."""
    checkpoints = train.Checkpoints(folder, keep=2)
    save(checkpoints, seed, 1)
    real, calls, at = os.fsync, itertools.count(1), draws.randint(0, 4)

    def removing(descriptor):
        if next(calls) == at:
            shutil.rmtree(folder, ignore_errors=True)
        real(descriptor)

    if at == 0:
        shutil.rmtree(folder)
    with mock.patch.object(os, "fsync", removing):
        checkpoints.save(2, example_tree(seed, 2, SIZE))
        try:
            checkpoints.wait()
            saved = {2}
        except OSError:
            saved = set()
    faults = ["step 2 is acknowledged, and is lost"] * (bool(saved) and at > 0 and 2 not in checkpoints.steps())
    save(checkpoints, seed, 3)
    return faults + differences(folder, seed, saved | {3})


def save(checkpoints, seed, *steps):
    for step in steps:
        checkpoints.save(step, example_tree(seed, step, SIZE))
        checkpoints.wait()


def differences(folder, seed, steps):
    """What is wrong with the steps in a folder, of which there must be exactly these."""
    checkpoints = train.Checkpoints(folder)
    if not steps <= set(checkpoints.steps()):
        return [f"steps are {checkpoints.steps()}, not {sorted(steps)}"]
    restored = {step: checkpoints.restore(example_tree(seed, 0, SIZE), step=step).tree for step in steps}
    wrong = [step for step, tree in restored.items() if unequal_leaves(tree, example_tree(seed, step, SIZE))]
    return [f"steps {wrong} have other values"] * bool(wrong)


def failing_call(name, number, error):
    """The `number`-th call of os.<name> fails; enters a list of those that did."""
    real, calls, happened = getattr(os, name), itertools.count(1), []

    def call(*args, **kwargs):
        if next(calls) != number:
            return real(*args, **kwargs)
        happened.append(name)
        raise OSError(error, os.strerror(error), *(args[:1] if isinstance(args[0], str) else ()))

    return entering(mock.patch.object(os, name, call), happened)


def failing_read(number):
    """The `number`-th file that is opened for reading cannot be read."""
    opened, happened = itertools.count(1), []

    class Unreadable(io.FileIO):
        def fail(self, *_):
            happened.append("read")
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        read = readinto = fail

    def call(descriptor, mode):
        return Unreadable(descriptor, mode) if next(opened) == number else builtins.open(descriptor, mode)

    return entering(mock.patch.object(inspect.getmodule(files.safe_open), "open", call, create=True), happened)


class entering:
    """Enter a patch, as something else."""

    def __init__(self, patch, value):
        self.patch, self.value = patch, value

    def __enter__(self):
        self.patch.start()
        return self.value

    def __exit__(self, *_):
        self.patch.stop()


if __name__ == "__main__":
    main(run, 60)
