"""A few trials of each fault of a training; `make faults` runs many."""

import pytest

from tests.faults import dead_or_hung, resized, resumed, terminated


def failures(results):
    return [failure for result in results for failure in result.failures]


def test_a_killed_training_resumes_to_the_same_weights():
    assert failures(resumed.run(trials=1, seed=2, kills=1)) == []


def test_sigterm_costs_at_most_one_step():
    assert (
        failures(terminated.run(trials=1, phases=("compile", "evaluation"), processes=(1,), slow_phases=("save",)))
        == []
    )


def test_two_processes_act_on_sigterm_at_the_same_step():
    assert failures(terminated.run(trials=1, phases=("evaluation",), processes=(2,), slow_phases=())) == []


@pytest.mark.thorough
def test_a_training_resumes_on_other_numbers_of_devices():
    assert failures(resized.run(trials=1, routes=("8 -> 4 -> 1 -> 8 devices",), steps=40)) == []


@pytest.mark.thorough
def test_dead_and_hung_processes_are_named_and_restarted():
    assert failures(dead_or_hung.run(trials=1, hang=8)) == []
