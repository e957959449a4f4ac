"""Interpret the few instructions of a pickle that a PyTorch state dict consists of; any other is an error.

A pickle is a program that can call any function there is, so it is never run. This reads dicts, lists, tuples, strings,
numbers, and calls of the functions that are passed in, by their names; nothing that a file names is ever imported.
"""

import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from mlax.files._io import InvalidFile, is_count

MAX_PICKLE_BYTES, MAX_STRING_BYTES, MAX_INSTRUCTIONS = 1 << 23, 1 << 20, 500_000
_MAX_LINE_BYTES, _MAX_ARGUMENTS = 256, 16


class Name(NamedTuple):
    """An object that the pickle names, such as torch.FloatStorage: its name and nothing else."""

    full: str


def interpret(
    code: bytes, path: str, names: Mapping[str, Callable[..., Any] | None], load: Callable[[Any], Any], advice: str
) -> Any:
    """The value that a pickle describes: dicts, lists, tuples, strings, numbers and what `names` and `load` return.

    `names` has the objects that may be named, by module and name, with what a call of it does, or None if it may not
    be called. `load` gets the persistent id of data that are stored elsewhere. `path` and `advice` are for errors.
    """
    if len(code) > MAX_PICKLE_BYTES:
        raise InvalidFile(f"{path}: its pickle has {len(code):,} bytes, and at most {MAX_PICKLE_BYTES:,} are allowed.")
    machine = _Machine(code, names, load)
    try:
        return machine.run()
    except _Refused as error:
        reason = str(error)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        if isinstance(error, InvalidFile):
            raise
        reason = f"it is damaged at byte {machine.at:,}"
    raise InvalidFile(f"{path}: its pickle is not that of a state dict: {reason}; {advice}.")


class _Refused(Exception):
    pass


class _Machine:
    """The stack, the memo and the position of a pickle that is being interpreted."""

    def __init__(self, code: bytes, names: Mapping[str, Any], load: Callable[[Any], Any]):
        self.code, self.names, self.load = code, names, load
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MAX_INSTRUCTIONS):
            byte = self.code[self.at]
            self.at += 1
            if byte == 0x2E:  # STOP
                return self.pop()
            instruction = _INSTRUCTIONS.get(byte)
            if instruction is None:
                _refuse(f"it uses {_instruction_name(byte)}, which a state dict does not need")
            instruction(self)
        return _refuse(f"it has more than {MAX_INSTRUCTIONS:,} instructions")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise IndexError
        return self.stack.pop()

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        at = self.marks.pop()
        values = self.stack[at:]
        del self.stack[at:]
        return values

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise TypeError
        return self.stack[-1]

    def take(self, count: int) -> bytes:
        if count > len(self.code) - self.at:
            raise IndexError
        self.at += count
        return self.code[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self, length: int) -> None:
        if length > MAX_STRING_BYTES:
            _refuse(f"it has a string of {length:,} bytes, and at most {MAX_STRING_BYTES:,} are allowed")
        self.push(self.take(length).decode())

    def integer(self, length: int) -> None:
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def line(self) -> str:
        return self.take(self.code.index(b"\n", self.at, self.at + _MAX_LINE_BYTES) + 1 - self.at)[:-1].decode()

    def tuple_of(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        keys = values[::2]
        if not all(type(key) is str or is_count(key, 2**32) for key in keys):  # larger integers can be made to collide
            _refuse("a dict has keys that are neither strings nor small integers")
        self.top(dict).update(zip(keys, values[1::2], strict=True))

    def remember(self, at: int) -> None:
        self.memo[at] = self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        full = f"{module:s}.{name:s}"
        if full not in self.names:
            _refuse(f"it names {full[:200]!r}, which mlax does not load from a file")
        self.push(Name(full))

    def call(self) -> None:
        arguments, name = self.pop(), self.pop()
        if type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS or type(name) is not Name:
            raise TypeError
        function = self.names[name.full]
        if function is None:
            _refuse(f"it calls {name.full}")
        self.push(function(*arguments))

    def set_attributes(self) -> None:
        """Attributes of an OrderedDict, the versions of its modules in a state dict, are left out."""
        self.pop()
        self.top(dict)


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)


def _instruction_name(byte: int) -> str:
    known = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    return f"the instruction {known[byte]}" if byte in known else f"the byte {byte:#04x}, which is not an instruction,"


# By their bytes, as `pickletools.opcodes` has them; those of the protocols 2 to 5 that PyTorch writes.
_INSTRUCTIONS: dict[int, Callable[[_Machine], Any]] = {
    ord(byte): instruction
    for byte, instruction in {
        "\x80": lambda at: at.take(1),  # PROTO
        "\x95": lambda at: at.take(8),  # FRAME
        "(": lambda at: at.mark(),
        "N": lambda at: at.push(None),
        "\x88": lambda at: at.push(True),
        "\x89": lambda at: at.push(False),
        "K": lambda at: at.push(at.number("<B")),
        "M": lambda at: at.push(at.number("<H")),
        "J": lambda at: at.push(at.number("<i")),
        "\x8a": lambda at: at.integer(at.number("<B")),  # LONG1
        "G": lambda at: at.push(at.number(">d")),
        "X": lambda at: at.string(at.number("<I")),
        "\x8c": lambda at: at.string(at.number("<B")),
        ")": lambda at: at.push(()),
        "\x85": lambda at: at.tuple_of(1),
        "\x86": lambda at: at.tuple_of(2),
        "\x87": lambda at: at.tuple_of(3),
        "t": lambda at: at.push(tuple(at.pop_to_mark())),
        "]": lambda at: at.push([]),
        "a": lambda at: at.append([at.pop()]),
        "e": lambda at: at.append(at.pop_to_mark()),
        "}": lambda at: at.push({}),
        "s": lambda at: at.set_items([at.pop(), at.pop()][::-1]),
        "u": lambda at: at.set_items(at.pop_to_mark()),
        "q": lambda at: at.remember(at.number("<B")),
        "r": lambda at: at.remember(at.number("<I")),
        "\x94": lambda at: at.remember(len(at.memo)),
        "h": lambda at: at.push(at.memo[at.number("<B")]),
        "j": lambda at: at.push(at.memo[at.number("<I")]),
        "c": lambda at: at.name(at.line(), at.line()),
        "\x93": lambda at: at.name(*[at.pop(), at.pop()][::-1]),  # STACK_GLOBAL
        "Q": lambda at: at.push(at.load(at.pop())),  # BINPERSID
        "R": lambda at: at.call(),
        "b": lambda at: at.set_attributes(),
    }.items()
}
