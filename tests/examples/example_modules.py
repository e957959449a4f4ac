"""Examples as modules, and how often one compiled while it trained."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = str(Path(__file__).parents[2] / "examples")


def load_example(name: str) -> ModuleType:
    """An example as a module, which can import its neighbours as under `python examples/name.py`."""
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    return importlib.import_module(name)


def compilations_after_the_first_step(events: list[str]) -> int:
    """How many programs were compiled during training after the first step, without those of the first evaluation."""
    last = max(i for i, event in enumerate(events) if event in ("evaluated", "fitted"))
    training = events[events.index("stepped") : last]
    start, end = training.index("evaluating"), training.index("evaluated")
    return (training[:start] + training[end:]).count("compiled")
