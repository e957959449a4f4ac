"""Curves: smoothed without lag, and drawn from whatever is left of a log."""

import json
import random

import pytest

from mlax.train import plot_curves, read_records, smooth_values


def test_the_smoothed_line_does_not_lag_behind():
    falling = [1000.0 - step for step in range(1000)]
    assert smooth_values(falling) == pytest.approx(falling)
    drop = [1.0] * 500 + [0.0] * 500
    crossing = next(at for at, value in enumerate(smooth_values(drop)) if value < 0.5)
    assert abs(crossing - 500) <= 1


def test_the_smoothed_line_is_smooth_and_forgets_a_spike():
    draws = random.Random(0)
    noisy = [draws.gauss(0, 1) for _ in range(2000)]
    assert max(map(abs, smooth_values(noisy)[40:-40])) < 1
    noisy[-1] = 30
    assert abs(smooth_values(noisy)[-1]) < 6  # of 41 values
    noisy[1000] = 1e30
    assert max(map(abs, smooth_values(noisy)[1100:])) < 3


def test_a_damaged_log_is_drawn_without_its_damaged_lines(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1 / step, "note": "text", "flag": True}) for step in range(1, 200)]
    lines[50] = lines[50][:-3]
    lines[60] = '{"step": 61, "loss": [1, 2], "evaluation": {"loss": "low"}}'
    lines[70] = '{"step": 71, "loss": "x", "evaluation": {"loss": null, "accuracy": 0.5}}'
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n\x00\xff")
    records = read_records(tmp_path / "metrics.jsonl")
    assert len(records) == 197
    plot_curves(tmp_path / "curves.png", {"run": records})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_scores_of_several_feeds_share_the_panel_of_their_metric(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = {}

    def savefig(figure, path, **options):
        path.touch()
        for axes in figure.axes:
            drawn[axes.get_title()] = axes.get_legend_handles_labels()[1]

    monkeypatch.setattr(Figure, "savefig", savefig)
    scores = {"valid/loss": 0.5, "test/loss": 0.6, "valid/f1": 0.7, "aux/balance": 1.0}
    records = [{"step": 1, "loss": 1.0, "aux/balance": 0.5}, {"step": 1, "evaluation": scores}]
    plot_curves(tmp_path / "curves.png", {"run": records})
    assert drawn == {"loss": ["training", "valid", "test"], "aux/balance": ["training", "evaluation"], "f1": ["valid"]}
    drawn.clear()
    plot_curves(tmp_path / "curves.png", {"a": records, "b": records})
    assert drawn["f1"] == ["a valid", "b valid"]
