"""Where: the place of an array, as a rule of a plan says it."""

import math
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from mlax.core import frozen

Memory = Literal["device", "host"]
Device = Any  # a jax.Device
HOST = "pinned_host"  # JAX's name for the memory of a device's host
Axes = str | tuple[str, ...] | None  # the mesh axes that one axis of an array is split over


@frozen
class Where:
    """How an array is split, in which memory it lies, and on which one device, if not over the mesh.

    `split` is a PartitionSpec, `last(...)` or `spread(...)`; None leaves open how, for another rule or the parameter
    of a slot to say.
    """

    split: "PartitionSpec | Last | Spread | None" = None
    memory: Memory | None = None  # None: the device's
    device: Device | None = None

    def __post_init__(self) -> None:
        if self.memory not in (None, "device", "host"):
            raise ValueError(f"Where: memory is {self.memory!r}, but must be 'device' or 'host'.")
        if self.device is not None and self.split is not None:
            raise ValueError(f"Where: an array on {self.device} alone cannot be split by {self.split}; choose one.")

    def __str__(self) -> str:
        words = [str(self.split)] * (self.split is not None) + [f"in {self.memory} memory"] * (self.memory is not None)
        return ", ".join(words + [f"on {self.device}"] * (self.device is not None)) or "anywhere"


@frozen
class Last:
    """A split of the last axes, whatever the number of axes before them; see `last`."""

    axes: tuple[Axes, ...]

    def spec(self, shape: tuple[int, ...], mesh: dict[str, int], taken: PartitionSpec) -> PartitionSpec:
        """The split of an array of this shape."""
        if len(self.axes) > len(shape):
            raise ValueError(f"{self} names {len(self.axes)} axes, but the array has {len(shape)}")
        return PartitionSpec(*[None] * (len(shape) - len(self.axes)), *self.axes)

    def __str__(self) -> str:
        return f"last({', '.join(map(repr, self.axes))})"


@frozen
class Spread:
    """A split of the longest axis that can be; see `spread`."""

    axis: str
    least: int

    def spec(self, shape: tuple[int, ...], mesh: dict[str, int], taken: PartitionSpec) -> PartitionSpec:
        """The split of an array of this shape, some of whose axes are taken."""
        entries = [*taken, *[None] * (len(shape) - len(taken))]
        if math.prod(shape) < self.least:
            return PartitionSpec()
        pieces = [size // ways(entry, mesh) for size, entry in zip(shape, entries, strict=True)]
        can = [place for place, size in enumerate(pieces) if size and size % mesh[self.axis] == 0]
        if not can:
            return PartitionSpec()
        longest = max(can, key=lambda place: (entries[place] is None, pieces[place]))
        return PartitionSpec(*[self.axis if place == longest else None for place in range(len(shape))])

    def __str__(self) -> str:
        return f"spread({self.axis!r})"


host = Where(memory="host")  # in the memory of the host, split as the rest of a plan says


def last(*axes: Axes) -> Where:
    """Split the last axes over these axes of the mesh: `last("model", None)` the last but one, of any number."""
    return Where(Last(axes))


def spread(axis: str, *, least: int = 2**12) -> Where:
    """Split the longest axis that the mesh axis divides; arrays of fewer than `least` numbers stay whole."""
    return Where(Spread(axis, least))


def where_of(given: Any) -> Where:
    """What a rule says, from any of the forms that it can be written in."""
    match given:
        case Where():
            return given
        case PartitionSpec() | Last() | Spread():
            return Where(given)
        case jax.Device():
            return Where(device=given)
        case _:
            raise TypeError(
                f"a rule says {given!r}, but must say a PartitionSpec, place.host, place.last(...), place.spread(...), "
                "a device or a place.Where."
            )


def spec_of(where: Where, shape: tuple[int, ...], mesh: dict[str, int], taken: PartitionSpec) -> PartitionSpec:
    """The PartitionSpec of an array of this shape, some of whose axes are taken already."""
    if isinstance(where.split, Last | Spread):
        return where.split.spec(shape, mesh, taken)
    return where.split if where.split is not None else PartitionSpec()


def ways(entry: Axes, mesh: dict[str, int]) -> int:
    """Into how many pieces an axis is split."""
    return math.prod(mesh[name] for name in names(entry))


def names(entry: Axes) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def memory_kind(where: Where, device: Device) -> str | None:
    """JAX's name for the memory, where the device has several and it is not its own."""
    if where.memory != "host":
        return None
    here = next((each for each in jax.local_devices() if each.platform == device.platform), device)  # its like
    return HOST if any(memory.kind == HOST for memory in here.addressable_memories()) else None


def staying(where: Where, leaf: Any) -> Where:
    """The same place, in host memory if the leaf lies there and nobody says otherwise."""
    here = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return Where(where.split, "host", where.device) if where.memory is None and here == HOST else where
