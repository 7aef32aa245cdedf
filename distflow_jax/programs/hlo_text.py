"""Parser of HLO text, as printed by `compiled.as_text()`, into instructions.

Only the fields that costs depend on are parsed; additions of the platform (tilings, schedules,
comments) are skipped.
"""

import dataclasses
import functools
import math
import re

_LEAF = re.compile(r"\b([a-z]\w*)\[([\d,<=? ]*)\](\{[^}]*\})?")
# memory space in a layout: S(1) is a TPU's memory next to its cores, S(5) the host's
_ELSEWHERE = re.compile(r"S\([1-9]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
_ASSIGNED = re.compile(r"(ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r" *([a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_NAME = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|"
    r"called_computations)=(\{[^}]*\}|%[^\s,(){}]+)"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # of its result, with layouts
    operands: tuple[str, ...]  # names in the same computation; "" for an unknown name
    arguments: str  # text between the opcode's parentheses
    attributes: str  # text after them
    called: dict[str, tuple[str, ...]]  # names of called computations by attribute
    is_root: bool

    @functools.cached_property
    def bytes(self) -> float:
        """Size of the result, the sum over a tuple's elements."""
        return sum(math.prod(dims) * bits / 8 for bits, dims in leaves(self.shape))

    @functools.cached_property
    def memory_bytes(self) -> float:
        """Size of the result's elements in the device's main memory."""
        found = zip(leaves(self.shape), _LEAF.findall(self.shape), strict=True)
        there = (leaf for leaf, (*_, layout) in found if not _ELSEWHERE.search(layout))
        return sum(math.prod(dims) * bits / 8 for bits, dims in there)

    @functools.cached_property
    def op_name(self) -> str:
        """Its name in the traced function, with name scopes."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def dims(self, key: str) -> tuple[int, ...]:
        """The numbers of an attribute: `lhs_contracting_dims={1}` -> (1,)."""
        found = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(d) for d in found[1].split(",") if d) if found else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The instruction whose value it returns."""
        return next((i for i in self.instructions.values() if i.is_root), None)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter instructions by their number."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return {int(i.arguments): i for i in found if i.arguments.isdigit()}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each name."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for name in set(instruction.operands) & found.keys():
                found[name].append(instruction)
        return found

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """The instruction of an operand; None if it is unknown."""
        names = instruction.operands
        return self.instructions.get(names[index]) if index < len(names) else None

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions of all known operands."""
        found = (self.instructions.get(name) for name in instruction.operands)
        return [i for i in found if i is not None]


@dataclasses.dataclass(frozen=True)
class HloText:
    """All computations of a module."""

    computations: dict[str, Computation]
    entry: str  # name of the entry computation; "" if the text has none
    unread: int  # lines that could not be parsed, and unknown names


def leaves(shape: str) -> list[tuple[int, tuple[int, ...]]]:
    """(bits per element, dims) of an array's shape, or of each element of a tuple's."""
    found = []
    for dtype, dims, _ in _LEAF.findall(shape):
        width = re.search(r"\d+", dtype)  # f32, bf16, f8e4m3fn, s4
        bits = 8 if dtype == "pred" else int(width[0]) if width else 0  # token, opaque: nothing
        found.append((bits, tuple(int(d) for d in re.findall(r"\d+", dims))))
    return found


def parse(text: str) -> HloText:
    """Splits a module into its computations; counts and skips lines that it cannot parse.

    A name refers only to definitions above it, as in every printed module, so there are no cycles.
    """
    computations: dict[str, Computation] = {}
    entry, current, unread = "", None, 0
    for line in text.splitlines():
        stripped = line.strip()
        if current is None:
            header = _COMPUTATION.match(stripped)
            if header and not line.startswith((" ", "HloModule")):
                current, above = {}, set(computations)
                computations[header[2]] = Computation(current)
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif stripped:
            instruction = _instruction(stripped)
            if instruction is None:
                unread += 1
                continue
            operands = tuple(n if n in current else "" for n in instruction.operands)
            called = {
                key: tuple(n for n in names if n in above)
                for key, names in instruction.called.items()
            }
            unread += operands.count("")
            unread += sum(map(len, instruction.called.values())) - sum(map(len, called.values()))
            current[instruction.name] = dataclasses.replace(
                instruction, operands=operands, called=called
            )
    return HloText(computations, entry, unread)


def _instruction(line: str) -> Instruction | None:
    assigned = _ASSIGNED.match(line)
    if not assigned:
        return None
    rest = assigned[3]
    # a tuple's shape contains spaces and, in tilings, parentheses
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end) if end > 0 else None
    if not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    if close < 0:
        return None
    arguments = rest[opcode.end() : close - 1]
    return Instruction(
        name=assigned[2],
        opcode=opcode[1],
        shape=rest[:end],
        operands=() if opcode[1] == "constant" else tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=rest[close:],
        called={key: tuple(_NAME.findall(names)) for key, names in _CALLED.findall(rest[close:])},
        is_root=bool(assigned[1]),
    )


def _closing(text: str, start: int) -> int:
    """Index after the parenthesis that closes the one at `start`; -1 if none does."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return -1
