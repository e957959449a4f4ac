"""A full disk: old steps stay intact, partial files are removed, the error says so, and saving works again with space.

On a tmpfs of varying size, where a user may mount one (`unshare -rm`); elsewhere by system calls that fail as on a full
disk after a varying number of bytes. In every other trial the check of free space is made to report too much, as if
another program had filled the disk since: then writes fail halfway.
"""

import contextlib
import errno
import inspect
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from unittest import mock

from mlax import files, train
from tests.asserts import unequal_leaves
from tests.faults.results import Result, example_tree, main

SIZE, BYTES = 3000, 76_500  # of a pytree, roughly


def run(trials=20, seed=0):
    if not mounts():
        return run_trials(trials, seed, FailingCalls, "full disk (injected)")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.faults.full_disk", "--inside", str(trials), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row = json.loads(done.stdout) if done.stdout else ("full disk (tmpfs)", trials, 0, 0.0, (done.stderr,))
    return Result(*row)


def mounts():
    """Whether a user can mount a file system here."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False


def run_trials(trials, seed, disk, name):
    began, failures = time.monotonic(), []
    for trial in range(trials):
        draws = random.Random(f"{seed} {trial}")
        with tempfile.TemporaryDirectory(prefix="full-") as place, disk(place, trial / trials, draws) as (more, what):
            faults = faults_in(place, seed, lies=trial % 2 == 1, more=more)
            if faults:
                failures.append(f"trial {trial}, {what}: {faults}")
    return Result.of(name, trials, failures, began)


def faults_in(place, seed, lies, more):
    folder, faults = os.path.join(place, "runs", "checkpoints"), []
    checkpoints = train.Checkpoints(folder, keep=None, file_bytes=20_000)
    module = inspect.getmodule(files.free_disk_bytes)
    lie = mock.patch.object(module, "free_disk_bytes", return_value=10**9) if lies else contextlib.nullcontext()
    with lie:
        for step in range(1, 50):
            checkpoints.save(step, example_tree(seed, step, SIZE))
            try:
                checkpoints.wait()
            except files.NotEnoughSpace as failure:
                if not str(failure.filename).startswith(place) or f"{failure.needed:,}" not in str(failure):
                    faults.append(f"the error is {failure}")
                if f"{failure.free:,} are free" not in str(failure) or failure.needed < BYTES:
                    faults.append(f"the error is {failure}")
                break
    good = tuple(range(1, step))
    faults += [f"steps are {checkpoints.steps()}, not {good}"] * (checkpoints.steps() != good)
    faults += [f"latest is {checkpoints.latest()}"] * (checkpoints.latest() != (good[-1] if good else None))
    left = sorted({*os.listdir(folder)} - {".lock"}) if os.path.isdir(folder) else []
    faults += [f"there are {left}"] * (left != [f"step-{old:08d}" for old in good])
    more()
    checkpoints.save(step, example_tree(seed, step, SIZE))
    checkpoints.wait()
    for old in (*good, step):
        restored = checkpoints.restore(example_tree(seed, 0, SIZE), step=old)
        faults += [f"step {old} has other values"] * bool(unequal_leaves(restored.tree, example_tree(seed, old, SIZE)))
    return faults


class SmallTmpfs:
    """A tmpfs with little space or, every fourth time, with few inodes."""

    def __init__(self, place, share, draws):
        self.place = place
        size = int(BYTES * (0.5 + 3 * share) + draws.randrange(20_000)) // 4096 * 4096
        self.options = f"size={size}"
        if draws.random() < 0.25:
            self.options = f"size=10m,nr_inodes={draws.randint(3, 24)}"

    def __enter__(self):
        subprocess.run(["mount", "-t", "tmpfs", "-o", self.options, "tmpfs", self.place], check=True)
        return self.more, self.options

    def more(self):
        subprocess.run(["mount", "-o", "remount,size=50m,nr_inodes=1000", self.place], check=True)

    def __exit__(self, *_):
        subprocess.run(["umount", "-l", self.place], check=True)


class FailingCalls:
    """System calls that fail as on a full disk: writes after some bytes, or the n-th mkdir, open or fsync."""

    def __init__(self, place, share, draws):
        self.left = int(BYTES * (0.5 + 3 * share) + draws.randrange(20_000))
        self.name = draws.choice(["write", "write", "write", "mkdir", "open", "fsync"])
        self.number = draws.randint(1, 25)
        self.full, self.calls, self.patch = True, itertools.count(1), None

    def __enter__(self):
        real = getattr(os, self.name)

        def call(*args, **kwargs):
            if not self.full or (self.name == "open" and not args[1] & os.O_CREAT):
                return real(*args, **kwargs)
            if self.name == "write":
                room = min(len(args[1]), max(0, self.left))
                self.left -= room
                if room or not len(args[1]):
                    return real(args[0], args[1][:room])
            elif next(self.calls) < self.number:
                return real(*args, **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch = mock.patch.object(os, self.name, call)
        self.patch.start()
        return self.more, f"os.{self.name} fails"

    def more(self):
        self.full = False

    def __exit__(self, *_):
        self.patch.stop()


if __name__ == "__main__":
    if "--inside" in sys.argv:
        print(json.dumps(run_trials(int(sys.argv[2]), int(sys.argv[3]), SmallTmpfs, "full disk (tmpfs)")))
    else:
        main(run, 20)
