"""All faults in one table: `python -m tests.faults [--trials 3] [name ...]`; each has its own default of trials."""

import argparse
import importlib
import sys

from tests.faults.results import Result

NAMES = (
    "killed",
    "readers",
    "corrupted",
    "disk_errors",
    "full_disk",
    "resumed",
    "damaged_logs",
    "last_evaluation",
    "diverged",
    "resized",
    "terminated",
    "dead_or_hung",
)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="name", help=f"which of {', '.join(NAMES)}")
    parser.add_argument("--trials", type=int, help="of each fault")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    print(f"{'fault':60} {'passed':>14} {'seconds':>11}")
    for name in options.names:
        run = importlib.import_module(f"tests.faults.{name}").run
        results = run(seed=options.seed) if options.trials is None else run(options.trials, options.seed)
        for result in [results] if isinstance(results, Result) else results:
            print(result, flush=True)
            for failure in result.failures:
                print("   ", failure)
            failed += result.passed != result.trials
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
