"""The commands and their options. Importing this does not load JAX: each command does, when it runs."""

import argparse
from collections.abc import Sequence

import mlax
from mlax.cli import _commands
from mlax.cli._doctor import doctor
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
    demo.add_argument("name", nargs="?", default="digits", help="the example to run (default: digits)")
    demo.add_argument("--list", action="store_true", help="list the examples and exit")
    demo.add_argument("args", nargs=REST, help="options of the example; NAME --help lists them")
    demo.set_defaults(run=_commands.demo)

    train = commands.add_parser(
        "train",
        help="run a training script",
        description="Run a training script. If it defines main(config: SomeDataclass), the fields of the dataclass "
        "become command-line options; otherwise the script runs as it would under python. Compiled programs are cached "
        "on disk, so the next run starts faster.",
    )
    train.add_argument("script", help="path of a Python file")
    train.add_argument("args", nargs=REST, help="options of the script; SCRIPT --help lists them")
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

    plot = commands.add_parser(
        "plot",
        help="compare runs",
        description="Print a table of the last and best scores of several runs, and plot their curves.",
    )
    plot.add_argument("runs", nargs="+", metavar="RUN", help="run folders, such as runs/*")
    plot.add_argument("-o", "--output", default="curves.png", help="the image to write (default: curves.png)")
    plot.set_defaults(run=_commands.plot)
    return parser


def _add_launch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "launch",
        help="run a training script in several processes on this machine",
        description="Run a script in several processes that train together, and supervise them: if one dies or hangs, "
        "report which, terminate all and restart them from the last checkpoint. SIGTERM and Ctrl-C make them save and "
        "exit. On a cluster, Slurm or Kubernetes starts the processes instead: see the guide to clusters.",
    )
    parser.add_argument("-n", "--processes", type=_positive_int, required=True, help="number of processes")
    parser.add_argument(
        "--devices", type=_positive_int, help="devices per process: its share of the GPUs, or simulated CPU devices"
    )
    parser.add_argument("--restarts", type=int, default=3, help="maximum number of restarts (default: 3)")
    parser.add_argument(
        "--hang", type=float, default=20.0, help="seconds without any heartbeat that count as a hang (default: 20)"
    )
    parser.add_argument(
        "--slow-timeout",
        type=float,
        default=1800.0,
        help="the same while compiling, saving and exiting (default: 1800)",
    )
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds to save and exit after SIGTERM (default: 30)"
    )
    parser.add_argument("script", help="path of a Python file")
    parser.add_argument("args", nargs=REST, help="options of the script")
    parser.set_defaults(run=launch)


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
