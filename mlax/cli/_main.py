"""The commands and their options. Importing this does not load JAX: each command does, when it runs."""

import argparse
from collections.abc import Sequence

import mlax
from mlax.cli import _commands
from mlax.cli._doctor import doctor
from mlax.cli._supervisor import launch

REST = argparse.REMAINDER


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line; gives the exit status."""
    options = vars(_parser().parse_args(argv))
    return options.pop("run")(**options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mlax", description="A purely functional neural-network library on JAX.")
    parser.add_argument("--version", action="version", version=f"mlax {mlax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="run an example", description="Run an example that comes with mlax.")
    demo.add_argument("name", nargs="?", default="digits", help="which one (digits)")
    demo.add_argument("--list", action="store_true", help="list them instead")
    demo.add_argument("args", nargs=REST, help="options of the example; --help after its name lists them")
    demo.set_defaults(run=_commands.demo)

    train = commands.add_parser(
        "train",
        help="run a training script",
        description="Run a script. If it defines main(config: SomeDataclass), the fields of the dataclass are options; "
        "otherwise it is run as Python would. What was compiled once is found again on disk.",
    )
    train.add_argument("script", help="a Python file")
    train.add_argument("args", nargs=REST, help="options of the script; --help after its name lists them")
    train.set_defaults(run=_commands.train)

    _add_launch(commands)

    check = commands.add_parser("doctor", help="check what works on this machine", description="Check this machine.")
    check.set_defaults(run=doctor)

    plot = commands.add_parser("plot", help="compare runs", description="Compare runs: a table, and a picture.")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs, as runs/*")
    plot.add_argument("-o", "--output", default="curves.png", help="the picture to write (curves.png)")
    plot.set_defaults(run=_commands.plot)
    return parser


def _add_launch(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "launch",
        help="run a script in several processes of this machine",
        description="Run a script in several processes that train together, and watch over them: if one dies or "
        "hangs it is named, all are ended, and all begin again from the last checkpoint. SIGTERM and Ctrl-C have them "
        "save and end. On a cluster, Slurm or Kubernetes start the processes: see the guide.",
    )
    parser.add_argument("-n", "--processes", type=_count, required=True, help="how many processes")
    parser.add_argument(
        "--devices", type=_count, help="devices of each process: its share of the GPUs, or simulated ones"
    )
    parser.add_argument("--restarts", type=int, default=3, help="how often to begin again, at most (3)")
    parser.add_argument("--hang", type=float, default=20.0, help="seconds without a step that are too many (20)")
    parser.add_argument(
        "--patience", type=float, default=1800.0, help="the same while compiling, saving and ending (1800)"
    )
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to save and end after SIGTERM (30)")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("args", nargs=REST, help="options of the script")
    parser.set_defaults(run=launch)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
