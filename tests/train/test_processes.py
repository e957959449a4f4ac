"""Two processes that train together on this machine, with simulated devices."""

import json

import numpy as np
import pytest

from mlax import files
from tests.faults.children import ForkServer, launch, metrics_by_step, saved_steps, weight_bytes

STEPS = 12
TWO = ("-n", 2, "--devices", 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of a run of two processes with two devices each and of one with four, and the output of the first."""
    parent = tmp_path_factory.mktemp("processes")
    argv = ("--steps", STEPS, "--fsdp")
    two = launch("--run", parent / "two", *argv, "--stop-in", 1, options=(*TWO, "--restarts", 0))
    with ForkServer() as fork:
        one = fork("--run", parent / "one", *argv, "--devices", 4)
        assert one.wait() == 0, one.lines
    assert two.wait() == 0, two.lines
    return parent / "two", parent / "one", two.lines


def test_two_processes_compute_the_same_metrics_as_one(runs):
    two, one, _ = runs
    mine, theirs = (files.load(folder / "last.safetensors") for folder in (two, one))
    for room in theirs:
        for part in theirs[room]:
            for name, leaf in theirs[room][part].items():
                np.testing.assert_allclose(mine[room][part][name], leaf, rtol=2e-5, atol=2e-6, err_msg=f"{part}/{name}")
    mine, theirs = metrics_by_step(two), metrics_by_step(one)
    assert list(mine) == list(theirs) == list(range(1, STEPS + 1))
    for step in mine:
        assert mine[step]["mean_id"] == theirs[step]["mean_id"] and mine[step]["codes"] == theirs[step]["codes"]
        assert mine[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-5)


def test_two_processes_evaluate_the_same_as_one(runs):
    def scores(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line["evaluation"] for line in lines if "evaluation" in line]

    mine, theirs = scores(runs[0]), scores(runs[1])
    assert len(mine) == len(theirs) == 2
    assert mine[-1] == pytest.approx(theirs[-1], rel=1e-5)


def test_a_callback_in_one_process_stops_all_of_them(runs):
    for process in (0, 1):
        assert runs[0].with_name(f"two.stopped-{process}").read_text() == "enough at 5"


def test_only_the_first_process_has_loggers(runs):
    assert [runs[0].with_name(f"two.logged-{process}").exists() for process in (0, 1)] == [True, False]


def test_only_the_first_process_prints(runs):
    assert any(line.startswith("[0] finished: 12 of 12 steps") for line in runs[2])
    printed = [line for line in runs[2] if line.startswith("[1]") and "peer ranks" not in line]  # that is Gloo
    assert not printed


def test_the_folder_is_written_by_one_process_and_the_checkpoints_by_both(runs):
    two, one, _ = runs
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    assert saved_steps(two) == saved_steps(one)
    pieces = list((two / "checkpoints" / f"step-{STEPS:08d}").glob("arrays-*"))
    assert len(pieces) == 2
    assert json.loads((two / "config.json").read_text())["processes"] == 2


def test_a_killed_process_is_reported_and_the_restart_reaches_the_same_weights(runs, tmp_path):
    fault = ("--process", 1, "--at", 7, "--phase", "after a step", "--fault", 9)
    child = launch("--run", tmp_path / "killed", "--steps", STEPS, "--fsdp", *fault, options=(*TWO, "--restarts", 1))
    assert child.wait() == 0, child.lines
    died, again = [line for line in child.lines if line.startswith("mlax launch: ")]
    assert "process 1 (pid " in died and "was killed by SIGKILL, at step 7, after a step" in died
    assert "restart 1 of at most 1" in again
    assert weight_bytes(tmp_path / "killed") == weight_bytes(runs[0])
