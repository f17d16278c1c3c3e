"""Values as plain JSON, so that nothing that crosses a process boundary can carry code.

`encode` runs beside the untrusted program, `decode` on the trusted side: whatever bytes arrive, the
result is made of Python's own types, and comparing it calls no method that the program wrote.
"""

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any

MOST_DEPTH = 100  # Of nested values, far below Python's own recursion limit.
_SMALL = 1 << 53  # Larger integers go as hexadecimal, which is linear in both directions.


class Remote:
    """An object that stayed with the program; it can be handed back to it and nothing else."""

    def __init__(self, number: int):
        """Args: number: how the program knows it."""
        self.number = number

    def __bool__(self) -> bool:
        raise TypeError("an object of the program has no value here; return plain data")

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the program cannot be compared here; return plain data")


def encode(value: Any, refer: Callable[[Any], int], depth: int = 0) -> Any:
    """A value as what `json.dumps` takes.

    Args:
      value: anything.
      refer: keeps an object that is not plain data and returns its number.
      depth: of the value in the whole.

    Raises:
      ValueError: nested too deeply (or in a circle).
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"nested deeper than {MOST_DEPTH}")
    if value is None or isinstance(value, (bool, str)):
        return value if type(value) in (type(None), bool, str) else str(value)
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < _SMALL else {"int": hex(number)}
    if isinstance(value, float):
        return float(value)
    for kind, name in _CONTAINERS:
        if isinstance(value, kind):
            items = [encode(x, refer, depth + 1) for x in list(value)]
            return items if name == "list" else {name: items}
    if isinstance(value, dict):
        pairs = list(value.items())
        return {"dict": [[encode(x, refer, depth + 1) for x in pair] for pair in pairs]}
    for name, (kind, pack, _) in (_SCALARS | _late(type(value).__module__)).items():
        if type(value) is kind:
            return {name: pack(value)}
    return {"object": value.number if isinstance(value, Remote) else refer(value)}


def decode(data: Any, find: Callable[[int], Any], depth: int = 0) -> Any:
    """What `encode` made, as a value again.

    Args:
      data: what `json.loads` returned; it may be hostile.
      find: the object of a number, or what stands for it.
      depth: of the value in the whole.

    Raises:
      ValueError: it is nothing that `encode` makes.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"nested deeper than {MOST_DEPTH}")
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [decode(x, find, depth + 1) for x in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not a value")
    ((name, inner),) = data.items()
    try:
        if name == "object":
            return find(int(inner))
        if name == "dict":
            return {decode(k, find, depth + 1): decode(v, find, depth + 1) for k, v in inner}
        if name in _SEQUENCES:
            return _SEQUENCES[name](decode(x, find, depth + 1) for x in inner)
        if name in _SCALARS:
            return _SCALARS[name][2](inner)
        if name in _MODULES:
            return _late(_MODULES[name])[name][2](inner)
    except (TypeError, ArithmeticError, OverflowError, KeyError) as error:
        raise ValueError(f"not a value: {error}") from error
    raise ValueError(f"not a value: {name!r}")


def loads(line: bytes) -> Any:
    """One line of JSON; ValueError for anything else, however deep or large its numbers."""
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


_CONTAINERS = (
    (list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "frozenset"),
)  # fmt: skip
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
# Name -> type, to JSON, from JSON.
_Scalars = dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]
_SCALARS: _Scalars = {
    "int": (int, hex, lambda text: int(text, 16)),
    "complex": (complex, lambda z: [z.real, z.imag], lambda pair: complex(*pair)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "range": (range, lambda r: [r.start, r.stop, r.step], lambda three: range(*three)),
}
_MODULES = {
    "decimal": "decimal", "fraction": "fractions", "date": "datetime", "datetime": "datetime",
    "time": "datetime", "timedelta": "datetime",
}  # fmt: skip


@functools.cache
def _late(module: str) -> _Scalars:
    """Scalars of modules that few programs use, so that the others do not wait for their import."""
    if module not in _MODULES.values():
        return {}
    m = importlib.import_module(module)
    if module == "decimal":
        return {"decimal": (m.Decimal, str, m.Decimal)}
    if module == "fractions":
        return {"fraction": (m.Fraction, str, m.Fraction)}
    found: _Scalars = {
        name: (kind, kind.isoformat, kind.fromisoformat)
        for name, kind in (("date", m.date), ("datetime", m.datetime), ("time", m.time))
    }
    span = (lambda d: [d.days, d.seconds, d.microseconds]), (lambda three: m.timedelta(*three))
    return found | {"timedelta": (m.timedelta, *span)}
