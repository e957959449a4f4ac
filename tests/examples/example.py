"""An example as a module, found as `python examples/x.py` finds it: with its neighbours."""

import importlib
import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[2] / "examples")


def example(name):
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    return importlib.import_module(name)
