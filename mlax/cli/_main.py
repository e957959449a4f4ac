"""The commands and their options. Importing this does not load JAX: each command does, when it runs."""

import argparse
import math
from collections.abc import Sequence

import mlax
from mlax.cli import _commands
from mlax.cli._doctor import doctor
from mlax.cli._plot import plot
from mlax.cli._supervisor import launch

REST = argparse.REMAINDER


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; returns the exit status."""
    options = vars(_parser().parse_args(argv))
    return options.pop("run")(**options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mlax", description="A purely functional neural-network library on JAX.")
    parser.add_argument("--version", action="version", version=f"mlax {mlax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="run an example",
        description="Run an example that comes with mlax. A finished run is kept, and the next one is saved in a new "
        "folder beside it; an unfinished one is resumed.",
    )
    names = ", ".join(_commands.examples())
    demo.add_argument("name", nargs="?", default="digits", help=f"the example: {names} (default: digits)")
    demo.add_argument("--list", action="store_true", help="describe each example in a line and exit")
    demo.add_argument("args", nargs=REST, help="options of the example; `mlax demo NAME --help` lists them")
    demo.set_defaults(run=_commands.demo)

    train = commands.add_parser(
        "train",
        help="run a training script",
        description="Run a training script. If it defines main(config: SomeDataclass), the fields of the dataclass "
        "become command-line options; otherwise the script runs as it would under python. Compiled programs are cached "
        "on disk, so the next run starts faster.",
    )
    train.add_argument("script", help="path of a Python file")
    train.add_argument("args", nargs=REST, help="options of the script; `mlax train SCRIPT --help` lists them")
    train.set_defaults(run=_commands.train)

    _add_launch(commands)

    check = commands.add_parser(
        "doctor",
        help="check what works on this machine",
        description="Check versions, devices, dtypes, host memory, attention kernels, the compilation cache and "
        "multi-process training, and say what to do about what does not work. The exit status is 1 if something that "
        "mlax needs does not.",
    )
    check.set_defaults(run=doctor)

    compare = commands.add_parser(
        "plot",
        help="compare runs",
        description="Print a table of the last and best scores of several runs, and plot their curves. The best is the "
        "lowest or the highest value as fit's `best` says, else the lowest of what is called a loss, an error, a "
        "perplexity or bits, and the highest of an accuracy, precision, recall or the like; of any other metric the "
        "smallest and the largest value are shown.",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run folders, such as runs/*")
    compare.add_argument("-o", "--output", default="curves.png", help="the image to write (default: curves.png)")
    compare.set_defaults(run=plot)
    return parser


def _add_launch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "launch",
        help="run a training script in several processes on this machine",
        description="Run a script in several processes that train together, and supervise them: if one dies or hangs, "
        "report which, terminate all and restart them from the last checkpoint. SIGTERM, SIGHUP and Ctrl-C make them "
        "save and exit. On a cluster, Slurm or Kubernetes starts the processes instead: see the guide to clusters.",
    )
    parser.add_argument("-n", "--processes", type=_positive_int, required=True, help="number of processes to start")
    parser.add_argument(
        "--devices",
        type=_positive_int,
        help="devices of each process: its share of the GPUs of this machine, or on a CPU how many to simulate "
        "(default: all that it finds)",
    )
    parser.add_argument(
        "--restarts",
        type=_count,
        default=3,
        help="how many times to restart all processes from the last checkpoint after one died or hung (default: 3); "
        "a script that fails before its first step is not restarted",
    )
    parser.add_argument(
        "--hang",
        type=_seconds,
        default=20.0,
        metavar="SECONDS",
        help="restart if no process has made progress for this long (default: 20): finished a step, a batch of an "
        "evaluation or a wait for data. Raise it if a single step, or loading a batch, may take longer",
    )
    parser.add_argument(
        "--slow-timeout",
        type=_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="the same while processes compile, save or exit, which may take long (default: 1800)",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long processes may take to save and exit after SIGTERM, SIGHUP or Ctrl-C before they are killed "
        "(default: 30). Raise it if a checkpoint takes longer to write",
    )
    parser.add_argument("script", help="path of a Python file")
    parser.add_argument("args", nargs=REST, help="options of the script; `mlax train SCRIPT --help` lists them")
    parser.set_defaults(run=launch)


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of times")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
