"""A few trials of each fault; `python -m tests.faults.killed --trials 200` and its like run many."""

import pytest

from tests.faults import corrupted, disk_errors, diverged, full_disk, killed, readers
from tests.faults.results import Result


@pytest.mark.parametrize(
    "fault, trials", [(killed, 8), (readers, 10), (corrupted, 26), (full_disk, 8), (disk_errors, 12), (diverged, 1)]
)
def test_checkpoints_survive(fault, trials, request):
    results = fault.run(200 if request.config.getoption("--thorough") else trials)
    for result in [results] if isinstance(results, Result) else results:
        assert result.passed == result.trials, result.failures


def test_checkpoints_survive_system_calls_that_fail_as_on_a_full_disk():
    result = full_disk.run_trials(6, 0, full_disk.FailingCalls, "full disk (injected)")
    assert result.passed == result.trials, result.failures
