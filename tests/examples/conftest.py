"""Records what happens while an example trains."""

import jax
import pytest

from mlax import train
from mlax.inspect import measure_peaks

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def events(thorough):
    """What happens, in order: "compiled", "stepped", "evaluating", "evaluated", "fitted"."""
    happened = []

    def listen(event, seconds, **_):
        if event == COMPILED:
            happened.append("compiled")

    def record(function, before, after):
        def call(*args, **kwargs):
            happened.extend(before)
            result = function(*args, **kwargs)
            happened.extend(after)
            return result

        return call

    for dtype in ("float32", "bfloat16") if thorough else ():  # what the report of a run measures, once in a process
        measure_peaks(jax.devices()[0], dtype)
    with pytest.MonkeyPatch.context() as patch:
        jax.monitoring.register_event_duration_secs_listener(listen)
        patch.setattr(train.Step, "__call__", record(train.Step.__call__, [], ["stepped"]))
        patch.setattr(train.Evaluation, "__call__", record(train.Evaluation.__call__, ["evaluating"], ["evaluated"]))
        patch.setattr(train, "fit", record(train.fit, [], ["fitted"]))
        yield happened
        jax.monitoring.unregister_event_duration_listener(listen)
