"""Corrupted checkpoints: the damage is detected, the array or file is named, and an earlier step is restored."""

import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from mlax import train
from mlax.files import read_header
from tests.asserts import unequal_leaves
from tests.faults.results import Result, example_tree, main

STEPS = (10, 20, 30)


def run(trials=200, seed=0):
    draws, began, failures = random.Random(seed), time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="corrupted-") as parent:
        whole = os.path.join(parent, "whole")
        checkpoints = train.Checkpoints(whole, file_bytes=1500)
        for step in STEPS:
            checkpoints.save(step, example_tree(seed, step, size=100))
        checkpoints.wait()
        for trial in range(trials):
            folder, damage = os.path.join(parent, "damaged"), list(DAMAGES)[trial % len(DAMAGES)]
            shutil.copytree(whole, folder)
            bad, names = DAMAGES[damage](folder, draws)
            faults = faults_in(folder, seed, bad, names)
            if faults:
                failures.append(f"trial {trial}, {damage} {names}: {faults}")
            shutil.rmtree(folder)
    return Result.of("corrupted checkpoints", trials, failures, began)


def faults_in(folder, seed, bad, names):
    reports = []
    restored = train.Checkpoints(folder, report=reports.append).restore(example_tree(seed, 0, size=100))
    faults = []
    if [step for step, _ in restored.skipped] != bad:
        faults.append(f"skipped {restored.skipped}")
    if len(reports) != len(bad) or not any(name in reports[0] for name in names):
        faults.append(f"it reports {reports}")
    wanted = example_tree(seed, max(set(STEPS) - set(bad)), size=100)
    if unequal_leaves(restored.tree, wanted) or restored.step != wanted["step"]:
        faults.append(f"it restores step {restored.step}")
    return faults


def place(folder, step):
    return os.path.join(folder, f"step-{step:08d}")


def arrays(folder, step=30):
    return sorted(os.path.join(place(folder, step), name) for name in os.listdir(place(folder, step)) if name[0] == "a")


def flip(path, draws, low=0, high=None):
    """Flip one bit of a file, anywhere or between two offsets."""
    with open(path, "r+b") as file:
        at = draws.randrange(low, high or os.path.getsize(path))
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << draws.randrange(8))
        file.seek(at)
        file.write(bytes([byte]))
    return [30], [path]


def flip_anywhere(folder, draws):
    return flip(draws.choice(arrays(folder)), draws)


def flip_in_header(folder, draws):
    path = draws.choice(arrays(folder))
    with open(path, "rb") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
    return flip(path, draws, 0, length)


def flip_in_manifest(folder, draws):
    return flip(os.path.join(place(folder, 30), "manifest.json"), draws)


def cut(folder, draws):
    path = draws.choice([*arrays(folder), os.path.join(place(folder, 30), "manifest.json")])
    os.truncate(path, draws.randrange(os.path.getsize(path)))
    return [30], [path]


def lengthen(folder, draws):
    path = draws.choice([*arrays(folder), os.path.join(place(folder, 30), "manifest.json")])
    with open(path, "ab") as file:
        file.write(draws.randbytes(draws.randint(1, 5000)))
    return [30], [path]


def delete(folder, draws):
    path = draws.choice([*arrays(folder), os.path.join(place(folder, 30), "manifest.json")])
    os.unlink(path)
    return [30], [path]


def blank(folder, draws):
    path = draws.choice(arrays(folder))
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))
    return [30], [path]


def swap(one, other):
    os.rename(one, f"{one}.away")
    os.rename(other, one)
    os.rename(f"{one}.away", other)


def swap_files(folder, draws):
    one, other = draws.sample(arrays(folder), 2)
    swap(one, other)
    return [30], [one, other]


def swap_pieces(folder, draws):
    """Exchange the bytes of two arrays of one shape and dtype, in their files; the headers stay valid."""
    ranges = {}
    for path in arrays(folder):
        with open(path, "rb") as file:
            entries = read_header(file, os.path.getsize(path), path).entries
        ranges |= {name: (path, *entry[2:]) for name, entry in entries.items()}
    names = ["optimizer/0/up", "optimizer/0/down"]
    found = [Path(path).read_bytes()[start:stop] for path, start, stop in (ranges[name] for name in names)]
    for name, data in zip(reversed(names), found, strict=True):
        with open(ranges[name][0], "r+b") as file:
            file.seek(ranges[name][1])
            file.write(data)
    return [30], [repr(name) for name in names]


def swap_steps(folder, draws):
    swap(place(folder, 30), place(folder, 20))
    return [30, 20], [place(folder, 30)]


def swap_file_of_steps(folder, draws):
    """Exchange a file with the one of the same name in another step, which damages both steps."""
    number = draws.randrange(len(arrays(folder)))
    swap(arrays(folder)[number], arrays(folder, 20)[number])
    return [30, 20], [arrays(folder)[number]]


def swap_manifests(folder, draws):
    paths = [os.path.join(place(folder, step), "manifest.json") for step in (30, 20)]
    swap(*paths)
    return [30, 20], [place(folder, 30)]


def link(folder, draws):
    path = draws.choice(arrays(folder))
    os.rename(path, os.path.join(folder, "elsewhere"))
    os.symlink(os.path.join(folder, "elsewhere"), path)
    return [30], [path]


DAMAGES = {
    function.__name__: function
    for function in (
        flip_anywhere,
        flip_in_header,
        flip_in_manifest,
        cut,
        lengthen,
        delete,
        blank,
        swap_files,
        swap_pieces,
        swap_steps,
        swap_file_of_steps,
        swap_manifests,
        link,
    )
}

if __name__ == "__main__":
    main(run, 200)
