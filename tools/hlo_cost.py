"""What an HLO module costs one device, loops counted as often as they run.

XLA's own cost analysis counts a loop's body once; here `executed` walks a module with every
instruction multiplied by how often it runs, and the functions below say what one instruction costs:
multiply-adds of matmuls, bytes to and from main memory, data exchanged between devices. Elementwise
work is not counted as FLOPs, and what lies in on-chip memory is not counted as bytes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from tools.hlo import NAME, Array, Computation, Instruction, Module, integers, trip_count

# They move nothing, or what they move is counted elsewhere: a transfer where it is done.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
         "call", "after-all", "partition-id", "replica-id", "opt-barrier", "copy-start",
         "slice-start", "add-dependency", "domain"}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_PLUMBING = {"bitcast", "reshape", "get-tuple-element"}
_ASYNC_TARGETS = ("AsyncCollectiveStart", "AsyncCollectiveDone")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Data exchanged between devices, in one place of the program."""

    kind: str  # One of COLLECTIVES.
    arrays: tuple[Array, ...]  # The result on one device.
    group: int  # Devices that take part.
    times: int
    computation: str
    op_name: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device must send, all times together, by the best known algorithms.

        With g devices an all-gather sends (g-1)/g of its result, a reduce-scatter as much of its
        input, which is g results; an all-reduce is one after the other.
        """
        size, g = sum(a.bytes for a in self.arrays), self.group
        share = {
            "all-gather": (g - 1) / g,
            "reduce-scatter": g - 1,
            "all-reduce": 2 * (g - 1) / g,
            "all-to-all": (g - 1) / g,
            "collective-permute": 1.0,
        }[self.kind]
        return self.times * share * size


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction where it runs, outside of fusions."""

    instruction: Instruction
    computation: str
    times: int  # Loops applied; a bound where one may end early.


def executed(module: Module) -> Iterator[Executed]:
    """Every instruction that runs, with how often. Of a conditional all branches run.

    A loop whose length its text does not say counts once.
    """

    def walk(name: str, times: int):
        for i in module.computations[name].values():
            yield Executed(i, name, times)
            if i.opcode == "while":
                trips = trip_count(module, i)
                trips = 1 if trips is None else trips
                yield from walk(i.called["body"], times * trips)
                yield from walk(i.called["condition"], times * trips)
            elif i.opcode == "call":
                yield from walk(i.called["to_apply"], times)
            elif i.opcode == "conditional":
                for branch in _branches(i):
                    yield from walk(branch, times)

    return walk(module.entry, 1)


def _branches(conditional: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    if listed:
        return NAME.findall(listed[1])
    return [name for role, name in conditional.called.items() if role.endswith("_computation")]


def unbounded_loops(module: Module) -> list[str]:
    """The names of loops whose length is not known: what is in them counts once."""
    loops = (e.instruction for e in executed(module) if e.instruction.opcode == "while")
    return [i.op_name or i.name for i in loops if trip_count(module, i) is None]


def flops(module: Module, computation: str, instruction: Instruction) -> float:
    """FLOPs of the matmuls in one run of an instruction, two for a multiply-add.

    A kernel counts with its own estimate, if it states one.
    """
    i, of = instruction, module.computations[computation]
    if i.opcode == "fusion":
        called = i.called["calls"]
        return sum(flops(module, called, inner) for inner in module.computations[called].values())
    if i.opcode == "dot":
        contracted = integers(re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)[1])
        lhs = of[i.operands[0]].arrays[0].dims
        return 2.0 * math.prod(i.arrays[0].dims) * math.prod(lhs[d] for d in contracted)
    if i.opcode == "convolution":
        return _convolution_flops(i, of[i.operands[0]].arrays[0].dims, of[i.operands[1]].arrays[0])
    stated = re.search(r'"flops":"?(\d+)', i.attributes) if i.opcode == "custom-call" else None
    return float(stated[1]) if stated else 0.0


def _convolution_flops(i: Instruction, lhs: tuple[int, ...], rhs: Array) -> float:
    """A TPU writes every matmul as a convolution; of its taps only those inside the input count.

    Batch axes of a matmul become dilated spatial axes, where one tap in many is inside.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    lhs_labels, rhs_labels, out_labels = labels.groups()
    out = i.arrays[0].dims
    window = _window(i.attributes)
    taps = 1
    for axis in range(len(lhs_labels) - 2):
        label = str(axis)
        taps *= _taps_inside(
            lhs[lhs_labels.index(label)],
            rhs.dims[rhs_labels.index(label)],
            out[out_labels.index(label)],
            {key: values[axis] for key, values in window.items()},
        )
    groups = re.search(r"batch_group_count=(\d+)", i.attributes)
    batch = lhs[lhs_labels.index("b")] // (int(groups[1]) if groups else 1)
    return 2.0 * taps * batch * rhs.dims[rhs_labels.index("i")] * rhs.dims[rhs_labels.index("o")]


def _window(attributes: str) -> dict[str, list]:
    text = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in text[1].split()) if text else {}
    values = {key: value.split("x") for key, value in fields.items()}
    return {
        key: [tuple(map(int, v.split("_"))) if key == "pad" else int(v) for v in values[key]]
        for key in values
    }


def _taps_inside(size: int, taps: int, out: int, window: dict[str, int | tuple[int, int]]) -> int:
    """(output, tap) pairs of one spatial axis that fall on an element of the input."""
    window = {"stride": 1, "pad": (0, 0), "lhs_dilate": 1, "rhs_dilate": 1} | window
    at = np.arange(out)[:, None] * window["stride"] + np.arange(taps)[None] * window["rhs_dilate"]
    at -= window["pad"][0]
    inside = (at >= 0) & (at <= (size - 1) * window["lhs_dilate"])
    return int((inside & (at % window["lhs_dilate"] == 0)).sum())


def traffic(module: Module, computation: str, instruction: Instruction) -> int:
    """Bytes of main memory that one run of an instruction reads and writes.

    Of arrays that are only sliced the slices count, of those updated in place the updates. What
    collectives read and write is not counted here: see `Collective`.
    """
    i, of = instruction, module.computations[computation]
    if i.opcode in _FREE or _base_kind(i.opcode) is not None:
        return 0
    if i.opcode == "custom-call" and any(t in i.attributes for t in (*_ASYNC_TARGETS, "Allocate")):
        return 0
    if i.opcode in ("copy-done", "slice-done"):
        started = of[of[i.operands[0]].operands[0]].arrays[0]
        read = i.arrays[0].bytes if started.space == 0 else 0
        return read + i.arrays[0].main_bytes
    if i.opcode == "fusion":
        called = module.computations[i.called["calls"]]
        read = sum(
            _read(module, called, parameter, of[operand].arrays[0])
            for parameter, operand in zip(_parameters(called), i.operands, strict=True)
            if len(of[operand].arrays) == 1
        )
        return read + _written(module, called, [a.space for a in i.arrays])
    read = sum(_read_by(module, i, of, operand) for operand in set(i.operands) if operand in of)
    root = {**of, i.name: i}
    return read + _written_by(module, root, i, [a.space for a in i.arrays])


def _parameters(computation: Computation) -> list[Instruction]:
    found = [i for i in computation.values() if i.opcode == "parameter"]
    return sorted(found, key=lambda i: int(i.argument))


def _read(module: Module, computation: Computation, source: Instruction, array: Array) -> int:
    """Bytes that a computation reads of one of its parameters, an array in memory."""
    if array.space:
        return 0
    total = 0
    for user in computation.values():
        if source.name not in user.operands:
            continue
        if user.opcode in _PLUMBING:
            total += _read(module, computation, user, array)
        elif user.opcode == "fusion":
            inner = module.computations[user.called["calls"]]
            parameter = _parameters(inner)[user.operands.index(source.name)]
            total += _read(module, inner, parameter, array)
            if _origin(inner) == parameter:  # It only renames what those who use it read.
                total += _read(module, computation, user, array)
        else:
            total += _read_by(module, user, computation, source.name)
    return min(total, array.bytes)


def _origin(computation: Computation) -> Instruction:
    """What a computation's result is but for its shape."""
    found = next(i for i in computation.values() if i.is_root)
    while found.opcode in _PLUMBING and found.operands[0] in computation:
        found = computation[found.operands[0]]
    return found


def _read_by(module: Module, user: Instruction, of: Computation, operand: str) -> int:
    """Bytes that an instruction outside of fusions, or one inside, reads of an operand."""
    source, position = of[operand], user.operands.index(operand)
    if user.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
        return min(sum(a.bytes for a in user.arrays), sum(a.main_bytes for a in source.arrays))
    if user.opcode == "dynamic-update-slice" and position == 0:
        return 0
    passed_on = user.opcode == "tuple" or _base_kind(user.opcode) is not None
    if passed_on or any(target in user.attributes for target in _ASYNC_TARGETS):
        return 0
    return sum(a.main_bytes for a in source.arrays)


def _written(module: Module, computation: Computation, spaces: list[int]) -> int:
    root = next(i for i in computation.values() if i.is_root)
    return _written_by(module, computation, root, spaces)


def _written_by(module: Module, of: Computation, result: Instruction, spaces: list[int]) -> int:
    """Bytes that making a result writes, where its parts lie in these memories."""
    if result.opcode == "tuple" and len(result.operands) == len(spaces):
        parts = zip(result.operands, spaces, strict=True)
        return sum(_written_by(module, of, of[part], [space]) for part, space in parts)
    if all(spaces) or result.opcode == "parameter" or _base_kind(result.opcode) is not None:
        return 0
    if any(target in result.attributes for target in _ASYNC_TARGETS):
        return 0
    if result.opcode in _PLUMBING and result.operands[0] in of:
        return _written_by(module, of, of[result.operands[0]], spaces)
    if result.opcode == "dynamic-update-slice":
        return sum(a.bytes for a in of[result.operands[1]].arrays)
    if result.opcode == "fusion" and "calls" in result.called:
        return _written(module, module.computations[result.called["calls"]], spaces)
    pairs = zip(result.arrays, spaces, strict=True) if len(result.arrays) == len(spaces) else ()
    return sum(array.bytes for array, space in pairs if space == 0)


def _base_kind(opcode: str) -> str | None:
    """The collective that an opcode is or belongs to; None for any other."""
    base = opcode.removesuffix("-start").removesuffix("-done")
    return base if base in COLLECTIVES else None


def collectives(module: Module) -> list[Collective]:
    """All data exchanges; one that is carried out in pieces, spread over fusions, counts once."""
    found = []
    for e in executed(module):
        parts = list(_inside(module, e.instruction))
        starts = any("AsyncCollectiveStart" in i.attributes for i in parts)
        for i in parts:
            kind = _base_kind(i.opcode)
            if kind is None or i.opcode.endswith("-done"):
                continue
            if "chain_id" in i.attributes and not starts:
                continue  # A later piece: the exchange was counted where it begins.
            arrays = _result_of(kind, i)
            group = _group(i.attributes)
            found.append(Collective(kind, arrays, group, e.times, e.computation, i.op_name))
    return found


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    yield instruction
    if instruction.opcode in ("fusion", "async-start") and "calls" in instruction.called:
        for i in module.computations[instruction.called["calls"]].values():
            yield from _inside(module, i)


def _result_of(kind: str, i: Instruction) -> tuple[Array, ...]:
    """The result's arrays; a started exchange lists its operands first, and its bookkeeping."""
    real = tuple(a for a in i.arrays if not (a.dtype == "u32" and not a.dims))
    if not i.opcode.endswith("-start") or kind == "all-reduce":
        return real or i.arrays
    return real[len(real) // 2 :]


def _group(attributes: str) -> int:
    """Devices in one group of an exchange; 1 where none are named."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", attributes)
    if iota:
        return int(iota[1])
    named = re.search(r"replica_groups=[^{]*mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes)
    if named:
        sizes = {k: int(v) for k, v in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part) if part else sizes[axis] for axis, part in axes)
    return 2 if "source_target_pairs" in attributes else 1
