"""The profile window of fit, and its progress in a notebook."""

import gzip
import inspect
import json
import sys
import tempfile
import types

import jax
import pytest

from mlax import train
from tests.train.tasks import OPTIMIZER, objective
from tests.train.test_fit import fit, hide_matplotlib  # noqa: F401


def traces(folder):
    return list(folder.rglob("perfetto_trace.json.gz"))


def step_numbers(trace):
    """The numbers of the steps in a Perfetto trace."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(int(event["args"]["step_num"]) for event in events if "step_num" in event.get("args", {}))


def test_the_steps_of_the_window_are_traced_and_no_others(tmp_path, capsys):
    run = tmp_path / "run"
    fit(run, 12, evaluate=None, profile=(4, 6), show=True)
    (trace,) = traces(run / "profile")
    assert step_numbers(trace) == [4, 5, 6]
    assert "advance" in gzip.decompress(trace.read_bytes()).decode()
    out = capsys.readouterr().out
    assert "profile of steps 4 to 6, " in out and str(trace) in out and "ui.perfetto.dev" in out
    fit(run, 14, evaluate=None, profile=(4, 6))
    assert len(traces(run / "profile")) == 1, "the resumed run is after the window"


def test_without_a_run_folder_the_trace_goes_into_a_temporary_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    step = train.step(objective, OPTIMIZER, steps_per_call=4)
    fit(None, 12, step=step, evaluate=None, profile=(6, 7), show=True)
    (trace,) = traces(tmp_path)
    assert step_numbers(trace) == [5]
    out = capsys.readouterr().out
    assert str(trace) in out and "profile of steps 5 to 8" in out, "those of one call"


def test_a_trace_that_cannot_be_made_ends_no_training(tmp_path, capsys):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        assert fit(tmp_path / "run", 4, evaluate=None, profile=(2, 3)).step == 4
    finally:
        jax.profiler.stop_trace()
    assert "no profile: the trace could not be started" in capsys.readouterr().err


def test_a_run_that_ends_in_the_window_or_before_it_says_so(tmp_path, capsys):
    fit(tmp_path / "run", 5, evaluate=None, profile=(4, 9))
    assert "profile of steps 4 to 5, " in capsys.readouterr().err
    fit(tmp_path / "run", 7, evaluate=None, profile=(8, 9))
    assert "no profile: training ended at step 7, before step 8" in capsys.readouterr().err


@pytest.mark.parametrize("window", [(5, 3), (0, 2), 5, (1, 2, 3), ("1", "2")])
def test_a_window_that_is_none_is_refused(window):
    with pytest.raises(ValueError, match=r"profile is .*, but must be the first and the last step to trace"):
        fit(None, 4, profile=window)


class Shell:
    """IPython's shell in a Jupyter kernel, as far as `fit` uses it."""

    kernel = object()

    def __init__(self):
        self.lines = {}  # by display id, all the texts that it had
        self.display_pub = self

    def publish(self, data, metadata=None, *, transient, update=False):
        name = transient["display_id"]
        assert update == (name in self.lines)
        self.lines.setdefault(name, []).append(data["text/plain"])


def test_progress_in_a_notebook_is_one_line_that_changes(monkeypatch, capsys):
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    fit(None, 30, show=True)
    (texts,) = shell.lines.values()
    assert len(texts) > 1 and texts[-1].startswith("30/30  ") and "loss" in texts[-1] and "steps/s" in texts[-1]
    out = capsys.readouterr().out
    assert "steps/s" not in out and "finished: 30 of 30 steps" in out


def test_an_interrupted_notebook_is_resumed_by_its_cell(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=Shell))
    assert inspect.getmodule(train.fit)._resume_advice() == "run the cell again to resume"


def test_the_first_line_of_progress_leaves_out_what_is_not_known_yet(capsys):
    fit(None, 1, show=True)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("1/1  ")]
    assert "loss" in line and "steps/s" not in line and "left" not in line


def test_the_kernel_of_a_terminal_is_not_a_notebook(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: object()))
    fit(None, 10, evaluate=None, show=True)
    assert "10/10" in capsys.readouterr().out
