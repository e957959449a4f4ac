"""Heartbeats, by which a supervisor tells a slow process from a hung one."""

from collections.abc import Callable

Listener = Callable[[int, str], None]

_listeners: list[Listener] = []


def heartbeat(step: int, phase: str = "step") -> None:
    """Say that the main thread is alive: after `step` steps, in this phase.

    `fit` says it before each step, wait for data, evaluation and save. A loop of one's own under `mlax launch` says it
    once a step. Nobody hears it elsewhere.
    """
    for listener in _listeners:
        listener(step, phase)


def add_heartbeat_listener(listener: Listener) -> None:
    """Have every beat of this process told to `listener` from now on."""
    _listeners.append(listener)
