"""Folders of runs: which are finished, and which may be filled."""

import itertools
import json
import re
from pathlib import Path

_STEP = re.compile(r"step-(\d{8,18})(-\d+)?")


def free_folder(folder: Path) -> tuple[Path, str]:
    """The folder, if it is new or what is in it can go on, else one beside it; and what is to be said about that."""
    for number in itertools.count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not candidate.exists() or not any(candidate.iterdir()):
            return candidate, f"{folder} is finished and stays as it is; this run goes to {candidate}" * (number > 1)
        runs = [each for each in (candidate, *sorted(candidate.iterdir())) if steps_in(each) is not None]
        for run in runs:
            reached, steps = reached_in(run) or 0, steps_in(run) or 0
            if reached < steps:
                at = f"step {reached} of {steps}" if reached else "the beginning, since nothing of it was saved"
                return candidate, f"{run} is unfinished: going on from {at}"
        if not runs and (candidate / "checkpoints").is_dir():
            return candidate, f"going on in {candidate}, where checkpoints are"
    raise AssertionError("there is always another number")


def reached_in(folder: Path) -> int | None:
    """The last step that is saved in the folder of a run."""
    names = [each.parent.name for each in folder.glob("checkpoints/step-*/manifest.json")]
    return max((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), default=None)


def steps_in(folder: Path) -> int | None:
    """The steps that the run in a folder was to have, if that is known."""
    try:
        steps = json.loads((folder / "config.json").read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None
