"""Config: the fields of an untrusted config.json, each checked when it is read."""

from collections.abc import Mapping
from typing import Any

MAX_WIDTH = 1 << 16  # of anything that a configuration counts, but for what is in MOST
MOST = {  # by a part of the name
    "layer": 1000,  # each of which may be a part that has to be built and traced
    "depth": 1000,
    "vocab": 1 << 24,
    "position": 1 << 24,
    "window": 1 << 24,
    "token_id": 1 << 24,
}
MAX_ENTRIES = 1000  # of a list


class Config:
    """The fields of a config.json; `family` is for errors.

    A value that would change what the model computes, and that it does not support, must be required to be another.
    """

    def __init__(self, family: str, config: Mapping[str, Any]):
        if not isinstance(config, Mapping):
            raise TypeError(f"{family}: the configuration is {type(config).__name__}, but must be a dict.")
        self.family = family
        self.fields = config

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(name, default)
        most = next((most for part, most in MOST.items() if part in name), MAX_WIDTH)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{self.family}: {name} is {_short(value)}, but must be an integer from 1 to {most}.")
        return value

    def optional_size(self, name: str, default: int | None) -> int | None:
        """A positive integer, or None."""
        value = self.fields.get(name, default)
        return None if value is None else self.size(name, value)

    def sizes(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A list of positive integers."""
        values = self._list(name, default)
        return tuple(Config(self.family, {name: value}).size(name) for value in values)

    def levels(self, name: str, choices: Mapping[str, Any]) -> tuple[Any, ...]:
        """A list of names, each standing for something."""
        return tuple(Config(self.family, {name: value}).choice(name, choices) for value in self._list(name))

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
            raise ValueError(f"{self.family}: {name} is {_short(value)}, but must be a number.")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or False."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.family}: {name} is {_short(value)}, but must be true or false.")
        return value

    def choice(self, name: str, choices: Mapping[Any, Any], default: Any = None) -> Any:
        """What a name or a number stands for, such as an activation."""
        value = self._get(name, default)
        if not isinstance(value, str | int) or value not in choices:
            wanted = ", ".join(map(str, choices))
            raise ValueError(f"{self.family}: {name} is {_short(value)}, but must be one of {wanted}.")
        return choices[value]

    def require(self, name: str, *values: Any, default: Any) -> None:
        """Raise unless a field has one of the values that this model computes."""
        value = self.fields.get(name, default)
        if not any(type(value) is type(each) and value == each for each in values):
            wanted = " or ".join(map(repr, values))
            raise ValueError(f"{self.family}: {name} is {_short(value)}, but only {wanted} is supported.")

    def _list(self, name: str, default: Any = None) -> list[Any]:
        values = self._get(name, default)
        if not isinstance(values, list | tuple) or not 1 <= len(values) <= MAX_ENTRIES:
            raise ValueError(f"{self.family}: {name} is {_short(values)}, but must be a list of 1 to {MAX_ENTRIES}.")
        return list(values)

    def _get(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is None and default is None:
            raise ValueError(f"{self.family}: the configuration has no {name}.")
        return default if value is None else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
