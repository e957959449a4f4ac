"""The command `mlax`: run an example, train, launch several processes, check this machine, compare runs."""

from mlax.cli._main import main

__all__ = ["main"]
