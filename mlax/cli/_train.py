"""`mlax train`: one script, one process."""

from collections.abc import Sequence

from mlax.cli._cache import keep_compiled
from mlax.cli._script import run_script


def run(script: str, args: Sequence[str]) -> int:
    """Run the script."""
    keep_compiled()
    run_script(script, args)
    return 0
