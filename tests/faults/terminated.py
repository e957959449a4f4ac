"""SIGTERM in each phase, to one process and to two: at most one step is lost, and the exit is prompt."""

import random
import re
import signal
import tempfile
import time
from pathlib import Path

from tests.faults.children import ForkServer, launch, saved_steps
from tests.faults.results import Result, main

WITHIN = 10.0  # seconds
TERMINATED = 143
STEPS = 10_000
TWO = ("-n", 2, "--devices", 2, "--restarts", 0)

# How each phase is made long, and the heartbeat at which the signal is sent; {at} is a step.
PHASES = {
    "compile": (("--drag", 60, "--drag-phase", "compiling"), "at 0 compiling"),
    "step": (("--drag", 0.05), "at {at} step"),
    "evaluation": (("--drag", 0.3, "--drag-phase", "evaluation"), "at 10 evaluation"),
    "save": (("--slow-disk", 0.2, "--save-every", 4), "at 4 saving"),
    "waiting for data": (("--slow", 1.0), "at {at} waiting for data"),
}
# Saves that take longer than the grace period, in which nothing but a save may go on. Fsync is called six times.
SLOW = ("--slow-disk", 0.5, "--grace", 1)
SLOW_PHASES = {
    "step": ((*SLOW, "--drag", 0.05), "at {at} step"),
    "save": ((*SLOW, "--save-every", 4), "at 4 saving"),
    "evaluation": ((*SLOW, "--drag", 0.3, "--drag-phase", "evaluation"), "at 10 evaluation"),
}


def run(trials=2, seed=0, phases=tuple(PHASES), processes=(1, 2), slow_phases=tuple(SLOW_PHASES)):
    with ForkServer() as fork:
        rows = [run_phase(fork, phase, count, trials, random.Random(seed)) for phase in phases for count in processes]
        return rows + [run_phase(fork, phase, 1, trials, random.Random(seed), SLOW_PHASES) for phase in slow_phases]


def run_phase(fork, phase, count, trials, draws, phases=PHASES):
    began, failures, slowest = time.monotonic(), [], 0.0
    for trial in range(trials):
        with tempfile.TemporaryDirectory(prefix="terminated-") as parent:
            folder = Path(parent) / "run"
            options, word = phases[phase]
            argv = ("--run", folder, "--steps", STEPS, "--say", "--save-every", 5000, *options)
            child = fork(*argv) if count == 1 else launch(*argv, options=TWO)
            faults, seconds = terminate(child, folder, word.format(at=draws.randint(1, 6)), draws.uniform(0, 0.2))
            slowest = max(slowest, seconds)
            if faults:
                failures.append(f"trial {trial}: {faults}, {child.lines[-6:]}")
    words = "one process" if count == 1 else "two processes"
    words = "slow saves" if phases is SLOW_PHASES else words
    return Result.of(f"SIGTERM in {phase}, {words} (slowest {slowest:.1f} s)", trials, failures, began)


def terminate(child, folder, word, delay):
    """Send the signal at a heartbeat; returns what was wrong with the exit, and the seconds that it took."""
    if not child.wait_for(word):
        return [f"it exited with {child.wait()} before {word!r}"], 0.0
    time.sleep(delay)
    done = max(int(match[1]) for line in list(child.lines) if (match := re.fullmatch(r"(?:\[\d\] )?at (\d+) .*", line)))
    began = time.monotonic()
    child.send(signal.SIGTERM)
    status = child.wait(seconds=30)
    seconds = time.monotonic() - began
    saved = max(saved_steps(folder), default=0)
    faults = [f"the exit status is {status}"] * (status != TERMINATED)
    faults += [f"it took {seconds:.1f} s"] * (seconds > WITHIN)
    faults += [f"step {saved} is saved, but {done} were done"] * (saved < done)
    return faults, seconds


if __name__ == "__main__":
    main(run, 2)
