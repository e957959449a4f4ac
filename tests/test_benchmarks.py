"""Benchmarks: what can be checked without measuring anything."""

import importlib
import sys

import pytest

from tests.processes import ROOT


@pytest.fixture
def benchmark(monkeypatch):
    """A function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in ("train", "harness"):
        sys.modules.pop(name, None)


def test_the_benchmark_of_training_says_that_there_is_no_peer(benchmark, monkeypatch, capsys):
    train = benchmark("train")
    monkeypatch.setattr(train, "throughput", lambda name, python, rounds: {"mlax": 1e-3, "mlax, train.fit": 1e-3})
    monkeypatch.setattr(train, "overhead", lambda rounds: ([1e-3], [1e-3]))
    monkeypatch.setattr(train, "stall", lambda rounds: (1, [1e-3], [1e-3]))
    train.main(None, 1)
    printed = capsys.readouterr().out
    assert "no peer to compare with" in printed and "no slower than the fastest peer" not in printed
