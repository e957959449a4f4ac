"""The command `mlax`: run examples and scripts, launch processes, inspect models, check this machine, compare runs."""

from mlax.cli._commands import examples as examples
from mlax.cli._commands import free_folder as free_folder
from mlax.cli._doctor import Finding as Finding
from mlax.cli._main import main
from mlax.cli._plot import recorded_directions as recorded_directions
from mlax.cli._process import HangDetector as HangDetector
from mlax.cli._process import Heartbeat as Heartbeat
from mlax.cli._process import WorkerProcess as WorkerProcess
from mlax.cli._supervisor import Supervisor as Supervisor

__all__ = ["main"]
