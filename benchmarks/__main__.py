"""The benchmarks of mlax beside its peers: what they take, whether all compute the same, and whether claims hold.

    python -m benchmarks gpu [--only WORK WORK:LIBRARY ...]    # 8 minutes on an H200
    python -m benchmarks cpu                                   # 25 minutes on two cores
    python -m benchmarks check                                 # the GPU set with tiny models, in float32 on a CPU
    python -m benchmarks render gpu.jsonl cpu.jsonl            # take rows over into benchmarks/results and all tables

Each measurement is a row of JSON, in runs/benchmarks. The exit status is 1 if a claim does not hold, if a program
fails, or if libraries compute different numbers.
"""

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.suite.claims import differences, judge
from benchmarks.suite.rows import append, merge, read, to_rows
from benchmarks.suite.schedule import Job, Pool
from benchmarks.suite.tables import page_tables, readme_tables, write_tables
from benchmarks.suite.works import WORKS, shrink

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU_SET, SCALING = ("benchmarks/layers.py", "benchmarks/train.py"), ["-m", "benchmarks.scaling"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("gpu", "cpu", "check", "render"))
    parser.add_argument("files", nargs="*", type=Path, help="of rows, to render")
    parser.add_argument("--only", nargs="*", default=[], help="works, WORK:LIBRARY or scaling, in the order to run")
    parser.add_argument("--torch", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--together", type=int, default=8, help="processes that compile side by side")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a program may take to compile")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmarks", help="for rows and logs")
    options = parser.parse_args()
    if options.command == "render":
        return render(options.files)
    rows = options.folder / f"{options.command}-{datetime.datetime.now():%Y%m%d-%H%M%S}.jsonl"
    if options.command == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        torch = [options.torch] if options.torch != sys.executable else []
        return run_scripts([*([script, *torch] for script in CPU_SET), SCALING], rows)
    if options.command == "check":
        os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    status = run_suite(select(options.only), rows, options) if options.only != ["scaling"] else 0
    is_with_scaling = options.command == "gpu" and (not options.only or "scaling" in options.only)
    return max(status, run_scripts([SCALING], rows)) if is_with_scaling else status


def select(only: list[str]) -> list[Job]:
    jobs = [Job(work, entry) for work in WORKS for entry in work.entries]
    names = {job.name for job in jobs} | {job.work.name for job in jobs}
    if unknown := set(only) - names - {"scaling"}:
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}, but: {', '.join(sorted(names))}.")
    return [job for part in only for job in jobs if part in (job.work.name, job.name)] if only else jobs


def run_suite(jobs: list[Job], path: Path, options: argparse.Namespace) -> int:
    tiny = options.command == "check"
    pool = Pool(options.torch, options.folder / "logs", tiny, options.together, options.limit)
    rows, values, failures = [], {}, []
    for job, first, report in pool.measure(jobs):
        if not report:
            failures.append(f"{job.name} failed: see {pool.logs}")
            print(failures[-1], flush=True)
            continue
        new = to_rows(job.work, job.entry.name, first, report)
        append(new, path)
        rows += new
        values.setdefault(job.work.name, {})[job.entry.name] = report["values"]
        print(f"{job.name}:", *(f"{row['value']:,.4g} {row['unit']}" for row in new), flush=True)
    for work in WORKS:
        if work.name in values:
            failures += differences(shrink(work) if tiny else work, values[work.name])
            claims = [] if tiny else [judge(work, claim, rows) for claim in work.claims]
            failures += [words for words, holds in claims if not holds]
            print(*(f"holds: {words}" for words, holds in claims if holds), sep="\n")
    print(*(f"FAILS: {words}" for words in failures), sep="\n")
    return 1 if failures else 0


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
