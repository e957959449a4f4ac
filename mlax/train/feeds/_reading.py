"""Reading an iterator batch by batch, and coming back to a place in it."""

import itertools
import json
from collections.abc import Callable, Generator
from typing import Any

from mlax.train.feeds._stream import Position


def reading(
    make: Callable[[], Any], step: int, position: Position | None, again: bool
) -> Generator[tuple[Any, Position]]:
    """The batches of what `make` makes, each with the position after it; made again at its end, if `again`.

    From `position` on if it says a place, else from the batch of number `step` on: a stream that has given no batch
    yet knows no more than the step, and `step` batches are read and dropped. Where an iterator can say its state,
    that is the position: `get_state` and `set_state` (Grain), or `state_dict` and `load_state_dict` on what is iterated
    over (Hugging Face, torchdata). Otherwise batches are counted and, to come back, read and dropped. What has
    `set_epoch` is told the number of the pass, by which it may shuffle.
    """
    place = position if position and not {"pass", "taken", "state"}.isdisjoint(position) else {"taken": step}
    state, drop = place.get("state"), place.get("taken", 0)
    for number in itertools.count(place.get("pass", 0)):
        made = make()
        if hasattr(made, "set_epoch"):
            made.set_epoch(number)
        if state is not None and hasattr(made, "load_state_dict"):
            made.load_state_dict(_decoded(state))
        iterator = iter(made)
        if state is not None and not hasattr(made, "load_state_dict"):
            iterator.set_state(_decoded(state))  # pyright: ignore[reportAttributeAccessIssue]
        taken = 0
        try:
            for batch in iterator:
                taken += 1
                if drop:
                    drop -= 1
                    continue
                step += 1
                yield batch, {"step": step, "pass": number, **_place(made, iterator, taken)}
        finally:
            if hasattr(iterator, "close"):
                iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        if taken == 0 and state is None:
            raise ValueError("Iterated: the iterator is empty; it needs at least one batch.")
        if not again:
            return
        state = None


def _place(made: Any, iterator: Any, taken: int) -> Position:
    """Where `iterator` stands, in a form that JSON can hold and that does not change when it goes on."""
    if hasattr(made, "load_state_dict"):
        state = made.state_dict()
    elif hasattr(iterator, "get_state"):
        state = iterator.get_state()
    else:
        return {"taken": taken}
    if isinstance(state, bytes):
        return {"state": {"bytes": state.decode("latin-1")}}
    try:
        return {"state": json.loads(json.dumps(state))}
    except TypeError as error:
        error.add_note(f"Iterated: the state of {type(iterator).__name__} is not JSON: {state!r}")
        raise


def _decoded(state: Any) -> Any:
    return state["bytes"].encode("latin-1") if isinstance(state, dict) and set(state) == {"bytes"} else state
