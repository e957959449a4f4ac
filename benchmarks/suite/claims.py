"""Claims about rows, and whether the libraries computed the same."""

from collections.abc import Collection, Iterable
from typing import Any

from benchmarks.suite.rows import Row
from benchmarks.suite.works import EQUINOX, FLAX, MLAX, PEERS, TORCH, Claim, Work

TRAINED_LIKE_TORCH = ("GELU MLP, training step", "CNN, training step")  # as benchmarks/layers.py claims
Verdict = tuple[str, bool]  # a claim in words, with what was measured, and whether it holds


def judge(work: Work, claim: Claim, rows: Iterable[Row]) -> Verdict:
    """Whether a claim holds."""
    values = {row["library"]: row for row in rows if row["work"] == work.name and row["metric"] == claim.metric}
    own, is_rate = values.get(claim.entry), claim.metric == "rate"
    if own is None:
        return f"{work.title}: {claim.entry} was not measured", False
    value, unit, relation = own["value"], own["unit"], "at least" if is_rate else "at most"
    others = {name: row["value"] for name, row in values.items() if _is_meant(claim, name)}
    if claim.of is None:
        bound, words = claim.bound, f"{relation} {claim.bound:,g} {unit}"
    elif not others:
        return f"{work.title}: {claim.entry} has nothing to be compared with", False
    else:
        best = (max if is_rate else min)(others, key=others.__getitem__)
        bound, words = claim.bound * others[best], f"{relation} {claim.bound:g} x {best}, {others[best]:,.4g} {unit}"
    holds = value >= bound if is_rate else value <= bound
    return f"{work.title}: {claim.entry} {value:,.4g} {unit}, {words}", holds


def judge_cpu(rows: Iterable[Row]) -> list[Verdict]:
    """Whether no layer is slower than a JAX peer's, and no training step than any peer's, by more than 5%.

    Of the layers, the blocks of `TRAINED_LIKE_TORCH` are compared with PyTorch, too. A peer that runs the same program
    is as fast, whatever the noise of its measurement.
    """
    peers = {"layers": (FLAX, EQUINOX), "train": (FLAX, EQUINOX, TORCH)}
    measured: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["work"] in peers:
            measured.setdefault((row["work"], row["title"]), {})[row["library"]] = row
    verdicts = []
    for (work, title), found in measured.items():
        compared = (*peers[work], TORCH) if title in TRAINED_LIKE_TORCH else peers[work]
        others = {name: found[name] for name in compared if name in found}
        if MLAX in found and others:
            own, program = found[MLAX]["value"], found[MLAX].get("program")
            versions = found[MLAX]["versions"]["jax"] if program else None
            is_same = {
                name: program is not None and (row.get("program"), row["versions"].get("jax")) == (program, versions)
                for name, row in others.items()
            }
            values = {name: own if is_same[name] else row["value"] for name, row in others.items()}
            best = min(values, key=values.__getitem__)
            words = f"{title}: mlax {own:,.3g} ms, {own / values[best]:.2f} x {best}, at most 1.05"
            verdicts.append((words, own <= 1.05 * values[best]))
    return verdicts


def judge_scaling(rows: Iterable[Row]) -> list[Verdict]:
    """Whether each exponent is at most that of theory, as benchmarks/scaling.py found when it measured it."""
    return [
        (f"{row['metric']} by {row['title']}: exponent {row['value']:.2f}, theory {row['theory']:g}", row["holds"])
        for row in rows
        if row["work"] == "scaling"
    ]


def is_selected(claim: Claim, entries: Collection[str]) -> bool:
    """Whether a claim is about these entries of its work: one that is restricted to others says nothing about it."""
    if claim.of == PEERS:
        return claim.entry in entries and any(_is_meant(claim, entry) for entry in entries)
    return claim.entry in entries and (claim.of is None or claim.of in entries)


def _is_meant(claim: Claim, name: str) -> bool:
    return not name.startswith(MLAX) if claim.of == PEERS else name == claim.of


def compare(work: Work, values: dict[str, Any]) -> list[Verdict]:
    """Whether each entry has mlax's losses or tokens."""
    own = values.get(MLAX)
    if own is None or work.alone:  # those initialize their own weights
        return []
    others = {entry: each for entry, each in values.items() if entry != MLAX}
    return [
        (f"{work.title}: {entry} computes {_shorten(each)}, mlax {_shorten(own)}", _is_same(work, own, each))
        for entry, each in others.items()
    ]


def _is_same(work: Work, own: Any, other: Any) -> bool:
    if work.program == "decode":  # in bfloat16 near ties go either way, and all that follows with them
        return own == other or work.tolerance > 1e-3
    return all(abs(a - b) <= work.tolerance * abs(own[0]) for a, b in zip(own, other, strict=True))


def _shorten(values: Any) -> str:
    return ", ".join(f"{each:.4f}" if isinstance(each, float) else str(each) for each in values)
