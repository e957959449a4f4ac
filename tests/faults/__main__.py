"""All faults in one table: `python -m tests.faults [--trials 3] [name ...]`; without trials, as many as each has."""

import argparse
import importlib
import sys

from tests.faults.rows import Row

NAMES = ("killed", "corrupted", "full_disk", "resumed", "resized", "terminated", "dead_or_hung")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="name", help=f"which of {', '.join(NAMES)}")
    parser.add_argument("--trials", type=int, help="of each row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    print(f"{'fault':60} {'passed':>14} {'seconds':>11}")
    for name in options.names:
        run = importlib.import_module(f"tests.faults.{name}").run
        rows = run(seed=options.seed) if options.trials is None else run(options.trials, options.seed)
        for row in [rows] if isinstance(rows, Row) else rows:
            print(row, flush=True)
            for failure in row.failures:
                print("   ", failure)
            bad += row.passed != row.trials
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
