"""A few trials of each fault; `python -m tests.faults.killed --trials 200` and its like run many."""

import pytest

from tests.faults import corrupted, full_disk, killed


@pytest.mark.parametrize("fault, trials", [(killed, 15), (corrupted, 26), (full_disk, 8)])
def test_checkpoints_survive(fault, trials, request):
    row = fault.run(200 if request.config.getoption("--thorough") else trials)
    assert row.passed == row.trials, row.failures


def test_checkpoints_survive_calls_that_fail_as_on_a_full_disk():
    row = full_disk.swept(6, 0, full_disk.injected, "full disk (injected)")
    assert row.passed == row.trials, row.failures
