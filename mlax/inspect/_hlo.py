"""HLO: the text of a compiled program, read into computations and instructions."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

HOST = 5  # the memory space of the host, written S(5)


class Shape(NamedTuple):
    """One array as one device holds it."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0  # of memory; 0 is the device's own

    @property
    def bytes(self) -> int:
        """Its size; tokens and other things that are no arrays have none."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or ["0"])[0])
        return math.prod(self.dims) * bits // 8


class Instruction(NamedTuple):
    """One operation: `%name = shapes opcode(operands), attributes`."""

    name: str
    shapes: tuple[Shape, ...]  # of the result, a tuple of any depth laid out flat
    opcode: str
    operands: tuple[str, ...]  # names; for a constant or a parameter, what stands between its brackets
    attributes: dict[str, str]  # as they are written
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """The size of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """The name that JAX gave it: `jit(f)/up/dot_general`; empty if it has none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs: a loop's body, branches, the inside of a fusion or of a call."""
        written = " ".join(self.attributes.get(name, "") for name in _CALLS)
        return tuple(re.findall(r"[\w.\-]+", written))


class Computation(NamedTuple):
    """Instructions by name, in the order in which they run if the program is scheduled."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The one whose result is the computation's."""
        return next((each for each in self.instructions.values() if each.is_root), list(self.instructions.values())[-1])


class Program(NamedTuple):
    """All computations of a compiled program by name, the entry, and on how many devices it runs."""

    computations: dict[str, Computation]
    entry: str
    devices: int

    def trips(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs, if that can be known."""
        written = re.search(r'"known_trip_count":\s*{\s*"n":\s*"?(\d+)', loop.attributes.get("backend_config", ""))
        if written:
            return int(written[1])
        condition = self.computations[_name(loop.attributes["condition"])]
        test = condition.root
        inside = [self.computations[name].root for name in test.called]
        if not any(each.attributes.get("direction") == "LT" for each in (test, *inside)):
            return None
        limits = [each for each in map(condition.instructions.get, test.operands) if each and each.opcode == "constant"]
        return int(limits[0].operands[0]) if limits and re.fullmatch(r"\d+", limits[0].operands[0]) else None


def read(text: str) -> Program:
    """The program whose text `jax.jit(f).lower(...).compile().as_text()` gives, of any backend."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = Computation(header["name"], {})
            computations[current.name] = current
            entry = current.name if header["entry"] else entry
        elif current is not None and (instruction := _instruction(line)):
            current.instructions[instruction.name] = instruction
    counts = [int(found[1]) for found in re.finditer(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])]
    return Program(computations, entry or next(reversed(computations), ""), math.prod(counts))


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_ASSIGNED = re.compile(r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" *(?P<opcode>[\w\-]+)\(")
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<= ]*)\](?:\{(?P<layout>[^}]*)\})?")
_CALLS = ("body", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")


def _instruction(line: str) -> Instruction | None:
    start = _ASSIGNED.match(line)
    if not start:
        return None
    begin = start.end()
    end = _closing(line, begin) if line[begin] == "(" else line.find(" ", begin)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    operands = tuple(_name(each) for each in _pieces(line[opcode.end() : close - 1]))
    attributes = dict(each.split("=", 1) for each in _pieces(line[close:]) if "=" in each)
    shapes = tuple(_shapes(line[begin:end]))
    return Instruction(start["name"], shapes, opcode["opcode"], operands, attributes, bool(start["root"]))


def _shapes(text: str) -> Iterator[Shape]:
    for found in _SHAPE.finditer(text):
        dims = tuple(int(size) for size in re.findall(r"\d+", found["dims"]))
        space = re.search(r"S\((\d+)\)", found["layout"] or "")
        yield Shape(found["dtype"], dims, int(space[1]) if space else 0)


def _name(text: str) -> str:
    """`%x` of `%x`, and of `f32[8]{0} %x` too."""
    return text.rsplit(" ", 1)[-1].removeprefix("%")


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` has been closed."""
    depth = 0
    for mark in _MARKS.finditer(text, start):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if depth == 0:
            return mark.end()
    return len(text)


def _pieces(text: str) -> list[str]:
    """Split at the commas that are in no bracket and in no string."""
    pieces, begin, depth = [], 0, 0
    for mark in _MARKS.finditer(text):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if mark[0] == "," and depth == 0:
            pieces.append(text[begin : mark.start()])
            begin = mark.end()
    return [piece for each in (*pieces, text[begin:]) if (piece := _COMMENT.sub("", each).strip())]


_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')  # a string is one mark, whatever stands in it
_COMMENT = re.compile(r"/\*.*?\*/")
