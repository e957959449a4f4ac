"""A damaged log or configuration: the same command resumes, to the same weights, and says what it dropped."""

import random
import shutil
import tempfile
import time
from pathlib import Path

from tests.faults.children import ForkServer, weight_bytes
from tests.faults.results import Result, main

STEPS = 12


def run(trials=16, seed=0):
    draws, began, failures = random.Random(seed), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="damaged-") as parent, ForkServer() as fork:
        whole, half, folder = (Path(parent) / name for name in ("whole", "half", "run"))
        assert fork("--run", whole, "--steps", STEPS).wait() == 0
        shutil.copytree(whole, half)
        drop_last_checkpoint(half)
        for trial in range(trials):
            shutil.copytree(half, folder)
            name = draws.choice(["metrics.jsonl", "config.json"])
            what = draws.choice(list(DAMAGES))
            (folder / name).write_bytes(DAMAGES[what]((folder / name).read_bytes(), draws))
            child = fork("--run", folder, "--steps", STEPS)
            status = child.wait()
            faults = [f"ended with {status}: {child.lines[-5:]}"] * (status != 0)
            if not faults and weight_bytes(folder) != weight_bytes(whole):
                faults.append("the weights differ")
            if faults:
                failures.append(f"trial {trial}, {what} in {name}: {faults}")
            shutil.rmtree(folder)
    return Result.of("log or configuration damaged", trials, failures, began)


def drop_last_checkpoint(run):
    """As if the run had been killed between its last two checkpoints."""
    for path in (*run.glob(f"checkpoints/step-{STEPS:08d}*"), *run.glob("*.safetensors")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def flip(data, draws):
    at = draws.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draws.randrange(8)]) + data[at + 1 :]


def flip_many(data, draws):
    for _ in range(20):
        data = flip(data, draws)
    return data


def cut(data, draws):
    return data[: draws.randrange(len(data))]


def zero(data, draws):
    """A block of zeros, as a crash leaves where a file was extended but not written."""
    at = draws.randrange(len(data))
    return data[:at] + bytes(len(data) - at)


def insert(data, draws):
    at = draws.randrange(len(data))
    return data[:at] + draws.randbytes(100) + data[at:]


DAMAGES = {function.__name__: function for function in (flip, flip_many, cut, zero, insert)}

if __name__ == "__main__":
    main(run, 16)
