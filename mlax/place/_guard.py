"""guard: an error, with the array's path, where JAX would copy an array to other devices or the host without a word."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mlax._jax import leaves_with_paths
from mlax.core import signature
from mlax.inspect import format_bytes
from mlax.place._culprit import Refused, line_of, names, refused


class UnplannedTransfer(RuntimeError):
    """An array would be copied between host and device, or between devices, and nobody asked for that."""


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Make an error of each copy that nobody asked for, in this thread and block; the error names the array.

    with place.guard():
        for batch in feed:
            state, metrics = step(state, batch)

    Such copies are: a NumPy array or a number given to a compiled function or to `jnp`, an array given to a function
    that runs on other devices than it is on, and, except on a CPU, an array read by NumPy, `float` or `print`. What is
    asked for stays allowed: `jax.device_put`, `jax.device_get`, `train.Feed`. It costs nothing while nothing is wrong.

    What a function does inside that is compiled anew for another sharding is no copy to this guard: `check_shardings`
    compares shardings with planned ones, and `inspect.transfers` shows what a function does inside.
    """
    try:
        with jax.transfer_guard("disallow"):
            yield
    except Exception as error:
        found = refused(error)
        if found is None:
            raise
        raise UnplannedTransfer(_message(error, found)) from error


def check_shardings(tree: Any, shardings: Any, name: str = "") -> None:
    """Raise `UnplannedTransfer` if any array of a tree is elsewhere than planned; the error names the first that is.

    `shardings` is a tree like the first, or one sharding for all of it; `name` is what the tree is called.
    """
    leaves = dict(leaves_with_paths(tree))
    is_one = isinstance(shardings, jax.sharding.Sharding)
    planned = dict.fromkeys(leaves, shardings) if is_one else dict(leaves_with_paths(shardings))
    if leaves.keys() != planned.keys():
        other = min(leaves.keys() ^ planned.keys())
        raise ValueError(f"check: {other!r} is only in one of the two trees; give each array of the first a sharding.")
    wrong = [path for path, leaf in leaves.items() if not _is_sharded_as(leaf, planned[path])]
    if wrong:
        leaf, plan = leaves[wrong[0]], planned[wrong[0]]
        path = "/".join(filter(None, (name, wrong[0]))) or "an array"
        more = f" So are {len(wrong) - 1} more." if len(wrong) > 1 else ""
        raise UnplannedTransfer(
            f"{path}, {signature(leaf)}, is {_describe_location(leaf)}, but is planned "
            f"{_describe_sharding(plan)}: each use would copy {format_bytes(_copied_bytes(leaf, plan))}. "
            f"Put it there once, {_BEFORE}.{more}"
        )


_BEFORE = "by jax.device_put with a sharding, as plan.init and a train.Feed(sharding=...) do"


def _message(error: Exception, found: Refused) -> str:
    is_number = found.dtype is not None and found.shape == ()
    paths = names(error, found)
    if not paths or (is_number and len(paths) > 1):
        paths = ["a number" if is_number else "an array without a name"]
    kind = f", {found.dtype}[{', '.join(map(str, found.shape))}]," if found.dtype else ""
    devices = f"{found.devices} devices" if found.devices > 1 else "a device"
    source = "other devices" if found.target == found.source else {"host": "the host", "device": devices}[found.source]
    if found.target == "host":
        target, advice = "the host", "fetch it by jax.device_get where that is meant"
    elif is_number:
        target, advice = devices, "make it inside of the compiled function, or put it there before by jax.device_put"
    else:
        target, advice = devices, f"put it there before, {_BEFORE}"
    return f"{' or '.join(paths[:3])}{kind} would be copied from {source} to {target} at {line_of(error)}: {advice}."


def _is_sharded_as(leaf: Any, planned: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return False
    kinds = {each.memory_kind or "device" for each in (sharding, planned)}
    return len(kinds) == 1 and sharding.is_equivalent_to(planned, leaf.ndim)


def _describe_location(leaf: Any) -> str:
    return _describe_sharding(leaf.sharding) if hasattr(leaf, "sharding") else "on the host"


def _describe_sharding(sharding: Any) -> str:
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind} memory"
    if sharding.num_devices == 1:
        return f"on {next(iter(sharding.device_set))}{memory}"
    how = f", as {sharding.spec}" if isinstance(sharding, jax.sharding.NamedSharding) else ""
    return f"on {sharding.num_devices} devices{how}{memory}"


def _copied_bytes(leaf: Any, planned: Any) -> int:
    """The bytes that all devices together would receive."""
    piece = np.prod(planned.shard_shape(np.shape(leaf)), dtype=int) * leaf.dtype.itemsize
    return int(piece) * planned.num_devices
