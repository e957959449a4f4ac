"""Hostile weight files and configurations, mutated at random: each is loaded or refused, at little cost."""

import json

import pytest

from tests.processes import outputs_of, start_python

MORE_BYTES = 64 << 20  # than 1.2 times the files
SECONDS = 2


def faults(case):
    """What a case did that no file may cause."""
    yield from ([] if case["outcome"] in ("loaded", "refused") else [case["outcome"]])
    yield from (f"opened {path}" for path in case["outside"])
    if case["seconds"] > SECONDS:
        yield f"took {case['seconds']} s"
    if case["grown"] > 1.2 * case["size"] + MORE_BYTES:
        yield f"took {case['grown']:,} bytes"


@pytest.fixture(scope="module")
def cases(tmp_path_factory, thorough):
    """Of 1,000 with `--thorough`; in other processes, so that a crash is seen."""
    ranges = [(0, 500), (500, 1000)] if thorough else [(0, 80)]
    children = [start_python("-m", "tests.zoo.fuzz", tmp_path_factory.mktemp("fuzz"), *each) for each in ranges]
    return [[json.loads(line) for line in output.splitlines()] for output in outputs_of(*children, seconds=900)]


def test_no_mutated_file_crashes_or_is_read_outside_of_its_folder_or_is_expensive(cases):
    found = {case["seed"]: list(faults(case)) for _, *child in cases for case in child}
    assert not any(found.values()), {seed: fault for seed, fault in found.items() if fault}
    kinds = {(case["kind"], case["outcome"]) for _, *child in cases for case in child}
    assert {kind for kind, outcome in kinds if outcome == "refused"} == {"safetensors", "index", "torch", "config"}
    assert {kind for kind, outcome in kinds if outcome == "loaded"} >= {"safetensors", "index", "torch"}
    assert len(found) in (80, 1000)


def test_a_loader_that_reads_elsewhere_or_takes_memory_would_be_noticed(cases):
    noticed = list(faults(cases[0][0]))
    assert [fault.split()[0] for fault in noticed] == ["KeyError:", "opened", "took"]
    assert cases[0][0]["seconds"] >= 0.5
