"""Memory: what a compiled function will need, what there is, and advice if that is not enough."""

from collections.abc import Iterable
from typing import Any

import jax

from mlax.inspect import free_bytes, gib

LESS = (
    "To need less, take smaller batches, or the same in parts (accumulate=4), recompute activations (mlax.Remat, "
    "Repeat(mode='remat')), compute in bfloat16 (mlax.dtypes.mixed_bfloat16), or spread the state over more devices."
)


class WouldNotFit(MemoryError):
    """A compiled function needs more memory than there is; it was not run, so nothing that it donates is lost."""


def refuse_what_cannot_fit(compiled: Any, leaves: Iterable[Any]) -> None:
    """Raise before the first run if it cannot succeed: a run that fails has already given up what was donated."""
    analysis = compiled.memory_analysis()
    here = jax.local_devices()  # a device of another process says nothing
    device = next((each for leaf in leaves for each in getattr(leaf, "devices", tuple)() if each in here), here[0])
    free = free_bytes(device)
    if analysis is None or free is None:
        return
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if needed > free:
        raise WouldNotFit(
            f"the step needs {gib(needed)} more on {device}, of which {gib(analysis.temp_size_in_bytes)} for "
            f"intermediate results, but {gib(free)} are free; nothing was run and the state is as it was. {LESS}"
        )
