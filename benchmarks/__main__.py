"""The benchmarks of mlax beside its peers: what they take, whether all compute the same, and whether claims hold.

    python -m benchmarks gpu [--only WORK WORK:LIBRARY ...]
    python -m benchmarks cpu [--only layers train scaling]     # 20 minutes on two cores
    python -m benchmarks check                                 # the GPU set with tiny models, in float32 on a CPU
    python -m benchmarks render gpu.jsonl cpu.jsonl            # take rows over into benchmarks/results and all tables

Each measurement is a row of JSON, in runs/benchmarks. The exit status is 1 if a claim does not hold, if a program
fails, or if libraries compute different numbers.
"""

import argparse
import datetime
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.suite.claims import compare, judge
from benchmarks.suite.rows import append, merge, read, to_rows
from benchmarks.suite.schedule import Job, Pool, device_gib
from benchmarks.suite.tables import page_tables, readme_tables, write_tables
from benchmarks.suite.works import TORCH, WORKS, shrink

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCALING = ["-m", "benchmarks.scaling"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("gpu", "cpu", "check", "render"))
    parser.add_argument("files", nargs="*", type=Path, help="of rows, to render")
    parser.add_argument("--only", nargs="*", default=[], help="works, WORK:LIBRARY, scripts, in the order to run")
    parser.add_argument("--torch", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--together", type=int, default=8, help="processes that compile side by side")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a program may take to compile")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmarks", help="for rows and logs")
    options = parser.parse_args()
    if options.command == "render":
        return render(options.files)
    rows = options.folder / f"{options.command}-{datetime.datetime.now():%Y%m%d-%H%M%S}.jsonl"
    return {"gpu": run_gpu, "cpu": run_cpu, "check": run_check}[options.command](rows, options)


def run_gpu(rows: Path, options: argparse.Namespace) -> int:
    status = 0
    if options.only != ["scaling"]:
        status = run_suite(select(options.only), rows, options)
    if not options.only or "scaling" in options.only:
        status = max(status, run_scripts([SCALING], rows))
    return status


def run_cpu(rows: Path, options: argparse.Namespace) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    torch = [options.torch] if has_torch(options.torch) else []
    commands = {name: [f"benchmarks/{name}.py", *torch] for name in ("layers", "train")} | {"scaling": SCALING}
    return run_scripts([commands[name] for name in options.only or commands], rows)


def run_check(rows: Path, options: argparse.Namespace) -> int:
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    jobs = [job for job in select(options.only) if job.entry.library != TORCH or has_torch(options.torch)]
    distinct: dict[Any, Job] = {}
    for job in jobs:  # of several sizes of one program the tiny ones are the same
        distinct.setdefault((job.work.program, shrink(job.work).size, job.entry.name), job)
    return run_suite(list(distinct.values()), rows, options, tiny=True)


@functools.cache
def has_torch(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    found = subprocess.run([python, "-c", code]).returncode == 0
    if not found:
        print(f"PyTorch does not take part: {python} does not have it; pass --torch")
    return found


def select(only: list[str]) -> list[Job]:
    jobs = [Job(work, entry) for work in WORKS for entry in work.entries]
    names = {job.name for job in jobs} | {job.work.name for job in jobs}
    if unknown := set(only) - names - {"scaling"}:
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}, but: {', '.join(sorted(names))}.")
    return [job for part in only for job in jobs if part in (job.work.name, job.name)] if only else jobs


def run_suite(jobs: list[Job], path: Path, options: argparse.Namespace, *, tiny: bool = False) -> int:
    pool = Pool(options.torch, options.folder / "logs", tiny, options.together, options.limit, device_gib())
    rows, values, verdicts = [], {}, []
    for job, first, report in pool.measure(jobs):
        if not report:
            verdicts.append((f"{job.name}: runs (see {pool.logs})", False))
            print(f"{job.name}: failed", flush=True)
            continue
        new = to_rows(job.work, job.entry.name, first, report)
        append(new, path)
        rows += new
        values.setdefault(job.work.name, {})[job.entry.name] = report["values"]
        print(f"{job.name}:", *(f"{row['value']:,.4g} {row['unit']}" for row in new), flush=True)
    for work in WORKS:
        if work.name in values:
            verdicts += compare(shrink(work) if tiny else work, values[work.name])
            verdicts += [] if tiny else [judge(work, claim, rows) for claim in work.claims]
    for words, holds in verdicts:
        print(f"{'holds' if holds else 'FAILS'}: {words}")
    return 0 if all(holds for _, holds in verdicts) else 1


def run_scripts(commands: list[list[str]], rows: Path) -> int:
    """Benchmarks with claims of their own, which exit with 1 if one fails."""
    rows.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    programs = [[sys.executable, *command, "--rows", str(rows)] for command in commands]
    return max(subprocess.run(program, cwd=ROOT, env=environment).returncode for program in programs)


def render(files: list[Path]) -> int:
    """Take over the rows of files, named after their sets, and write the tables of all results."""
    for file in files:
        path = RESULTS / f"{file.name.partition('-')[0].removesuffix('.jsonl')}.jsonl"
        merged = merge(read(path), read(file))
        path.unlink(missing_ok=True)
        append(merged, path)
    results = read(RESULTS / "gpu.jsonl"), read(RESULTS / "cpu.jsonl")
    write_tables(ROOT / "README.md", readme_tables(*results))
    write_tables(ROOT / "docs" / "benchmarks.md", page_tables(*results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
