"""Benchmarks: what can be checked without measuring anything."""

import ast
import collections
import importlib
import sys

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import loss_curves
from benchmarks.suite.claims import compare, judge
from benchmarks.suite.rows import merge
from benchmarks.suite.schedule import Job, Measurement, Pool
from benchmarks.suite.tables import MARKERS, failing, table, write_tables
from benchmarks.suite.works import MLAX, PEERS, TORCH, WORKS, Claim, Entry
from mlax import nn, train
from tests.processes import ROOT

STEP = next(work for work in WORKS if work.name == "gpt2")
DECODING = next(work for work in WORKS if work.program == "decode")


def row(library, value, work=STEP, metric="time", unit="ms"):
    about = {"date": "2026-01-02", "device": "GPU", "versions": {"jax": "1.0"}}
    names = {"work": work.name, "title": work.title, "library": library}
    return {**names, "metric": metric, "value": value, "unit": unit, **about}


@pytest.fixture
def benchmark(monkeypatch):
    """A function that imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in ("train", "layers", "harness"):
        sys.modules.pop(name, None)


def test_the_benchmark_of_training_says_that_there_is_no_peer(benchmark, monkeypatch, capsys):
    train = benchmark("train")
    monkeypatch.setattr(train, "throughput", lambda name, python, rounds: {"mlax": 1e-3, "mlax, train.fit": 1e-3})
    monkeypatch.setattr(train, "overhead", lambda rounds: ([1e-3], [1e-3]))
    monkeypatch.setattr(train, "stall", lambda rounds: (1, [1e-3], [1e-3]))
    train.main(None, 1)
    printed = capsys.readouterr().out
    assert "no peer to compare with" in printed and "no slower than the fastest peer" not in printed


def test_the_time_of_fit_ends_when_its_last_step_is_computed(benchmark, tmp_path):
    bench = benchmark("train")
    rng = np.random.default_rng(0)
    source = {"x": rng.standard_normal((8, 3), np.float32), "y": rng.integers(0, 2, 8, np.int32)}
    feed = bench.TimedFeed(train.Feed(source, 4, seed=0))
    step, state = bench.mlax_step(nn.Linear(2), feed.example["x"])
    train.fit(step, state, feed, steps=3, run=tmp_path)
    assert len(feed.times) == 3 + 1 and feed.seconds_per_step() == (feed.times[-1] - feed.times[0]) / 3


def test_a_claim_is_about_the_best_peer_and_not_about_other_forms_of_mlax():
    rows = [row(MLAX, 60.0), row("mlax, scanned", 50.0), row(TORCH, 61.0), row("Flax NNX", 70.0)]
    words, holds = judge(STEP, Claim(MLAX, 1.0, PEERS), rows)
    assert holds and "1 x PyTorch, 61 ms" in words
    assert not judge(STEP, Claim(MLAX, 0.9, PEERS), rows)[1]
    assert not judge(STEP, Claim("mlax, scanned", 0.8, MLAX), rows)[1]


def test_a_claim_without_its_row_or_without_a_peer_fails():
    assert not judge(STEP, Claim(MLAX, 57.0), [])[1]
    assert not judge(STEP, Claim(MLAX, 1.0, PEERS), [row(MLAX, 1.0)])[1]


def test_a_rate_must_be_at_least_its_bound():
    rows = [row(MLAX, 900.0, DECODING, "rate", "tokens/s"), row(TORCH, 800.0, DECODING, "rate", "tokens/s")]
    assert judge(DECODING, Claim(MLAX, 1.0, PEERS, "rate"), rows)[1]
    assert not judge(DECODING, Claim(MLAX, 1000.0, metric="rate"), rows)[1]


def test_a_library_that_computes_other_losses_fails():
    losses = {MLAX: [10.0, 9.0, 8.0], "Flax NNX": [10.0, 9.0, 8.05], TORCH: [10.0, 9.5, 9.0]}
    (words, holds), (others, same) = compare(STEP, losses)
    assert holds and not same and "Flax NNX" in words and TORCH in others


def test_a_loss_curve_may_be_as_far_from_float32_as_the_plain_form_is():
    noise = np.random.default_rng(0).normal(scale=1e-3, size=(6, 4, 300))
    shifts = {loss_curves.FLOAT32: 0, loss_curves.PLAIN: -0.01, loss_curves.ROUNDED: -0.008}
    shifts |= {"closer": -0.002, "mirrored": 0.01, "farther": -0.015}
    curves = {name: (5 + shift + each).tolist() for (name, shift), each in zip(shifts.items(), noise, strict=True)}
    errors = dict.fromkeys(shifts, 0.01)
    claims = {row[0]: row[-1] for row in loss_curves.compare(curves, errors)}
    assert "holds" in claims["closer"] and "holds" in claims["mirrored"] and "FAILS" in claims["farther"]
    claims = {row[0]: row[-1] for row in loss_curves.compare(curves, {**errors, "closer": 0.012})}
    assert "FAILS" in claims["closer"] and "holds" in claims["mirrored"]  # by the error of its gradients


@pytest.mark.parametrize("slow", [False, True])
def test_the_exit_status_tells_whether_claims_hold(monkeypatch, tmp_path, capsys, slow):
    ran = []

    def measure(pool, jobs):
        for job in jobs:
            seconds = 1.0 if slow and job.entry.library == MLAX else 0.01
            report = {"times": [seconds], "memory": 2**30, "values": [3.0, 2.0]}
            ran.append(job.name)
            yield Measurement(job, 1.0, {**report, "about": {"date": "", "device": "", "versions": {}}})

    monkeypatch.setattr(Pool, "measure", measure)
    monkeypatch.setattr(command, "check_gpu", lambda: None)
    monkeypatch.setattr(command, "missing_packages", lambda entry, python: ())
    monkeypatch.setattr(sys, "argv", ["", "gpu", "--only", "gpt2", "--folder", str(tmp_path)])
    assert command.main() == int(slow)
    assert ("FAILS" in capsys.readouterr().out) == slow
    (file,) = tmp_path.glob("gpu-*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 2 * len(STEP.entries) == 2 * len(ran)

    file.write_text("".join(lines[:4]))  # of two entries, when the run was interrupted
    del ran[:]
    monkeypatch.setattr(sys, "argv", ["", "gpu", "--only", "gpt2", "--resume", str(file)])
    assert command.main() == int(slow)
    assert ran == [f"gpt2:{entry.name}" for entry in STEP.entries[2:]]
    assert file.read_text() == "".join(lines)


def test_a_program_whose_packages_are_missing_does_not_take_part_and_is_named(capsys):
    jobs = [Job(STEP, Entry(MLAX)), Job(DECODING, Entry(MLAX, packages=("json", "no_such_package")))]
    assert command.find_installed(jobs, sys.executable) == jobs[:1]
    printed = capsys.readouterr().out
    assert printed.startswith("mlax does not take part in decode-b1: ") and "not have no_such_package;" in printed


def test_entries_of_pytorch_name_the_packages_that_their_programs_import():
    module = ast.parse((ROOT / "benchmarks" / "suite" / "torch_programs.py").read_text())
    programs = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef)}
    for job in (Job(work, entry) for work in WORKS for entry in work.entries if entry.library == TORCH):
        imports = [node for node in ast.walk(programs[job.work.program]) if isinstance(node, ast.ImportFrom)]
        assert {node.module.partition(".")[0] for node in imports} == set(job.entry.packages), job.name


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_a_python_that_does_not_run_is_named(python):
    with pytest.raises(SystemExit, match=f"--torch: {python} is not a Python that runs: "):
        command.missing_packages(Entry(TORCH), python)


@pytest.mark.parametrize("again", [1.0, 1.2])
def test_new_rounds_alone_decide_whether_a_layer_is_slower(benchmark, monkeypatch, capsys, again):
    layers = benchmark("layers")
    calls = collections.Counter()

    def time_steps(library, least):
        calls[library] += 1
        is_first = calls[library] <= 2 * (1 + 5)  # of both kinds: one call that compiles, and 5 rounds
        return [{"mlax": 1.5 if is_first else again}.get(library, 1.0)]

    monkeypatch.setattr(layers, "jax_steps", lambda library, name: dict.fromkeys(layers.KINDS, (library, None)))
    monkeypatch.setattr(layers, "jax_peers", lambda name: {"Flax": dict.fromkeys(layers.KINDS, ("Flax", None))})
    monkeypatch.setattr(layers, "time_steps", time_steps)
    times, programs = layers.measure_layer("Linear", None, 5)
    assert layers.ratio_to("Flax", "forward", times, programs) == again and calls["mlax"] == 2 * (1 + 5 + 15)
    assert (
        "Linear is measured again, since it seems slower than that of Flax (forward), 1.50" in capsys.readouterr().out
    )


def test_claims_about_libraries_that_were_not_selected_are_not_judged():
    names = {f"gpt2:{MLAX}"}
    verdicts = command.judge_all([row(MLAX, 90.0), row(MLAX, 14.0, metric="memory")], names, tiny=False)
    assert [holds for _, holds in verdicts] == [False, True]  # 57 ms and 15 GiB; nothing about peers or scanned stacks


def test_the_page_lists_the_layers_that_are_slower_than_those_of_a_jax_peer():
    about = {"date": "2026-01-02", "device": "CPU", "versions": {}, "metric": "time", "unit": "ms", "work": "layers"}
    times = {"Conv": {MLAX: 1.2, "Flax NNX": 1.0, TORCH: 0.1}, "Norm": {MLAX: 1.04, "Equinox": 1.0}, "Own": {MLAX: 1.0}}
    found = [(title, name, value) for title, each in times.items() for name, value in each.items()]
    rows = [{"title": title, "library": name, "value": value, **about} for title, name, value in found]
    assert failing(rows) == "1 of 2 claims hold; these fail:\n\n- Conv: mlax 1.2 ms, 1.20 x Flax NNX, at most 1.05"


def test_the_page_lists_the_exponents_that_exceed_theory():
    about = {"work": "scaling", "library": MLAX, "title": "length", "unit": "exponent", "theory": 0}
    rows = [{**about, "metric": "compilation", "value": 0.3, "holds": False}]
    rows += [{**about, "metric": "time", "value": 0.1, "holds": True}]
    wanted = "1 of 2 claims hold; these fail:\n\n- compilation by length: exponent 0.30, theory 0"
    assert failing(rows) == wanted


def test_the_page_of_benchmarks_names_every_row_and_every_script():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert not [name for name in (*scripts, *(work.name for work in WORKS)) if f"`{name}`" not in page]


@pytest.fixture
def fake_python(tmp_path):
    """A program in place of a Python with PyTorch, which behaves by the name of the work."""
    path = tmp_path / "python"
    path.write_text(f"""#!/bin/sh
case $3 in
  resnet50) echo 'ValueError: of the program' >&2; exit 1 ;;
  vit) sleep 100 ;;
  lstm) mkdir {tmp_path}/tried 2> /dev/null && {{ echo RESOURCE_EXHAUSTED >&2; exit 1; }} ;;
esac
echo '{{"state": "built"}}'
read line
echo '{{"state": "first"}}'
echo '{{"state": "ready"}}'
[ $3 = mlp ] && exit 0
while read line; do
  [ "$line" = end ] && {{ echo '{{"state": "done", "times": [0.5]}}'; exit 0; }}
  echo $3 $4 >> {tmp_path}/turns
  [ $3 = decode-b1 ] && exit 0
  echo '{{"state": "repeated"}}'
done
""")
    path.chmod(0o755)
    return str(path)


def test_a_program_that_fails_is_reported_with_its_reason_and_others_are_measured(fake_python, tmp_path):
    names = ("gpt2", "resnet50", "vit", "lstm", "mlp", "decode-b1")
    jobs = [Job(work, Entry(TORCH)) for name in names for work in WORKS if work.name == name]
    measured = {each.job.work.name: each for each in Pool(fake_python, tmp_path, limit=1.0, gib=500).measure(jobs)}
    assert measured["gpt2"].report["times"] == [0.5] and measured["gpt2"].seconds_to_first < 5
    assert measured["lstm"].report["times"] == [0.5]  # tried again, alone
    reasons = {"resnet50": "ValueError: of the program", "vit": "took more than 1 s"}
    reasons |= dict.fromkeys(("mlp", "decode-b1"), "it exited without an error message")  # before and in a repetition
    assert {name: measured[name].reason for name in reasons} == reasons
    assert not any(measured[name].report for name in reasons)


def test_libraries_that_do_one_work_run_their_repetitions_in_turn(fake_python, tmp_path):
    work = next(work for work in WORKS if work.name == "adamw")
    jobs = [Job(work, Entry(TORCH, name)) for name in ("eager", "fused")]
    assert all(each.report for each in Pool(fake_python, tmp_path).measure(jobs))
    turns = (tmp_path / "turns").read_text().splitlines()
    assert turns == ["adamw PyTorch, eager", "adamw PyTorch, fused"] * work.turns


def test_programs_that_run_side_by_side_fit_the_device_and_starts_run_alone():
    jobs = [Job(work, entry) for work in WORKS for entry in work.entries]
    pool = Pool("python", ROOT)
    groups = list(pool._groups(jobs))
    assert sorted(job.name for group in groups for job in group) == sorted(job.name for job in jobs)
    for group in groups:
        assert sum(job.gib for job in group) < pool.gib
        assert len(group) == 1 or not any(job.work.alone for job in group)


def test_a_new_measurement_replaces_the_old_one_of_the_same():
    rows = merge([row(MLAX, 2.0), row(TORCH, 3.0)], [row(MLAX, 1.0)])
    assert [(each["library"], each["value"]) for each in rows] == [(MLAX, 1.0), (TORCH, 3.0)]


def test_a_table_replaces_what_is_between_the_markers(tmp_path):
    page, (start, end) = tmp_path / "page.md", MARKERS
    page.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    write_tables(page, table([row(MLAX, 1.5), row("mlax, scanned", 2.0), row(TORCH, 61.25)]))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert f"| {STEP.title} | 1.50 ms; scanned: 2.00 ms | 61.2 ms |" in text
    assert "GPU; 2026-01-02; jax 1.0." in text
