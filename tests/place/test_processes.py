"""Two processes of four devices each give the numbers of one process of eight, and none holds the whole model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.place.two_processes import PLANS, seen

ROOT = Path(__file__).parents[2]


def seen_by_two(folder, plans):
    """What each of two processes of four devices sees of the plans."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    command = [sys.executable, str(Path(__file__).with_name("two_processes.py"))]
    children = [
        subprocess.Popen(
            [*command, str(index), "2", str(port), "4", str(folder), *plans],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [child.communicate(timeout=300)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert all(child.returncode == 0 for child in children), said
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(2)]


def test_two_processes_of_four_devices_are_one_of_eight(tmp_path, thorough):
    plans = PLANS if thorough else ("fsdp", "1f1b")
    both = seen_by_two(tmp_path / "two", plans)
    for plan in plans:
        first, second = (found[plan] for found in both)
        whole = seen(plan, tmp_path / "one")
        assert first["losses"] == second["losses"], plan
        np.testing.assert_allclose(first["losses"], whole["losses"], rtol=1e-5, err_msg=plan)
        assert first["restored"] and second["restored"] and whole["restored"], plan
        assert first["here"] == second["here"] == 4 * first["each"] and whole["here"] == 8 * whole["each"], plan
