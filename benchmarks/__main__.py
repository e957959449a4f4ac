"""The benchmarks of mlax beside its peers: what is measured, whether all compute the same, and whether claims hold.

    python -m benchmarks gpu [--only WORK[:LIBRARY] ...] [--torch PYTHON]
    python -m benchmarks check                                          # all of it, tiny, in float32 on a CPU

A measurement is a row of JSON in runs/benchmarks. The exit status is 1 if a claim fails, an entry fails, or two
libraries do not compute the same.
"""

import argparse
import datetime
import os
import sys
from pathlib import Path

from benchmarks.suite.rows import append, differing, judge, to_rows
from benchmarks.suite.schedule import Job, Pool
from benchmarks.suite.works import WORKS, shrink

RUNS = Path(__file__).parents[1] / "runs" / "benchmarks"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("command", choices=("gpu", "check"))
    parser.add_argument("--only", nargs="*", default=[], help="works, or WORK:LIBRARY, in the order to run")
    parser.add_argument("--torch", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--together", type=int, default=6, help="processes that compile side by side")
    parser.add_argument("--limit", type=float, default=150, help="seconds that an entry may take to compile")
    parser.add_argument("--folder", type=Path, default=RUNS, help="for rows and logs")
    options = parser.parse_args()
    tiny = options.command == "check"
    if tiny:
        os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    return run(select(options.only), options, tiny)


def select(only: list[str]) -> list[Job]:
    jobs = [Job(work, entry) for work in WORKS for entry in work.entries]
    if not only:
        return jobs
    return [job for part in only for job in jobs if part in (job.work.name, job.name)]


def run(jobs: list[Job], options: argparse.Namespace, tiny: bool) -> int:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    pool = Pool(options.torch, options.folder / "logs", tiny, options.together, options.limit)
    rows, values, failures = [], {}, []
    for job, first, report in pool.measure(jobs):
        if not report:
            failures.append(f"{job.name} failed: {pool.logs}")
            print(failures[-1], flush=True)
            continue
        new = to_rows(job.work, job.entry.name, first, report)
        append(new, options.folder / f"{options.command}-{stamp}.jsonl")
        rows += new
        values.setdefault(job.work.name, {})[job.entry.name] = report["values"]
        print(job.name, *(f"{row['value']:,.4g} {row['unit']}" for row in new), f"{first:.0f} s", flush=True)
    works = [work for work in WORKS if work.name in values]
    for work in works:
        wrong = differing(shrink(work) if tiny else work, values[work.name])
        failures += [f"{work.name} differs: {line}" for line in wrong]
        print(f"{work.name}: {wrong or 'all compute the same'}")
    if not tiny:
        for work in works:
            for claim in work.claims:
                words, holds = judge(work, claim, rows)
                print(f"{'holds' if holds else 'FAILS'}: {words}")
                failures += [] if holds else [words]
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
