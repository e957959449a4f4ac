"""Parse the text of a compiled HLO program into computations and instructions."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

HOST_SPACE = 5  # the memory space of host memory, written S(5) in a layout


class Shape(NamedTuple):
    """The shape of one array on one device."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0  # memory space; 0 is device memory

    @property
    def bytes(self) -> int:
        """The size of the array; 0 for tokens and other non-arrays."""
        bits = 8 if self.dtype == "pred" else int((re.search(r"\d+", self.dtype) or ["0"])[0])
        return math.prod(self.dims) * bits // 8


class Instruction(NamedTuple):
    """One operation: `%name = shapes opcode(operands), attributes`."""

    name: str
    shapes: tuple[Shape, ...]  # of the result; a nested tuple is flattened
    opcode: str
    operands: tuple[str, ...]  # names; of a constant or a parameter, the text in parentheses
    attributes: dict[str, str]  # as text
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """The size of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """The op_name of its metadata, such as `jit(f)/up/dot_general`; empty if it has none."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs: the body of a loop, the branches of a conditional, a fusion or a callee."""
        text = " ".join(self.attributes.get(name, "") for name in _CALLS)
        return tuple(re.findall(r"[\w.\-]+", text))


class Computation(NamedTuple):
    """Instructions by name, in the order of the schedule, if there is one."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the result of the computation."""
        return next((each for each in self.instructions.values() if each.is_root), list(self.instructions.values())[-1])


class Program(NamedTuple):
    """The computations of a compiled program by name, the name of its entry, and its number of devices."""

    computations: dict[str, Computation]
    entry: str
    devices: int

    def trip_count(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs; None if unknown."""
        known = re.search(r'"known_trip_count":\s*{\s*"n":\s*"?(\d+)', loop.attributes.get("backend_config", ""))
        if known:
            return int(known[1])
        condition = self.computations[_operand_name(loop.attributes["condition"])]
        test = condition.root
        fused = [self.computations[name].root for name in test.called]
        if not any(each.attributes.get("direction") == "LT" for each in (test, *fused)):
            return None
        limits = [each for each in map(condition.instructions.get, test.operands) if each and each.opcode == "constant"]
        return int(limits[0].operands[0]) if limits and re.fullmatch(r"\d+", limits[0].operands[0]) else None


def parse_hlo(text: str) -> Program:
    """Parse the text of `jax.jit(f).lower(...).compile().as_text()`, of any backend."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = Computation(header["name"], {})
            computations[current.name] = current
            entry = current.name if header["entry"] else entry
        elif current is not None and (instruction := _parse_instruction(line)):
            current.instructions[instruction.name] = instruction
    counts = [int(found[1]) for found in re.finditer(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])]
    return Program(computations, entry or next(reversed(computations), ""), math.prod(counts))


def kernels(program: Program) -> Iterator[tuple[Instruction, Computation, int]]:
    """The instructions that run as kernels, each with the computation that it is in, and how often it runs."""
    return _kernels_of(program, program.entry, 1)


def _kernels_of(program: Program, name: str, times: int) -> Iterator[tuple[Instruction, Computation, int]]:
    computation = program.computations[name]
    for each in computation.instructions.values():
        if each.opcode == "while":
            body = _operand_name(each.attributes["body"])
            yield from _kernels_of(program, body, times * (program.trip_count(each) or 1))
        elif each.opcode in ("conditional", "call"):
            for called in each.called:
                yield from _kernels_of(program, called, times)
        elif each.opcode not in _NO_KERNELS and not each.opcode.endswith(("-done", "-update")):
            yield each, computation, times


_NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_ASSIGNMENT = re.compile(r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" *(?P<opcode>[\w\-]+)\(")
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<= ]*)\](?:\{(?P<layout>[^}]*)\})?")
_CALLS = ("body", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")


def _parse_instruction(line: str) -> Instruction | None:
    start = _ASSIGNMENT.match(line)
    if not start:
        return None
    begin = start.end()
    end = _closing_bracket(line, begin) if line[begin] == "(" else line.find(" ", begin)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing_bracket(line, opcode.end() - 1)
    operands = tuple(map(_operand_name, _split_commas(line[opcode.end() : close - 1])))
    attributes = dict(each.split("=", 1) for each in _split_commas(line[close:]) if "=" in each)
    shapes = tuple(_parse_shapes(line[begin:end]))
    return Instruction(start["name"], shapes, opcode["opcode"], operands, attributes, bool(start["root"]))


def _parse_shapes(text: str) -> Iterator[Shape]:
    for found in _SHAPE.finditer(text):
        dims = tuple(int(size) for size in re.findall(r"\d+", found["dims"]))
        space = re.search(r"S\((\d+)\)", found["layout"] or "")
        yield Shape(found["dtype"], dims, int(space[1]) if space else 0)


def _operand_name(text: str) -> str:
    """`x` from `%x` or `f32[8]{0} %x`."""
    return text.rsplit(" ", 1)[-1].removeprefix("%")


def _closing_bracket(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    depth = 0
    for token in _TOKENS.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return token.end()
    return len(text)


def _split_commas(text: str) -> list[str]:
    """Split at the commas that are outside brackets and strings."""
    pieces, begin, depth = [], 0, 0
    for token in _TOKENS.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            pieces.append(text[begin : token.start()])
            begin = token.end()
    return [piece for each in (*pieces, text[begin:]) if (piece := _COMMENT.sub("", each).strip())]


_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')  # a string is one token, whatever it contains
_COMMENT = re.compile(r"/\*.*?\*/")
