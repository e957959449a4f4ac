"""The benchmarks of mlax beside its peers: what they take, whether all compute the same, and whether claims hold.

    python -m benchmarks gpu [--only WORK WORK:LIBRARY ...]    # 8 minutes on 16 cores
    python -m benchmarks gpu --resume gpu-DATE.jsonl           # what an interrupted run has not measured
    python -m benchmarks cpu [--only layers train scaling]     # 20 minutes on two cores
    python -m benchmarks check                                 # the GPU set with tiny models, in float32 on a CPU
    python -m benchmarks render gpu.jsonl cpu.jsonl            # take rows over into benchmarks/results and all tables

Each measurement is a row of JSON, in runs/benchmarks, written as soon as it is made. The exit status is 1 if a claim
does not hold, if a program fails, or if libraries compute different numbers.
"""

import argparse
import datetime
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.suite.claims import Verdict, compare, is_selected, judge
from benchmarks.suite.rows import PACKAGES, Row, append, merge, read, to_rows
from benchmarks.suite.schedule import Job, Pool, device_gib, environment_for
from benchmarks.suite.tables import page_tables, readme_tables, write_tables
from benchmarks.suite.works import TORCH, WORKS, Entry, shrink

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
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--together", type=int, default=max(2, 3 * cores // 4), help="processes that start at once")
    parser.add_argument("--resume", type=Path, help="rows of an interrupted run, to add the missing ones to")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a program may take to compile")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmarks", help="for rows and logs")
    options = parser.parse_args()
    if options.command == "render":
        return render(options.files)
    rows = options.resume or options.folder / f"{options.command}-{datetime.datetime.now():%Y%m%d-%H%M%S}.jsonl"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that processes end, too
    print(f"rows: {rows}", flush=True)
    return {"gpu": run_gpu, "cpu": run_cpu, "check": run_check}[options.command](rows.resolve(), options)


def run_gpu(rows: Path, options: argparse.Namespace) -> int:
    check_gpu()
    status = 0
    if options.only != ["scaling"]:
        status = run_suite(find_installed(select(options.only), options.torch), rows, options)
    if "scaling" in (options.only or ["scaling"]):
        found = [row["holds"] for row in read(rows) if row["work"] == "scaling"]
        status = max(status, int(not all(found)) if found else run_scripts([SCALING], rows))
    return status


def run_cpu(rows: Path, options: argparse.Namespace) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    if missing := missing_packages(Entry(TORCH), options.torch):
        print_missing("PyTorch does not take part", TORCH, missing, options.torch)
    torch = [] if missing else [options.torch]
    commands = {name: [f"benchmarks/{name}.py", *torch] for name in ("layers", "train")} | {"scaling": SCALING}
    if unknown := set(options.only) - set(commands):
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}, but: {', '.join(commands)}.")
    return run_scripts([commands[name] for name in options.only or commands], rows)


def run_check(rows: Path, options: argparse.Namespace) -> int:
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    distinct: dict[Any, Job] = {}
    for job in find_installed(select(options.only), options.torch):  # tiny, several sizes of one program are the same
        distinct.setdefault((job.work.program, shrink(job.work).size, job.entry.name), job)
    return run_suite(list(distinct.values()), rows, options, tiny=True)


def check_gpu() -> None:
    """Raise without a GPU; asked in another process, since one that uses a GPU takes its memory."""
    code = "import jax, sys; sys.exit(jax.default_backend() != 'gpu')"
    settings = {**environment_for(sys.executable), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if subprocess.run([sys.executable, "-c", code], env=settings, stderr=subprocess.DEVNULL).returncode:
        raise SystemExit("JAX finds no GPU here; `python -m benchmarks check` runs the same programs, tiny, on a CPU.")


def find_installed(jobs: list[Job], torch_python: str) -> list[Job]:
    """The jobs whose packages are installed; prints what the others do not take part in."""
    found, left_out = [], {}
    for job in jobs:
        if missing := missing_packages(job.entry, torch_python):
            left_out.setdefault((job.entry.library, missing), []).append(job.work.name)
        else:
            found.append(job)
    for (library, missing), works in left_out.items():
        print_missing(f"{library} does not take part in {', '.join(works)}", library, missing, torch_python)
    return found


def missing_packages(entry: Entry, torch_python: str) -> tuple[str, ...]:
    """The packages of an entry's library and program that its Python does not have."""
    own = ("torch",) if entry.library == TORCH else PACKAGES[entry.library]
    return _find_missing((*own, *entry.packages), torch_python if entry.library == TORCH else sys.executable)


@functools.cache
def _find_missing(packages: tuple[str, ...], python: str) -> tuple[str, ...]:
    code = f"import importlib.util as util; print(*[name for name in {packages} if util.find_spec(name) is None])"
    command = [python, "-c", code]
    try:
        found = subprocess.run(command, env=environment_for(python), stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--torch: {python} is not a Python that runs: {error}.") from None
    return tuple(found.stdout.split())


def print_missing(head: str, library: str, missing: tuple[str, ...], torch_python: str) -> None:
    python, advice = sys.executable, "pip install -e '.[bench]'"
    if library == TORCH:
        python, advice = torch_python, "install it there, or pass --torch"
    print(f"{head}: {python} does not have {', '.join(missing)}; {advice}", flush=True)


def select(only: list[str]) -> list[Job]:
    jobs = [Job(work, entry) for work in WORKS for entry in work.entries]
    names = {job.name for job in jobs} | {job.work.name for job in jobs}
    if unknown := set(only) - names - {"scaling"}:
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}, but: {', '.join(sorted(names))}.")
    return [job for part in only for job in jobs if part in (job.work.name, job.name)] if only else jobs


def run_suite(jobs: list[Job], path: Path, options: argparse.Namespace, *, tiny: bool = False) -> int:
    pool = Pool(options.torch, options.folder / "logs", tiny, options.together, options.limit, device_gib())
    names, start, failures = {job.name for job in jobs}, time.perf_counter(), []
    rows = [row for row in read(path) if name_of(row) in names]
    found = set(map(name_of, rows))
    for job, first, report, reason in pool.measure([job for job in jobs if job.name not in found]):
        if not report:
            failures.append((f"{job.name}: {reason} (see {pool.logs})", False))
            print(f"{time.perf_counter() - start:4.0f} s  {job.name} failed: {reason}", flush=True)
            continue
        new = to_rows(job.work, job.entry.name, first, report)
        append(new, path)
        rows += new
        values = ", ".join(f"{row['value']:,.4g} {row['unit']}" for row in new)
        print(f"{time.perf_counter() - start:4.0f} s  {job.name}: {values}", flush=True)
    return report_verdicts([*failures, *judge_all(rows, names, tiny)])


def name_of(row: Row) -> str:
    return f"{row['work']}:{row['library']}"


def judge_all(rows: list[Row], names: set[str], tiny: bool) -> list[Verdict]:
    """Whether the libraries computed the same, and whether the claims about the jobs of these names hold."""
    verdicts = []
    for work in WORKS:
        values = {row["library"]: row["computed"] for row in rows if row["work"] == work.name and "computed" in row}
        verdicts += compare(shrink(work) if tiny else work, values) if values else []
        entries = {entry.name for entry in work.entries if Job(work, entry).name in names}
        claims = [] if tiny else [claim for claim in work.claims if is_selected(claim, entries)]
        verdicts += [judge(work, claim, rows) for claim in claims]
    return verdicts


def report_verdicts(verdicts: list[Verdict]) -> int:
    for words, holds in verdicts:
        print(f"{'holds' if holds else 'FAILS'}: {words}")
    return 0 if all(holds for _, holds in verdicts) else 1


def run_scripts(commands: list[list[str]], rows: Path) -> int:
    """Benchmarks with claims of their own, which exit with 1 if one fails."""
    rows.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    programs = [[sys.executable, *command, "--rows", str(rows)] for command in commands]
    statuses = [subprocess.run(program, cwd=ROOT, env=environment).returncode for program in programs]
    return int(any(statuses))


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
