"""Which saved array goes to which leaf of the target; and the words where they do not fit."""

from collections.abc import Iterable, Mapping
from typing import Any

from mlax.core import NoMatch, matches, no_match_message
from mlax.train.checkpoints._manifest import ArrayRecord

_ADVICE = "pass only=(...) to restore some leaves, or names={saved: wanted} if they were renamed"


class Unlike(ValueError):
    """What was saved does not fit the target."""

    def __init__(self, fault: str, advice: str):
        super().__init__(f"restore: {fault}; {advice}.")
        self.fault = fault


def matched(
    saved: Mapping[str, ArrayRecord], leaves: Mapping[str, Any], only: Iterable[str], names: Mapping[str, str]
) -> dict[str, str]:
    """The saved name of each leaf that is to be restored."""
    wanted = _renamed(saved, names)
    for pattern in only:
        if not any(matches(pattern, name) for name in (*leaves, *wanted)):
            raise NoMatch(no_match_message(pattern, leaves))
    chosen = [name for name in leaves if any(matches(pattern, name) for pattern in only)]
    missing = [name for name in chosen if name not in wanted]
    extra = [name for name in wanted if name not in leaves and any(matches(pattern, name) for pattern in only)]
    if missing:
        only_saved = f"saved, but not in the target: {_few(extra)}"
        raise Unlike(f"{_listed(missing)} not saved ({only_saved})", _ADVICE)
    if extra:
        raise Unlike(f"{_listed(extra)} saved, but not in the target", _ADVICE)
    return {name: wanted[name] for name in chosen}


def _renamed(saved: Mapping[str, ArrayRecord], names: Mapping[str, str]) -> dict[str, str]:
    """The saved name by the name in the target."""
    found: dict[str, str] = {}
    for old in names:
        if not any(name == old or name.startswith(f"{old}/") for name in saved):
            raise NoMatch(f"restore: names: {no_match_message(old, saved)}")
    for name in saved:
        old = max((old for old in names if name == old or name.startswith(f"{old}/")), key=len, default="")
        new = names[old] + name.removeprefix(old) if old else name
        if new in found:
            raise ValueError(f"restore: {name!r} and {found[new]!r} would both be {new!r}; rename one of them.")
        found[new] = name
    return found


def _listed(names: list[str]) -> str:
    return f"{_few(names)} {'is' if len(names) == 1 else 'are'}"


def _few(names: list[str]) -> str:
    few = ", ".join(repr(name) for name in names[:4]) or "nothing"
    return few if len(names) <= 4 else f"{few} and {len(names) - 4} more"
