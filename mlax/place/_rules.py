"""Rules that give each leaf of a pytree its placement, by patterns over its path."""

import abc
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import PartitionSpec

from mlax.core import EXCLUDE, Documented, NoMatch, check_patterns, frozen, matches, signature

Memory = Literal["device", "host"]
Device = Any  # a jax.Device
MeshSizes = dict[str, int]  # the size of each mesh axis
SpecEntry = str | tuple[str, ...] | None  # the mesh axes that one axis of an array is sharded over
HOST_MEMORY = "pinned_host"  # JAX's name for host memory


@frozen
class ShapeSpec(abc.ABC):
    """A spec that depends on the shape of the array: `resolve` returns the PartitionSpec."""

    resolves_last: ClassVar[bool] = False  # after the other rules of the array, to avoid the axes that they shard

    @abc.abstractmethod
    def resolve(self, shape: tuple[int, ...], mesh: MeshSizes, existing: PartitionSpec) -> PartitionSpec:
        """The spec for an array of this shape, which other rules already shard by `existing`."""

    @abc.abstractmethod
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that the spec may use."""


@frozen
class Placement(metaclass=Documented):
    """The sharding of an array over a mesh, or its single device, and its memory.

    `spec` is a PartitionSpec, or what `shard_last_axes` or `shard_largest_axis` set; None leaves it to another rule, or
    to the parameter that a slot belongs to.
    """

    spec: PartitionSpec | ShapeSpec | None = None  # how it is sharded; None: as otherwise
    memory: Memory | None = None  # None: the device's
    device: Device | None = None  # a single one; None: the mesh

    def __post_init__(self) -> None:
        if self.memory not in (None, "device", "host"):
            raise ValueError(f"Placement: memory is {self.memory!r}, but must be 'device' or 'host'.")
        if self.device is not None and self.spec is not None:
            raise ValueError(
                f"Placement: an array on the single device {self.device} cannot be sharded by {self.spec}; pass one of "
                "device and spec."
            )

    def __str__(self) -> str:
        spec = [str(self.spec)] * (self.spec is not None)
        memory = [f"in {self.memory} memory"] * (self.memory is not None)
        device = [f"on {self.device}"] * (self.device is not None)
        return ", ".join(spec + memory + device) or "unspecified"


@frozen
class LastAxes(ShapeSpec):
    """A spec for the last axes of an array of any rank; see `shard_last_axes`."""

    axes: tuple[SpecEntry, ...]

    def resolve(self, shape, mesh, existing):
        if len(self.axes) > len(shape):
            raise ValueError(f"{self} names {len(self.axes)} axes, but the array has {len(shape)}")
        return PartitionSpec(*[None] * (len(shape) - len(self.axes)), *self.axes)

    def mesh_axes(self):
        return spec_axes(self.axes)

    def __str__(self) -> str:
        return f"shard_last_axes({', '.join(map(repr, self.axes))})"


@frozen
class LargestAxis(ShapeSpec):
    """A spec for the largest axis that a mesh axis divides, unsharded axes first; see `shard_largest_axis`."""

    resolves_last = True
    axis: str
    min_size: int

    def resolve(self, shape, mesh, existing):
        if math.prod(shape) < self.min_size:
            return PartitionSpec()
        entries = [*existing, *[None] * (len(shape) - len(existing))]
        sizes = [size // num_shards(entry, mesh) for size, entry in zip(shape, entries, strict=True)]
        divisible = [axis for axis, size in enumerate(sizes) if size and size % mesh[self.axis] == 0]
        if not divisible:
            return PartitionSpec()
        largest = max(divisible, key=lambda axis: (entries[axis] is None, sizes[axis]))
        return PartitionSpec(*[self.axis if axis == largest else None for axis in range(len(shape))])

    def mesh_axes(self):
        return (self.axis,)

    def __str__(self) -> str:
        return f"shard_largest_axis({self.axis!r})"


host = Placement(memory="host")  # in host memory, sharded as the other rules say


def shard_last_axes(*axes: SpecEntry) -> Placement:
    """Shard the last axes over these mesh axes: `shard_last_axes("model", None)` the last but one."""
    return Placement(LastAxes(axes))


def shard_largest_axis(axis: str, *, min_size: int = 2**12) -> Placement:
    """Shard the largest axis that the mesh axis divides; arrays of fewer than `min_size` elements are replicated."""
    return Placement(LargestAxis(axis, min_size))


@frozen
class Rules:
    """(pattern, placement) pairs, one list for each plan of a product; the placements of all lists are merged.

    Within a list the first rule whose pattern matches a path applies, so exceptions come before the general rule.
    """

    lists: tuple[tuple[tuple[str, Placement], ...], ...]

    def __mul__(self, other: "Rules") -> "Rules":
        return Rules(tuple(rules for rules in (*self.lists, *other.lists) if rules))

    def match(self, leaves: Mapping[str, Any], kind: str) -> dict[str, tuple[Placement, ...]]:
        """The placements of each path, at most one of each list; raises if a rule matches nothing, or two conflict."""
        matched = [_match_rules(rules, leaves, kind) for rules in self.lists]
        return {path: tuple(each[path] for each in matched if path in each) for path in leaves}

    def check_axes(self, what: str, mesh: Iterable[str]) -> None:
        """Raise if a rule names an axis that the mesh does not have."""
        for pattern, placement in (rule for rules in self.lists for rule in rules):
            spec = placement.spec
            axes = spec.mesh_axes() if isinstance(spec, ShapeSpec) else spec_axes(spec or ())
            check_mesh_axes(f"the rule for {what} ({pattern!r}, {placement})", axes, mesh)

    def restrict(self, leaves: Mapping[str, Any]) -> "Rules":
        """The rules that match one of these paths; the others may be for variables that are not among them."""

        def matches_one(pattern: str) -> bool:
            return any(matches(pattern, path) for path in leaves)

        def restrict_rule(pattern: str, placement: Placement) -> tuple[str, Placement]:
            excludes = not pattern.startswith(EXCLUDE) or matches_one(pattern.removeprefix(EXCLUDE))
            return (pattern if excludes else "**", placement)

        return Rules(
            tuple(tuple(restrict_rule(*rule) for rule in rules if matches_one(rule[0])) for rules in self.lists)
        )

    def __str__(self) -> str:
        return "; ".join(", ".join(f"{pattern}: {where}" for pattern, where in rules) for rules in self.lists)


def as_rules(pairs: Any) -> Rules:
    """Rules from (pattern, placement) pairs; `Rules` as they are."""
    if isinstance(pairs, Rules):
        return pairs
    rules: list[tuple[str, Placement]] = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"a rule is {pair!r}, but must be a pair such as ('**/kernel', P(None, 'model')).")
        rules.append((pair[0], as_placement(pair[1])))
    return Rules((tuple(rules),) if rules else ())


def as_placement(given: Any) -> Placement:
    """A placement from what a rule may hold: a placement, a PartitionSpec or a device."""
    match given:
        case Placement():
            return given
        case PartitionSpec() | ShapeSpec():
            return Placement(given)
        case jax.Device():
            return Placement(device=given)
        case _:
            raise TypeError(
                f"the placement of a rule is {given!r}, but must be a PartitionSpec, place.host, "
                "place.shard_last_axes(...), place.shard_largest_axis(...), a device or a place.Placement."
            )


def merge_placements(placements: Iterable[Placement], path: str, leaf: Any, mesh: MeshSizes) -> Placement:
    """One placement for a leaf, its spec resolved and merged axis by axis; specs with `resolves_last` come last."""
    memory = device = None
    spec = PartitionSpec()
    for placement in sorted(placements, key=lambda each: isinstance(each.spec, ShapeSpec) and each.spec.resolves_last):
        memory, device = placement.memory or memory, placement.device or device
        try:
            spec = merge_specs(spec, _resolve_spec(placement, leaf.shape, mesh, spec))
        except ValueError as error:
            raise ValueError(f"{path}, {signature(leaf)}: {error}; write a separate rule for it.") from None
    if device is not None:
        return Placement(None, memory, device)
    _check_spec(path, leaf, spec, mesh)
    return Placement(spec, memory)


def merge_specs(a: PartitionSpec, b: PartitionSpec) -> PartitionSpec:
    """The spec that shards each axis over the mesh axes of both."""
    rank = max(len(a), len(b))
    entries = [
        (*mesh_axes(mine), *mesh_axes(other))
        for mine, other in zip([*a, *[None] * (rank - len(a))], [*b, *[None] * (rank - len(b))], strict=True)
    ]
    return PartitionSpec(*[None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries])


def num_shards(entry: SpecEntry, mesh: MeshSizes) -> int:
    """The number of shards that an axis with this entry of a PartitionSpec has."""
    return math.prod(mesh[name] for name in mesh_axes(entry))


def mesh_axes(entry: SpecEntry) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: Iterable[SpecEntry]) -> tuple[str, ...]:
    """The mesh axes of all entries of a PartitionSpec."""
    return tuple(name for entry in spec for name in mesh_axes(entry))


def check_mesh_axes(what: str, axes: Iterable[str], mesh: Iterable[str]) -> None:
    """Raise if one of the axes is not an axis of the mesh."""
    mesh = list(mesh)
    for axis in axes:
        if axis not in mesh:
            close = difflib.get_close_matches(str(axis), mesh, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"Plan: {what} names the mesh axis {axis!r}, but the mesh has {', '.join(map(repr, mesh)) or 'none'}; "
                f"use one of these, or add it to the mesh.{hint}"
            )


def memory_kind(placement: Placement, device: Device) -> str | None:
    """JAX's memory kind for a placement; None for the default, as where a device has no other memory."""
    if placement.memory != "host":
        return None
    # a device of another process does not list its memories; one of the same platform here has the same
    local = next((each for each in jax.local_devices() if each.platform == device.platform), device)
    return HOST_MEMORY if any(memory.kind == HOST_MEMORY for memory in local.addressable_memories()) else None


def keep_memory_kind(placement: Placement, leaf: Any) -> Placement:
    """The same placement, in host memory if the leaf is there and no rule says otherwise."""
    current = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    stays = placement.memory is None and current == HOST_MEMORY
    return Placement(placement.spec, "host", placement.device) if stays else placement


def _resolve_spec(
    placement: Placement, shape: tuple[int, ...], mesh: MeshSizes, existing: PartitionSpec
) -> PartitionSpec:
    if isinstance(placement.spec, ShapeSpec):
        return placement.spec.resolve(shape, mesh, existing)
    return placement.spec if placement.spec is not None else PartitionSpec()


def _check_spec(path: str, leaf: Any, spec: PartitionSpec, mesh: MeshSizes) -> None:
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"{path} is {signature(leaf)}, but its rule says {spec}, which has {len(spec)} entries; give at most "
            f"{len(leaf.shape)}, or place.shard_last_axes(...) for its last axes."
        )
    used = [name for entry in spec for name in mesh_axes(entry)]
    for name in used:
        if name not in mesh:
            raise ValueError(f"{path}: its rule says {spec}, but the mesh has the axes {', '.join(mesh) or 'none'}.")
        if used.count(name) > 1:
            raise ValueError(f"{path}: {spec} uses {name!r} twice; each mesh axis can shard one axis of an array.")
    for axis, entry in enumerate(spec):
        if leaf.shape[axis] % num_shards(entry, mesh):
            raise ValueError(_divisibility_message(path, leaf, axis, entry, mesh))


def _divisibility_message(path: str, leaf: Any, axis: int, entry: SpecEntry, mesh: MeshSizes) -> str:
    size, shards, names = leaf.shape[axis], num_shards(entry, mesh), mesh_axes(entry)
    by = " x ".join(f"{name} ({mesh[name]})" for name in names)
    by = f"mesh axis {by}" if len(names) == 1 else f"mesh axes {by} = {shards}"
    sizes = [each for each in (size // shards * shards, -(-size // shards) * shards) if each]
    divisors = [number for number in range(2, 2 * shards) if size % number == 0][-6:]
    also = f", or {_join_or(divisors)} shards" if divisors else ""
    return (
        f"{path} is {signature(leaf)}: axis {axis} has size {size}, which {by} does not divide; "
        f"a size of {_join_or(sizes)} would work{also}."
    )


def _join_or(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _match_rules(
    rules: tuple[tuple[str, Placement], ...], leaves: Mapping[str, Any], kind: str
) -> dict[str, Placement]:
    """The placement of each path that a rule of one list matches; raises if rules conflict or match nothing."""
    hits = [{path for path in leaves if matches(pattern, path)} for pattern, _ in rules]
    try:
        check_patterns([pattern for pattern, _ in rules if pattern != "**"], leaves)
    except NoMatch as error:
        raise NoMatch(f"the rule for {kind} {error}") from None
    for i, (first, placement) in enumerate(rules):
        for j in range(i + 1, len(rules)):
            second, other = rules[j]
            both = hits[i] & hits[j]
            if not both or placement == other or hits[i] < hits[j]:
                continue
            conflict = f"the rules {first!r} ({placement}) and {second!r} ({other}) for {kind} conflict"
            if hits[j] <= hits[i]:
                raise ValueError(
                    f"{conflict}: the first also matches every leaf of the second, such as {min(both)!r}; put the "
                    "second before it, or leave it out."
                )
            raise ValueError(f"{conflict} for {min(both)!r}; put a rule for what both match before them.")
    placed: dict[str, Placement] = {}
    for (_, placement), hit in zip(rules, hits, strict=True):
        placed |= {path: placement for path in hit if path not in placed}
    return placed
