"""Two processes of four devices each give the numbers of one process of eight, and none holds the whole model."""

import json
from pathlib import Path

import numpy as np

from tests.place.two_processes import PLANS, seen
from tests.processes import outputs_of, reserved_port, start_python


def seen_by_two(folder, plans):
    """What each of two processes of four devices sees of the plans."""
    folder.mkdir()
    script = Path(__file__).with_name("two_processes.py")
    with reserved_port() as port:
        outputs_of(*(start_python(script, index, 2, port, 4, folder, *plans) for index in range(2)))
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
