"""guard and check_shardings: errors for implicit transfers and for arrays that are not sharded as planned."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from mlax._jax import leaves_with_paths
from mlax.core import Documented, signature
from mlax.inspect import format_bytes


class UnplannedTransfer(RuntimeError, metaclass=Documented):
    """An array would be copied implicitly, between host and device or between devices."""


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Raise `UnplannedTransfer` for each implicit transfer in this block and thread, with what to do instead.

    with place.guard():
        for batch in feed:
            state, metrics = step(state, batch)

    It is `jax.transfer_guard("disallow")`. Implicit transfers are: a NumPy array or a Python scalar passed to a
    compiled function or to `jnp`, an array passed to a function that runs on other devices, and, except on a CPU, an
    array read by NumPy, `float` or `print`. Explicit ones stay allowed: `jax.device_put`, `jax.device_get`,
    `train.Feed`. The error of a `train.step` names the leaf; other functions do not tell JAX what their arrays are
    called.

    The collectives inside a compiled function, or a recompilation for another sharding, are not transfers to the
    guard: `check_shardings` compares shardings with planned ones, and `inspect.transfers` lists the collectives.
    """
    try:
        with jax.transfer_guard("disallow"):
            yield
    except Exception as error:
        message = _message(str(error))
        if message is None:
            raise
        raise UnplannedTransfer(message) from error


def check_shardings(tree: Any, shardings: Any, name: str = "") -> None:
    """Raise `UnplannedTransfer`, with the path of the array, if an array of a pytree is not sharded as planned.

    `shardings` is a pytree like the first, where None allows any sharding, or one sharding for all arrays; `name` is
    what the tree is called in the error.
    """
    leaves = _leaves_and_nones(tree)
    planned = dict.fromkeys(leaves, shardings) if isinstance(shardings, Sharding) else _leaves_and_nones(shardings)
    if leaves.keys() != planned.keys():
        path = min(leaves.keys() ^ planned.keys())
        raise ValueError(
            f"check_shardings: {path!r} is in only one of the two trees; give each array of the first a sharding."
        )
    wrong = [path for path, leaf in leaves.items() if not _is_sharded_as(leaf, planned[path])]
    if wrong:
        leaf, sharding = leaves[wrong[0]], planned[wrong[0]]
        path = "/".join(filter(None, (name, wrong[0]))) or "an array"
        others = f"{len(wrong) - 1} more array{' is' if len(wrong) == 2 else 's are'}"
        more = f" {others} not sharded as planned either." if len(wrong) > 1 else ""
        raise UnplannedTransfer(
            f"{path}, {signature(leaf)}, is {_describe_location(leaf)}, but is planned {_describe_sharding(sharding)}: "
            f"each use would copy {format_bytes(_copied_bytes(leaf, sharding))}. Put it there once, {_BEFORE}.{more}"
        )


_BEFORE = "by jax.device_put with a sharding, as plan.init and train.Feed(sharding=...) do"


def _message(text: str) -> str | None:
    """What JAX's transfer guard refused and what to do instead; None for the text of another error."""
    refused = re.search(r"Disallowed (\w+-to-(\w+)) transfer: (.*)", text, re.DOTALL)
    if refused is None:
        return None
    kind, target, array = refused.groups()
    if target == "host":
        advice = "fetch it by jax.device_get where that is intended"
    elif "[]" in array:
        advice = "create the scalar inside the compiled function, or put it there first by jax.device_put"
    else:
        advice = f"put it there first, {_BEFORE}"
    array = re.sub(r"aval=ShapedArray\((.*?)\), dst_sharding=", r"\1 to ", array)
    return f"implicit {kind} transfer of {array}: {advice}."


def _leaves_and_nones(tree: Any) -> dict[str, Any]:
    return dict(leaves_with_paths(tree, is_leaf=lambda leaf: leaf is None))


def _is_sharded_as(leaf: Any, planned: Sharding | None) -> bool:
    if planned is None or leaf is None:
        return True
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
    spec = f", as {sharding.spec}" if isinstance(sharding, NamedSharding) else ""
    return f"on {sharding.num_devices} devices{spec}{memory}"


def _copied_bytes(leaf: Any, planned: Any) -> int:
    """The bytes that all devices together would receive."""
    shard = np.prod(planned.shard_shape(np.shape(leaf)), dtype=int) * leaf.dtype.itemsize
    return int(shard) * planned.num_devices
