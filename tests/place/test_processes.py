"""Two processes with four devices each compute what one with eight does, and neither holds the whole model."""

import json
from pathlib import Path

import numpy as np

from tests.place.two_processes import PLANS, observe
from tests.processes import outputs_of, reserved_port, start_python


def observe_in_two_processes(folder, plans):
    """What each of two processes with four devices observes of the plans."""
    folder.mkdir()
    script = Path(__file__).with_name("two_processes.py")
    with reserved_port() as port:
        outputs_of(*(start_python(script, index, 2, port, 4, folder, *plans) for index in range(2)))
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(2)]


def test_two_processes_with_four_devices_train_like_one_with_eight(tmp_path, thorough):
    plans = PLANS if thorough else ("fsdp",)
    both = observe_in_two_processes(tmp_path / "two", plans)
    for plan in plans:
        first, second = (found[plan] for found in both)
        whole = observe(plan, tmp_path / "one")
        assert first["losses"] == second["losses"], plan
        np.testing.assert_allclose(first["losses"], whole["losses"], rtol=1e-5, err_msg=plan)
        assert first["restored"] and second["restored"] and whole["restored"], plan
        assert first["here"] == second["here"] == 4 * first["each"] and whole["here"] == 8 * whole["each"], plan
