import json

import pytest

from mlax.cli import main


def run(folder, losses, accuracies=()):
    folder.mkdir()
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    lines += [{"step": step, "evaluation": {"loss": 1 / a, "accuracy": a}} for step, a in enumerate(accuracies, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def test_runs_are_compared_in_a_table_and_a_plot(tmp_path, capsys):
    runs = [run(tmp_path / "one", [2, 1], [0.5, 0.8, 0.7]), run(tmp_path / "two", [2, 1.5], [0.25, 0.9])]
    assert main(["plot", *runs, "-o", str(tmp_path / "both.png")]) == 0
    head, one, two, _ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "accuracy (best)"
    assert one.split() == [runs[0], "3", "1.429", "1.25", "0.7", "0.8"]
    assert two.split() == [runs[1], "2", "1.111", "1.111", "0.9", "0.9"]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_metrics_is_reported_and_left_out(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    main(["plot", run(tmp_path / "one", [2, 1]), str(tmp_path / "empty"), "-o", str(tmp_path / "one.png")])
    assert "left out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="none of these is the folder of a run"):
        main(["plot", str(tmp_path / "empty")])
