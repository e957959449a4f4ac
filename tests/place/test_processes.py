"""Two processes of four devices each give the numbers of one process of eight, and none holds the whole model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def runs(processes, devices, plan, folder):
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    command = [sys.executable, str(Path(__file__).with_name("two_processes.py"))]
    children = [
        subprocess.Popen(
            [*command, str(index), str(processes), str(port), str(devices), plan, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]
    said = [child.communicate(timeout=300)[0] for child in children]
    assert all(child.returncode == 0 for child in children), said
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(processes)]


@pytest.mark.parametrize("plan", ["fsdp", "tensor", "1f1b"])
def test_two_processes_of_four_devices_are_one_of_eight(plan, tmp_path):
    first, second = runs(2, 4, plan, tmp_path / "two")
    (whole,) = runs(1, 8, plan, tmp_path / "one")
    assert first["losses"] == second["losses"]
    np.testing.assert_allclose(first["losses"], whole["losses"], rtol=1e-5)
    assert first["restored"] and second["restored"] and whole["restored"]
    assert first["here"] == second["here"] == 4 * first["each"] and whole["here"] == 8 * whole["each"]
