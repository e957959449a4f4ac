"""Rules: which place each leaf of a tree has, by patterns over its path."""

from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from mlax.core import NoMatch, frozen, matches, no_match_message, signature
from mlax.place._where import Spread, Where, names, spec_of, ways, where_of


@frozen
class Rules:
    """Pairs of a pattern and what it says, one list for each plan of a product; each list may place every leaf.

    Of the rules of one list that match a leaf the first holds, so exceptions come before what they are exceptions from.
    """

    lists: tuple[tuple[tuple[str, Where], ...], ...]

    def __mul__(self, other: "Rules") -> "Rules":
        return Rules(tuple(rules for rules in (*self.lists, *other.lists) if rules))

    def found(self, leaves: Mapping[str, Any], what: str) -> dict[str, tuple[Where, ...]]:
        """What the rules say of each leaf, one word of each list; refuses rules that say nothing, or disagree."""
        each = [_found(rules, leaves, what) for rules in self.lists]
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


def rules_of(given: Any) -> Rules:
    """Rules from a sequence of pairs, or from rules."""
    if isinstance(given, Rules):
        return given
    pairs: list[tuple[str, Where]] = []
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"a rule is {pair!r}, but must be a pair: ('**/kernel', P(None, 'model')), say.")
        pairs.append((pair[0], where_of(pair[1])))
    return Rules((tuple(pairs),) if pairs else ())


def merged(said: Iterable[Where], path: str, leaf: Any, mesh: dict[str, int]) -> Where:
    """One place from what several lists say of a leaf: their splits are of different axes, or of one in turn.

    What says an axis goes first, and what spreads takes from the rest.
    """
    said = sorted(said, key=lambda where: isinstance(where.split, Spread))
    memory = device = None
    spec = PartitionSpec()
    for where in said:
        memory, device = where.memory or memory, where.device or device
        try:
            more = spec_of(where, leaf.shape, mesh, spec)
        except ValueError as error:
            raise ValueError(f"{path}, {signature(leaf)}: {error}; write a rule of its own for it.") from None
        spec = joined(spec, more)
    if device is None:
        _check(path, leaf, spec, mesh)
        return Where(spec, memory)
    return Where(None, memory, device)


def joined(a: PartitionSpec, b: PartitionSpec) -> PartitionSpec:
    """Split by both, axis by axis."""
    longer = max(len(a), len(b))
    entries = [
        (*names(mine), *names(other))
        for mine, other in zip([*a, *[None] * (longer - len(a))], [*b, *[None] * (longer - len(b))], strict=True)
    ]
    return PartitionSpec(*[None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries])


def _check(path: str, leaf: Any, spec: PartitionSpec, mesh: dict[str, int]) -> None:
    if len(spec) > len(leaf.shape):
        raise ValueError(
            f"{path} is {signature(leaf)}, but its rule says {spec}, which has {len(spec)} entries; say at most "
            f"{len(leaf.shape)}, or place.last(...) for its last axes."
        )
    used = [name for entry in spec for name in names(entry)]
    for name in used:
        if name not in mesh:
            raise ValueError(f"{path}: its rule says {spec}, but the mesh has the axes {', '.join(mesh) or 'none'}.")
        if used.count(name) > 1:
            raise ValueError(f"{path}: {spec} splits by {name!r} twice; each mesh axis can split one axis.")
    for axis, entry in enumerate(spec):
        size, number = leaf.shape[axis], ways(entry, mesh)
        if size % number:
            by = " x ".join(f"{name} ({mesh[name]})" for name in names(entry))
            by = f"mesh axis {by}" if len(names(entry)) == 1 else f"mesh axes {by} = {number}"
            sizes = [each for each in (size // number * number, -(-size // number) * number) if each]
            splits = [ways for ways in range(2, 2 * number) if size % ways == 0][-6:]
            also = f", or a split into {_either(splits)}" if splits else ""
            raise ValueError(
                f"{path} is {signature(leaf)}: axis {axis} has size {size}, which {by} does not divide; "
                f"a size of {_either(sizes)} would{also}."
            )


def _either(numbers: list[int]) -> str:
    *before, last = map(str, numbers)
    return f"{', '.join(before)} or {last}" if before else last


def _found(rules: tuple[tuple[str, Where], ...], leaves: Mapping[str, Any], what: str) -> dict[str, Where]:
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
    placed: dict[str, Where] = {}
    for (_, says), hit in zip(rules, hits, strict=True):
        placed |= {path: says for path in hit if path not in placed}
    return placed
