"""Reads the optimised HLO that a compiler prints, e.g. `compiled.as_text()`.

Shapes in such a module are those of one device. What its instructions cost is in hlo_cost.py.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
         "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
         "token": 0, "opaque": 0}  # fmt: skip

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)((?::[^{}]*)?)\})?")
NAME = re.compile(r"%([^\s,(){}]+)")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|true_computation|false_computation)=%([^\s,]+)"
)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()  # Dimensions from the fastest to the slowest.
    tile: tuple[int, ...] = ()  # The fastest dimensions are padded to multiples of it.
    space: int = 0  # 0: the device's main memory; others are on the chip.

    @property
    def bytes(self) -> int:
        """Size in memory, padding included."""
        dims = [self.dims[i] for i in self.order] if self.order else list(self.dims[::-1])
        for i, unit in enumerate(reversed(self.tile)):
            if i < len(dims):
                dims[i] = -(-dims[i] // unit) * unit
        return math.prod(dims) * _BITS[self.dtype] // 8 if self.dtype in _BITS else math.prod(dims)

    @property
    def main_bytes(self) -> int:
        """The same, 0 for what lies on the chip."""
        return 0 if self.space else self.bytes

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # Its result; more than one where that is a tuple.
    operands: tuple[str, ...]
    argument: str  # What stands between the parentheses, as text.
    attributes: str
    is_root: bool

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """Computations by role: `calls`, `body`, `condition`, ..."""
        return dict(_CALLED.findall(self.attributes))

    @property
    def op_name(self) -> str:
        """What the program called it, e.g. `jit(step)/while/body/dot_general`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed module."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """A module from its text.

    Raises:
      ValueError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in text.splitlines():
        if current is None:
            if line.endswith("{") and (line.startswith(("%", "ENTRY"))):
                name = NAME.search(line)[1]
                current = computations[name] = {}
                entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif " = " in line:
            instruction = _instruction(line)
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    left, _, rest = line.strip().partition(" = ")
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    argument = rest[opening + 1 : closing]
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=rest[:opening],
        arrays=tuple(_arrays(shape)),
        operands=tuple(NAME.findall(argument)),
        argument=argument,
        attributes=rest[closing + 1 :],
        is_root=left.startswith("ROOT"),
    )


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]}")


def _arrays(shape: str) -> Iterator[Array]:
    for dtype, dims, order, layout in _ARRAY.findall(shape):
        tile = re.search(r"T\(([\d,]+)\)", layout or "")
        space = re.search(r"S\((\d+)\)", layout or "")
        yield Array(
            dtype,
            integers(dims),
            integers(order),
            integers(tile[1]) if tile else (),
            int(space[1]) if space else 0,
        )


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x)


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often a loop's body runs, at most; None if its text does not say.

    Known to the compiler where it is a scan; else said in the loop's name as `trips_N`, as in the
    sampler, whose loops go on where the last one ended; else the constant that the condition
    compares a counter from 0 with, which for a loop that may end early is a bound.
    """
    known = re.search(r'known_trip_count[^}]*?"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    said = re.search(r"trips_(\d+)/while$", loop.op_name)
    if said:
        return int(said[1])
    condition = module.computations[loop.called["condition"]]
    for compare in _all(module, condition, "compare"):
        if "direction=LT" not in compare[1].attributes:
            continue
        for operand in compare[1].operands:
            source = compare[0][operand]
            if source.opcode == "constant" and source.argument.isdecimal():
                return int(source.argument)
    return None


def _all(module: Module, computation: Computation, opcode: str):
    """(computation, instruction) for every such instruction, in fusions too."""
    for i in computation.values():
        if i.opcode == opcode:
            yield computation, i
        if i.opcode in ("fusion", "call"):
            called = i.called.get("calls") or i.called["to_apply"]
            yield from _all(module, module.computations[called], opcode)
