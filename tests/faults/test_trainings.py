"""A few trials of the faults of trainings; `make faults` makes many."""

import pytest

from tests.faults import dead_or_hung, resized, resumed, terminated


def failures(rows):
    return [failure for row in rows for failure in row.failures]


def test_a_training_that_was_killed_goes_on_to_the_same_weights():
    assert failures(resumed.run(trials=1)) == []


def test_sigterm_in_any_phase_costs_at_most_one_step():
    assert failures(terminated.run(trials=1, processes=(1,))) == []


def test_two_processes_hear_of_sigterm_at_one_step():
    assert failures(terminated.run(trials=1, phases=("evaluation",), processes=(2,))) == []


@pytest.mark.thorough
def test_a_training_goes_on_with_other_devices():
    assert failures(resized.run(trials=1, routes=("8 -> 4 -> 1 -> 8 devices",), steps=40)) == []


@pytest.mark.thorough
def test_dead_and_hung_processes_are_named():
    assert failures(dead_or_hung.run(trials=1, hang=8)) == []
