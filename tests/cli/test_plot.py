import json

import pytest

from mlax import train
from mlax.cli import main, recorded_directions


def run(folder, losses, *evaluations, best=None):
    folder.mkdir()
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    lines += [{"step": step, "evaluation": scores} for step, scores in enumerate(evaluations, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if best is not None:
        (folder / "config.json").write_text(json.dumps({"best": best}))
    return str(folder)


def accuracies(*values):
    return [{"loss": 1 / value, "accuracy": value} for value in values]


@pytest.fixture
def table(capsys, tmp_path, monkeypatch):
    """The table that `mlax plot` prints of some runs: a dict for each, by the titles of the columns."""

    def plot(*runs, curves=False):
        if not curves:
            monkeypatch.setattr(train, "plot_curves", lambda path, runs: None)
        assert main(["plot", *runs, "-o", str(tmp_path / "curves.png")]) == 0
        head, *rows, _ = capsys.readouterr().out.splitlines()
        titles = [title.strip() for title in head.split("  ") if title.strip()]
        return [dict(zip(titles, row.split(), strict=True)) for row in rows]

    return plot


def test_runs_are_compared_in_a_table_and_a_plot(tmp_path, table):
    runs = [
        run(tmp_path / "one", [2, 1], *accuracies(0.5, 0.8, 0.7)),
        run(tmp_path / "two", [2, 1.5], *accuracies(0.25, 0.9)),
    ]
    one, two = table(*runs, curves=True)
    assert list(one) == ["run", "step", "loss (last)", "loss (best)", "accuracy (last)", "accuracy (best)"]
    assert list(one.values()) == [runs[0], "3", "1.429", "1.25", "0.7", "0.8"]
    assert list(two.values()) == [runs[1], "2", "1.111", "1.111", "0.9", "0.9"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_of_runs_and_a_new_folder_for_the_picture_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "plot_curves", lambda path, runs: path.write_text(" ".join(runs)))
    (tmp_path / "runs").mkdir()
    runs = [run(tmp_path / "runs" / name, [2, 1]) for name in ("one", "two")]
    output = tmp_path / "out" / "x.png"
    assert main(["plot", str(tmp_path / "runs"), "-o", str(output)]) == 0
    assert output.read_text().split() == runs


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("bits", "1"),
        ("bits_per_byte", "1"),
        ("val/perplexity", "1"),
        ("Error", "1"),
        ("top5_accuracy", "3"),
        ("f1", "3"),
        ("mean_recall", "3"),
    ],
)
def test_the_best_value_of_a_known_metric_is_the_better_one(tmp_path, table, name, best):
    (row,) = table(run(tmp_path / "one", [], *({name: value} for value in (2, 1, 3, 2))))
    assert row[f"{name} (best)"] == best and row[f"{name} (last)"] == "2"


@pytest.mark.parametrize("name", ["score", "temperature", "lossy", "error_accuracy", "bitsy"])
def test_of_an_unknown_metric_no_value_is_called_the_best(tmp_path, table, name):
    (row,) = table(run(tmp_path / "one", [], *({name: value} for value in (2, 1, 3, 2))))
    assert list(row.items())[2:] == [(f"{name} (last)", "2"), (f"{name} (min)", "1"), (f"{name} (max)", "3")]


def test_what_the_run_itself_calls_the_best_counts_first(tmp_path, table):
    values = [{"score": value} for value in (2, 1, 3, 2)]
    lowest = run(tmp_path / "one", [], *values, best="Minimize('score')")
    highest = run(tmp_path / "two", [], *values, best="Maximize('score')")
    assert table(lowest)[0]["score (best)"] == "1" and table(highest)[0]["score (best)"] == "3"
    assert all("score (best)" not in row for row in table(lowest, highest)), "they contradict each other"


def test_the_best_that_fit_records_is_understood(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text(json.dumps({"best": repr(train.Maximize("score"))}))
    assert recorded_directions([str(tmp_path / "one")]) == {"score": "max"}


def test_a_run_without_evaluations_is_compared_by_its_training(tmp_path, table):
    (row,) = table(run(tmp_path / "one", [2, 0.5, 1]))
    assert row["loss (last)"] == "1" and row["loss (best)"] == "0.5"


def test_damaged_lines_are_reported_and_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "plot_curves", lambda path, runs: None)
    folder = run(tmp_path / "one", [2, 1], {"loss": 3})
    with open(f"{folder}/metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "evaluation": {"loss": \xff}}\n{"step": 4, "lo')  # the last one is only incomplete
    main(["plot", folder])
    assert "metrics.jsonl: 1 damaged lines are left out" in capsys.readouterr().out


def test_a_folder_without_metrics_is_reported_and_left_out(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    main(["plot", run(tmp_path / "one", [2, 1]), str(tmp_path / "empty"), "-o", str(tmp_path / "one.png")])
    assert "left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="none of these is the folder of a run"):
        main(["plot", str(tmp_path / "empty")])
