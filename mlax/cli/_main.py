"""The commands and their options. Importing this does not load JAX: each command does, when it runs."""

import argparse
import difflib
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TypeAlias

import mlax
from mlax.cli import _commands
from mlax.cli._doctor import doctor
from mlax.cli._inspect import inspect_model
from mlax.cli._plot import plot
from mlax.cli._supervisor import launch

REST = argparse.REMAINDER
DEFAULT_EXAMPLE = "digits"
COMMANDS = ("demo", "train", "launch", "inspect", "doctor", "plot", "cache")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; returns the exit status."""
    argv = _insert_default_example(sys.argv[1:] if argv is None else argv)
    if not argv:
        _parser().print_help()
        return 0
    parser = _parser()
    _check_command(parser, argv)
    options = vars(parser.parse_args(argv))
    return options.pop("run")(**options)


def _check_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Refuse a misspelt command and `mlax train` without a script in front, where argparse's words do not help."""
    command, *args = argv
    if not command.startswith("-") and command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
        parser.error(f"there is no command {command!r}; {hint}")
    if command == "train" and not args:
        parser.error("train: which script? `mlax train train.py`, for example; `mlax train --help` explains it.")
    if command == "train" and args[0].startswith("-") and args[0] not in ("-h", "--help"):
        script = next((arg for arg in args if arg.endswith(".py")), "train.py")
        options = " ".join(arg for arg in args if arg != script)
        parser.error(f"train: the script comes first, then its options: mlax train {script} {options}")


def _insert_default_example(argv: Sequence[str]) -> list[str]:
    """`mlax demo --steps 120` is `mlax demo digits --steps 120`: argparse would take 120 for the name."""
    match list(argv):
        case ["demo", option, *rest] if option.startswith("-") and option not in ("-h", "--help", "--list"):
            return ["demo", DEFAULT_EXAMPLE, option, *rest]
        case unchanged:
            return unchanged


class _Formatter(argparse.HelpFormatter):
    """Wraps each paragraph separately; of an indented one, each line, aligned with its second column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._fill_paragraph(paragraph, width) for paragraph in text.split("\n\n"))

    def _fill_paragraph(self, paragraph: str, width: int) -> str:
        if not paragraph.startswith(" "):
            return textwrap.fill(" ".join(paragraph.split()), width)
        return "\n".join(_hang(line, width) for line in paragraph.splitlines())


def _hang(line: str, width: int) -> str:
    column = re.match(r"  .*?\S {2,}(?=\S)", line)
    margin = len(column[0]) if column else 4
    return textwrap.fill(line, width, subsequent_indent=" " * margin)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mlax",
        formatter_class=_Formatter,
        description="A purely functional neural-network library on JAX. Start with `mlax demo`: it trains a small "
        "network on handwritten digits, in about 15 seconds on two CPU cores, and writes its curves, its predictions "
        "and its weights to runs/digits.",
        epilog=f"The examples of `mlax demo`:\n\n{_list_examples()}\n\n"
        "`mlax COMMAND --help` explains each command, and `mlax demo NAME --help` each example.",
    )
    parser.add_argument("--version", action="version", version=f"mlax {mlax.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_train(commands)
    _add_launch(commands)
    _add_inspect(commands)
    _add_doctor(commands)
    _add_plot(commands)
    _add_cache(commands)
    return parser


def _list_examples() -> str:
    return "\n".join(f"  {line}" for line in _commands.example_lines())


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        formatter_class=_Formatter,
        help="run an example that comes with mlax",
        usage="mlax demo [-h] [--list] [NAME] [OPTIONS OF THE EXAMPLE]",
        description=f"Run an example that comes with mlax, by default {DEFAULT_EXAMPLE}:\n\n"
        "  mlax demo                              train on handwritten digits\n"
        "  mlax demo --steps 120                  the same, but only 120 steps\n"
        "  mlax demo characters --run runs/small  another example, and where it writes\n"
        "  mlax demo characters --help            its options and what it should reach\n\n"
        "It prints its progress and writes metrics, checkpoints and pictures to runs/NAME, in the current folder. A "
        "finished run is kept, and the next one is saved in a new folder beside it; an unfinished one is resumed.",
        epilog=f"The examples:\n\n{_list_examples()}\n\n"
        f"Each is a single file to read and to copy, in {_commands.examples_folder()}.",
    )
    parser.add_argument("name", nargs="?", default=DEFAULT_EXAMPLE, metavar="NAME", help="the example")
    parser.add_argument("--list", action="store_true", help="describe each example in a line and exit")
    parser.add_argument("args", nargs=REST, metavar="OPTIONS", help="options of the example")
    parser.set_defaults(run=_commands.demo)


def _add_train(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        formatter_class=_Formatter,
        help="run a training script, with options from its configuration",
        usage="mlax train [-h] SCRIPT [OPTIONS OF THE SCRIPT]",
        description="Run a training script. If it defines `main(config: Config)` and Config is a dataclass, the fields "
        "of Config are command-line options, with its defaults and its comments as help:\n\n"
        "  mlax train train.py                the defaults\n"
        "  mlax train train.py --steps 1000   another value for the field `steps`\n"
        "  mlax train train.py --help         all fields\n\n"
        'The script is imported for that, so whatever it runs itself belongs below `if __name__ == "__main__":`. '
        "Without such a main, the script runs as it would under python. It writes where it says so, usually to the "
        "`run` folder of train.fit; running the same command again resumes an interrupted run. Compiled programs are "
        "cached on disk, so the next run starts faster: `mlax cache` shows where.",
        epilog=f"Scripts to start from:\n\n{_list_examples()}\n\nThey are in {_commands.examples_folder()}.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="path of a Python file")
    parser.add_argument("args", nargs=REST, metavar="OPTIONS", help="options of the script")
    parser.set_defaults(run=_commands.train)


def _add_inspect(commands: Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        formatter_class=_Formatter,
        help="show the layers of a model: shapes, parameters and FLOPs",
        description="Print a table of a model by layer: inputs, outputs, parameters, bytes, and the FLOPs of both "
        "passes; nothing is computed. A function without parameters builds the model, alone or as a pair with an "
        "input:\n\n"
        "  mlax inspect model.py:build                  a model and an input\n"
        "  mlax inspect model.py:build --shape 8,28,28  a model alone\n"
        "  mlax inspect model.py:build --report         also write report.html\n"
        "  mlax inspect model.py:build --shape 8,128 --dtype int32\n\n"
        "If it gives another function and its arguments, such as those of a Flax or Equinox model, the cost of its "
        "named scopes and its memory are shown.",
    )
    parser.add_argument("target", metavar="FILE.py:FUNCTION", help="what builds the model; a variable works, too")
    parser.add_argument(
        "--shape", action="append", default=[], help="of the input; repeat it for a model of several inputs"
    )
    parser.add_argument(
        "--dtype", action="append", default=[], help="of the input, or of each in turn (default: float32)"
    )
    parser.add_argument("--inference", action="store_true", help="in inference mode, without a backward pass")
    parser.add_argument(
        "--report",
        nargs="?",
        const="report.html",
        metavar="PATH",
        help="also compile both passes and write an HTML page about them (default: report.html)",
    )
    parser.set_defaults(run=inspect_model)


def _add_doctor(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        formatter_class=_Formatter,
        help="check what works on this machine",
        description="Check versions, devices, dtypes, host memory, attention kernels, the compilation cache and "
        "multi-process training, and print a line for each, with what to do about what does not work:\n\n"
        "  mlax doctor\n\n"
        "The exit status is 1 if something that mlax needs does not work. Paste the output into a bug report.",
    )
    parser.set_defaults(run=doctor)


def _add_plot(commands: Commands) -> None:
    parser = commands.add_parser(
        "plot",
        formatter_class=_Formatter,
        help="compare runs: a table of their scores, and their curves",
        description="Print a table of the last and best scores of several runs, and plot their curves into one "
        "picture:\n\n"
        "  mlax plot runs/digits runs/digits-2   two runs, in curves.png\n"
        "  mlax plot runs -o all.png             all runs in a folder, in all.png\n\n"
        "The best is the lowest or the highest value as fit's `best` says, else the lowest of what is called a loss, "
        "an error, a perplexity or bits, and the highest of an accuracy, precision, recall or the like; of any other "
        "metric the smallest and the largest value are shown.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders, as written by train.fit or mlax demo, or folders of them"
    )
    parser.add_argument("-o", "--output", default="curves.png", help="the image to write (default: curves.png)")
    parser.set_defaults(run=plot)


def _add_cache(commands: Commands) -> None:
    parser = commands.add_parser(
        "cache",
        formatter_class=_Formatter,
        help="show or clear the compilation cache",
        description="Show the folder of the compilation cache, where train.fit, `mlax train` and `mlax demo` keep "
        "compiled programs, so that the next run starts faster:\n\n"
        "  mlax cache           its folder and its size, at most 4 GiB\n"
        "  mlax cache --clear   delete all programs; they are compiled again when they are needed\n\n"
        "A cache that you configure with JAX's own jax_compilation_cache_dir is another folder, which this leaves "
        "alone. JAX_ENABLE_COMPILATION_CACHE=false turns caching off.",
    )
    parser.add_argument("--clear", action="store_true", help="delete all programs")
    parser.set_defaults(run=_commands.cache)


def _add_launch(commands: Commands) -> None:
    parser = commands.add_parser(
        "launch",
        formatter_class=_Formatter,
        help="run a training script in several processes on this machine",
        description="Run a script in several processes that train together, and supervise them:\n\n"
        "  mlax launch -n 2 --devices 4 train.py --steps 1000\n\n"
        "starts two processes with four devices each: GPUs of this machine or, on a CPU, simulated devices. "
        "If one dies or hangs, report which, terminate all and restart them from the last checkpoint. SIGTERM, SIGHUP "
        "and Ctrl-C make them save and exit. The script is one that also works under `mlax train`, and writes where it "
        "does there. On a cluster, Slurm or Kubernetes starts the processes instead: see the guide to clusters.",
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
        help="the same while processes compile, save, call back or exit, which may take long (default: 1800)",
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
