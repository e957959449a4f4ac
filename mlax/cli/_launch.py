"""`mlax launch`: processes that train together on this machine, and their supervisor."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mlax.cli._supervisor import Ended, Supervisor


def run(
    processes: int,
    devices: int | None,
    restarts: int,
    hang: float,
    patience: float,
    grace: float,
    script: str,
    args: Sequence[str],
) -> int:
    """Run the script in several processes until it ends well, is told to end, or has failed too often."""
    if not Path(script).is_file():
        raise SystemExit(f"mlax launch: there is no script {script}.")
    ended = Ended("", 0)
    with Supervisor(processes, devices, hang, patience, grace, script, args) as supervisor:
        for restart in range(1, restarts + 2):
            ended = supervisor.attempt()
            if ended.why:
                _say(ended.why)
            if not ended.why or not ended.again or supervisor.asked:
                break
            if restart <= restarts:
                _say(f"beginning again from the last checkpoint: restart {restart} of at most {restarts}")
        else:
            _say(f"given up after {restarts} restarts; go on with: {shlex.join(sys.orig_argv)}")
    return 128 - ended.status if ended.status < 0 else ended.status


def _say(words: str) -> None:
    print(f"mlax launch: {words}", file=sys.stderr, flush=True)
