"""Examples are loaded as `mlax train` loads them, and watched while they train."""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

from mlax import train

FOLDER = Path(__file__).parents[2] / "examples"
COMPILED = "/jax/core/compile/backend_compile_duration"


def loaded(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def events():
    """What happened, in order: "compiled", "stepped", "evaluating", "evaluated", "fitted"."""
    happened = []

    def heard(event, seconds, **_):
        if event == COMPILED:
            happened.append("compiled")

    def marked(function, before, after):
        def call(*args, **kwargs):
            happened.extend(before)
            result = function(*args, **kwargs)
            happened.extend(after)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        jax.monitoring.register_event_duration_secs_listener(heard)
        patch.setattr(train.Step, "__call__", marked(train.Step.__call__, [], ["stepped"]))
        patch.setattr(train.Evaluation, "__call__", marked(train.Evaluation.__call__, ["evaluating"], ["evaluated"]))
        patch.setattr(train, "fit", marked(train.fit, [], ["fitted"]))
        yield happened
        jax.monitoring.unregister_event_duration_listener(heard)


def compilations_after_the_first_step(events):
    """How often something was compiled while an example trained, the first step and the first evaluation left out."""
    while_training = events[events.index("stepped") : _last(events, "evaluated", "fitted")]
    first = while_training.index("evaluating"), while_training.index("evaluated")
    return (while_training[: first[0]] + while_training[first[1] :]).count("compiled")


def _last(events, *names):
    return max(i for i, event in enumerate(events) if event in names)
