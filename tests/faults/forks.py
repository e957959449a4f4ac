"""A server that has mlax loaded and forks a process that saves for each line it reads; JAX is idle, so it may fork."""

import itertools
import json
import os
import signal
import sys

import numpy as np

from mlax import train
from tests.faults.results import example_tree

AIMS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def kill_at(name, when, number):
    """Make this process kill itself before, during or after the `number`-th call of os.<name>."""
    real, calls = getattr(os, name), itertools.count(1)

    def killing(*args, **kwargs):
        if next(calls) != number:
            return real(*args, **kwargs)
        if when == "after":
            real(*args, **kwargs)
        elif when == "during" and name == "write":
            real(args[0], memoryview(args[1])[: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(os, name, killing)


def save_in_a_loop(folder, seed, aim, waits, steps, keep=2):
    checkpoints = train.Checkpoints(folder, keep=keep, file_bytes=20_000)
    begin = (checkpoints.latest() or 0) + 1
    if aim:
        kill_at(*aim)
    for step in range(begin, begin + steps):
        checkpoints.save(step, example_tree(seed, step))
        if waits:
            checkpoints.wait()
        if waits or step > begin:
            say("saved", step if waits else step - 1)  # the next save has returned, so the one before it is complete
    checkpoints.wait()
    say("saved", step)


def main():
    np.random.default_rng(0).normal(size=3)
    say("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                say("begun", os.getpid())
                save_in_a_loop(**json.loads(line))
            except BaseException as failure:
                say("failed", repr(failure).replace("\n", " "))
                if '"aim": null' in line:
                    signal.pause()  # the kill comes from outside
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        say("over")


if __name__ == "__main__":
    main()
