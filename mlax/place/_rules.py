"""Rules that give each leaf of a pytree its placement, by patterns over its path."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from mlax.core import NoMatch, frozen, matches, no_match_message, signature

Memory = Literal["device", "host"]
Device = Any  # a jax.Device
HOST_MEMORY = "pinned_host"  # JAX's name for the memory of a device's host
Axes = str | tuple[str, ...] | None  # the mesh axes that one axis of an array is split over


@frozen
class Placement:
    """How an array is split, in which memory it lies, and on which one device, if not over the mesh.

    `spec` is a PartitionSpec, or what `shard_last_axes` or `shard_largest_axis` put there; None leaves it to another
    rule, or to the parameter of a slot.
    """

    spec: "PartitionSpec | LastAxes | LargestAxis | None" = None
    memory: Memory | None = None  # None: the device's
    device: Device | None = None

    def __post_init__(self) -> None:
        if self.memory not in (None, "device", "host"):
            raise ValueError(f"Placement: memory is {self.memory!r}, but must be 'device' or 'host'.")
        if self.device is not None and self.spec is not None:
            raise ValueError(f"Placement: an array on {self.device} alone cannot be split by {self.spec}; choose one.")

    def __str__(self) -> str:
        words = [str(self.spec)] * (self.spec is not None) + [f"in {self.memory} memory"] * (self.memory is not None)
        return ", ".join(words + [f"on {self.device}"] * (self.device is not None)) or "anywhere"


@frozen
class LastAxes:
    """A split of the last axes, whatever the number of axes before them; see `last`."""

    axes: tuple[Axes, ...]

    def resolve(self, shape: tuple[int, ...], mesh: dict[str, int], taken: PartitionSpec) -> PartitionSpec:
        """The split of an array of this shape."""
        if len(self.axes) > len(shape):
            raise ValueError(f"{self} names {len(self.axes)} axes, but the array has {len(shape)}")
        return PartitionSpec(*[None] * (len(shape) - len(self.axes)), *self.axes)

    def __str__(self) -> str:
        return f"shard_last_axes({', '.join(map(repr, self.axes))})"


@frozen
class LargestAxis:
    """A split of the longest axis that can be; see `spread`."""

    axis: str
    min_size: int

    def resolve(self, shape: tuple[int, ...], mesh: dict[str, int], taken: PartitionSpec) -> PartitionSpec:
        """The split of an array of this shape, some of whose axes are taken."""
        entries = [*taken, *[None] * (len(shape) - len(taken))]
        if math.prod(shape) < self.min_size:
            return PartitionSpec()
        pieces = [size // num_shards(entry, mesh) for size, entry in zip(shape, entries, strict=True)]
        can = [place for place, size in enumerate(pieces) if size and size % mesh[self.axis] == 0]
        if not can:
            return PartitionSpec()
        longest = max(can, key=lambda place: (entries[place] is None, pieces[place]))
        return PartitionSpec(*[self.axis if place == longest else None for place in range(len(shape))])

    def __str__(self) -> str:
        return f"shard_largest_axis({self.axis!r})"


host = Placement(memory="host")  # in the memory of the host, split as the rest of a plan says


def shard_last_axes(*axes: Axes) -> Placement:
    """Shard the last axes over these mesh axes: `shard_last_axes("model", None)` the last but one."""
    return Placement(LastAxes(axes))


def shard_largest_axis(axis: str, *, min_size: int = 2**12) -> Placement:
    """Split the longest axis that the mesh axis divides; arrays of fewer than `min_size` elements stay whole."""
    return Placement(LargestAxis(axis, min_size))


def as_placement(given: Any) -> Placement:
    """What a rule says, from any of the forms that it can be written in."""
    match given:
        case Placement():
            return given
        case PartitionSpec() | LastAxes() | LargestAxis():
            return Placement(given)
        case jax.Device():
            return Placement(device=given)
        case _:
            raise TypeError(
                f"a rule says {given!r}, but must say a PartitionSpec, place.host, place.shard_last_axes(...), "
                "place.shard_largest_axis(...), a device or a place.Placement."
            )


def resolve_spec(where: Placement, shape: tuple[int, ...], mesh: dict[str, int], taken: PartitionSpec) -> PartitionSpec:
    """The PartitionSpec of an array of this shape, some of whose axes are taken already."""
    if isinstance(where.spec, LastAxes | LargestAxis):
        return where.spec.resolve(shape, mesh, taken)
    return where.spec if where.spec is not None else PartitionSpec()


def num_shards(entry: Axes, mesh: dict[str, int]) -> int:
    """Into how many pieces an axis is split."""
    return math.prod(mesh[name] for name in mesh_axes(entry))


def mesh_axes(entry: Axes) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def memory_kind(where: Placement, device: Device) -> str | None:
    """JAX's name for the memory, where the device has several and it is not its own."""
    if where.memory != "host":
        return None
    here = next((each for each in jax.local_devices() if each.platform == device.platform), device)  # its like
    return HOST_MEMORY if any(memory.kind == HOST_MEMORY for memory in here.addressable_memories()) else None


def keep_memory_kind(where: Placement, leaf: Any) -> Placement:
    """The same place, in host memory if the leaf lies there and nobody says otherwise."""
    here = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return Placement(where.spec, "host", where.device) if where.memory is None and here == HOST_MEMORY else where


@frozen
class Rules:
    """Pairs of a pattern and what it says, one list for each plan of a product; each list may place every leaf.

    Of the rules of one list that match a leaf the first holds, so exceptions come before what they are exceptions from.
    """

    lists: tuple[tuple[tuple[str, Placement], ...], ...]

    def __mul__(self, other: "Rules") -> "Rules":
        return Rules(tuple(rules for rules in (*self.lists, *other.lists) if rules))

    def found(self, leaves: Mapping[str, Any], what: str) -> dict[str, tuple[Placement, ...]]:
        """What the rules say of each leaf, one word of each list; refuses rules that say nothing, or disagree."""
        each = [_match_rules(rules, leaves, what) for rules in self.lists]
        return {path: tuple(said[path] for said in each if path in said) for path in leaves}

    def among(self, leaves: Mapping[str, Any]) -> "Rules":
        """The rules that match any of these leaves: the others may be for variables that are not here."""
        return Rules(
            tuple(
                tuple(rule for rule in rules if any(matches(rule[0], path) for path in leaves)) for rules in self.lists
            )
        )

    def __str__(self) -> str:
        return "; ".join(", ".join(f"{pattern}: {where}" for pattern, where in rules) for rules in self.lists)


def as_rules(given: Any) -> Rules:
    """Rules from a sequence of pairs, or from rules."""
    if isinstance(given, Rules):
        return given
    pairs: list[tuple[str, Placement]] = []
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"a rule is {pair!r}, but must be a pair: ('**/kernel', P(None, 'model')), say.")
        pairs.append((pair[0], as_placement(pair[1])))
    return Rules((tuple(pairs),) if pairs else ())


def merge_placements(said: Iterable[Placement], path: str, leaf: Any, mesh: dict[str, int]) -> Placement:
    """One place from what several lists say of a leaf: their splits are of different axes, or of one in turn.

    What says an axis goes first, and what spreads takes from the rest.
    """
    said = sorted(said, key=lambda where: isinstance(where.spec, LargestAxis))
    memory = device = None
    spec = PartitionSpec()
    for where in said:
        memory, device = where.memory or memory, where.device or device
        try:
            more = resolve_spec(where, leaf.shape, mesh, spec)
        except ValueError as error:
            raise ValueError(f"{path}, {signature(leaf)}: {error}; write a rule of its own for it.") from None
        spec = merge_specs(spec, more)
    if device is None:
        _check_spec(path, leaf, spec, mesh)
        return Placement(spec, memory)
    return Placement(None, memory, device)


def merge_specs(a: PartitionSpec, b: PartitionSpec) -> PartitionSpec:
    """Split by both, axis by axis."""
    longer = max(len(a), len(b))
    entries = [
        (*mesh_axes(mine), *mesh_axes(other))
        for mine, other in zip([*a, *[None] * (longer - len(a))], [*b, *[None] * (longer - len(b))], strict=True)
    ]
    return PartitionSpec(*[None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries])


def _check_spec(path: str, leaf: Any, spec: PartitionSpec, mesh: dict[str, int]) -> None:
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"{path} is {signature(leaf)}, but its rule says {spec}, which has {len(spec)} entries; say at most "
            f"{len(leaf.shape)}, or place.shard_last_axes(...) for its last axes."
        )
    used = [name for entry in spec for name in mesh_axes(entry)]
    for name in used:
        if name not in mesh:
            raise ValueError(f"{path}: its rule says {spec}, but the mesh has the axes {', '.join(mesh) or 'none'}.")
        if used.count(name) > 1:
            raise ValueError(f"{path}: {spec} splits by {name!r} twice; each mesh axis can split one axis.")
    for axis, entry in enumerate(spec):
        size, number = leaf.shape[axis], num_shards(entry, mesh)
        if size % number:
            by = " x ".join(f"{name} ({mesh[name]})" for name in mesh_axes(entry))
            by = f"mesh axis {by}" if len(mesh_axes(entry)) == 1 else f"mesh axes {by} = {number}"
            sizes = [each for each in (size // number * number, -(-size // number) * number) if each]
            splits = [ways for ways in range(2, 2 * number) if size % ways == 0][-6:]
            also = f", or a split into {_join_or(splits)}" if splits else ""
            raise ValueError(
                f"{path} is {signature(leaf)}: axis {axis} has size {size}, which {by} does not divide; "
                f"a size of {_join_or(sizes)} would{also}."
            )


def _join_or(numbers: list[int]) -> str:
    *before, last = map(str, numbers)
    return f"{', '.join(before)} or {last}" if before else last


def _match_rules(
    rules: tuple[tuple[str, Placement], ...], leaves: Mapping[str, Any], what: str
) -> dict[str, Placement]:
    hits = [{path for path in leaves if matches(pattern, path)} for pattern, _ in rules]
    for (pattern, _), hit in zip(rules, hits, strict=True):
        if not hit and pattern != "**":
            raise NoMatch(f"the rule for {what} {no_match_message(pattern, leaves)}")
    for i, (first, says) in enumerate(rules):
        for j in range(i + 1, len(rules)):
            second, other = rules[j]
            both = hits[i] & hits[j]
            if not both or says == other or hits[i] < hits[j]:
                continue
            leaf = min(both)
            if hits[j] <= hits[i]:
                raise ValueError(
                    f"the rules {first!r} ({says}) and {second!r} ({other}) for {what} disagree: the first takes every "
                    f"leaf of the second, {leaf!r} for one; put the second before it, or leave it out."
                )
            raise ValueError(
                f"the rules {first!r} ({says}) and {second!r} ({other}) for {what} disagree over {leaf!r}; put a rule "
                "for what both match before them."
            )
    placed: dict[str, Placement] = {}
    for (_, says), hit in zip(rules, hits, strict=True):
        placed |= {path: says for path in hit if path not in placed}
    return placed
