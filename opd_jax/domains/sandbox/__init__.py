r"""Runs Python that a model wrote against tests, and judges it from outside.

**The answer** of a problem is one JSON object; unknown keys are errors. All kinds have

    "kind":    "functions" | "stdio" | "asserts"
    "prefix":  optional source put before the program, e.g. HumanEval's prompt
    "tests":   at least one

1. functions: a call and what it must return, both plain JSON.

       {"kind": "functions", "entry_point": "add",
        "tests": [{"args": [1, 2], "expected": 3}, {"kwargs": {"a": 1, "b": 0.2}, "expected": 1.2}]}

   `entry_point` may be "Solution.add": each call is of a new Solution(). A tuple equals a list, all
   else is Python's ==; where `expected` is a float, "tolerance" (optional, 1e-6) applies.

2. stdio: the program runs once per test as `__main__`.

       {"kind": "stdio", "tests": [{"input": "3 4\n", "output": "7\n"}]}

   \r\n, spaces at the ends of lines and empty lines at the end do not count; "tolerance" applies to
   words of `output` that are written as a float.

3. asserts: Python source, one string or a list run in order (MBPP); "setup" (optional) runs first.

       {"kind": "asserts", "tests": ["assert add(1, 2) == 3"]}
       {"kind": "asserts", "entry_point": "add", "prefix": PROMPT,
        "tests": "def check(candidate): ..."}

   With `entry_point` the tests define check(candidate), which is called with it (HumanEval).
   Otherwise every name that the tests read and do not define is the program's.

**The program** is the last closed ``` fence of the completion, or all of it if there is none. It
sees the standard library alone, one process, no network, its own empty folder.

**The verdict** is made where the program cannot reach. Its process holds the program and the
arguments of one call at a time; what it returns travels as plain data (see plain.py) and is
compared here, or by test code in a process of its own, shut in as well. The expected values, the
tests and the exit code never meet: a program that exits, prints a verdict, patches `assert`, or
looks through its stack finds nothing to win. Arguments are copies: a test cannot see that the
program changed them, and objects that are not plain data can only be handed back to the program.

What is protected, and from what not, stands in isolation.py.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from opd_jax.domains.sandbox import plain, process
from opd_jax.domains.sandbox.process import (
    Budget,
    Isolation,
    Limits,
    OutOfLimits,
    SandboxError,
    environment,
    probe,
    require,
)

__all__ = [
    "Isolation", "Limits", "OutOfLimits", "SandboxError", "check", "environment", "equal", "probe",
    "program", "require", "same_output", "verify",
]  # fmt: skip

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_FLOAT = re.compile(r"[-+]?([0-9]*\.[0-9]+|[0-9]+\.|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,3})?")
_KEYS = {
    "functions": {"kind", "prefix", "tests", "entry_point", "tolerance"},
    "stdio": {"kind", "prefix", "tests", "tolerance"},
    "asserts": {"kind", "prefix", "tests", "entry_point", "setup"},
}


def check(answer: str) -> None:
    """Raises ValueError naming what is wrong unless `answer` is as the module says."""
    spec = _parse(answer)
    kind = spec["kind"]
    for key, kinds in (("prefix", str), ("setup", str), ("entry_point", str),
                       ("tolerance", (int, float))):  # fmt: skip
        if key in spec and (not isinstance(spec[key], kinds) or spec[key] is True):
            raise ValueError(f"python answer: {key}={spec[key]!r} has the wrong type")
    if kind == "functions" and "entry_point" not in spec:
        raise ValueError("python answer: kind 'functions' needs 'entry_point'")
    tests = spec["tests"]
    if kind == "asserts":
        for source in _sources(spec):
            _compile(source)
        return
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"python answer: tests={tests!r} must be a list with at least one test")
    required, optional = (
        ({"expected"}, {"args", "kwargs"}) if kind == "functions" else ({"input", "output"}, set())
    )
    for i, test in enumerate(tests):
        if not isinstance(test, dict) or not required <= set(test) <= required | optional:
            raise ValueError(
                f"python answer: tests[{i}]={test!r} must have {sorted(required)}"
                + (f" and may have {sorted(optional)}" if optional else "")
            )
        _check_types(i, test)


def verify(
    answer: str,
    completion: str,
    limits: Limits | None = None,
    allow_unsandboxed: bool = False,
) -> bool:
    """Whether the program in a completion passes all tests.

    Args:
      answer: see the module.
      completion: any text.
      limits: over all tests together; None: the usual ones.
      allow_unsandboxed: run also where the host offers no isolation.

    Raises:
      OutOfLimits: time or output ran out.
      SandboxError: no isolation, or the host ran out of something itself.
    """
    isolation = process.probe()
    require(isolation, allow_unsandboxed)
    spec = _parse(answer)
    source = spec["prefix"] + program(completion)
    limits = Limits() if limits is None else limits
    budget = Budget(limits, isolation)
    judge = {"functions": _functions, "stdio": _stdio, "asserts": _asserts}[spec["kind"]]
    passed = judge(spec, source, budget)
    if not passed and budget.killed:
        raise OutOfLimits("CPU time" if budget.seconds < limits.seconds / 5 else "memory")
    return passed


def program(completion: str) -> str:
    """The last closed fence of a completion; the whole of it if there is none."""
    fences = _FENCE.findall(completion.replace("\r\n", "\n"))
    return fences[-1] if fences else completion


def equal(expected: Any, got: Any, tolerance: float) -> bool:
    """Python's == on plain data, but a tuple equals a list and floats have a tolerance."""
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(expected) == len(got)
            and all(equal(e, g, tolerance) for e, g in zip(expected, got, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and expected.keys() == got.keys()
            and all(equal(expected[k], got[k], tolerance) for k in expected)
        )
    if isinstance(expected, float):
        if not isinstance(got, (int, float)) or isinstance(got, bool):
            return False
        try:
            return _close(expected, float(got), tolerance)
        except OverflowError:
            return False
    return not isinstance(got, plain.Remote) and bool(expected == got)


def same_output(expected: str, got: str, tolerance: float) -> bool:
    """Whether two outputs are the same but for line ends, trailing blanks and float rounding."""
    lines = [[line.rstrip() for line in text.replace("\r\n", "\n").rstrip().split("\n")]
             for text in (expected, got)]  # fmt: skip
    if len(lines[0]) != len(lines[1]):
        return False
    return all(a == b or _same_words(a, b, tolerance) for a, b in zip(*lines, strict=True))


def _same_words(expected: str, got: str, tolerance: float) -> bool:
    pairs = expected.split(), got.split()
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(a == b or _same_float(a, b, tolerance) for a, b in zip(*pairs, strict=True))


def _same_float(expected: str, got: str, tolerance: float) -> bool:
    if not _FLOAT.fullmatch(expected) or len(got) > 400:
        return False
    try:
        return _close(float(expected), float(got), tolerance)
    except ValueError:
        return False


def _close(a: float, b: float, tolerance: float) -> bool:
    same_nan = math.isnan(a) and math.isnan(b)
    return same_nan or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


# The answer.


def _parse(answer: str) -> dict[str, Any]:
    try:
        spec = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"python answer is not JSON ({error}): {answer[:80]!r}") from error
    if not isinstance(spec, dict) or "kind" not in spec or spec["kind"] not in _KEYS:
        raise ValueError(f"python answer {answer[:80]!r}: 'kind' must be one of {sorted(_KEYS)}")
    unknown = set(spec) - _KEYS[spec["kind"]]
    if unknown or "tests" not in spec:
        raise ValueError(
            f"python answer of kind {spec['kind']!r}: keys {sorted(spec)}; it must have 'tests' "
            f"and may have {sorted(_KEYS[spec['kind']])}"
        )
    return {"prefix": "", "setup": "", "tolerance": 1e-6, **spec}


def _sources(spec: Mapping[str, Any]) -> list[str]:
    tests = spec["tests"]
    sources = [tests] if isinstance(tests, str) else tests
    good = isinstance(sources, list) and sources and all(isinstance(s, str) for s in sources)
    if not good or not any(s.strip() for s in sources):
        raise ValueError("python answer: tests of kind 'asserts' must be source or a list of it")
    return [spec["setup"], *sources]


def _compile(source: str) -> None:
    try:
        compile(source, "tests", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"python answer: test source {source[:80]!r}: {error}") from error


def _check_types(i: int, test: Mapping[str, Any]) -> None:
    for key, kind in (("args", list), ("kwargs", dict), ("input", str), ("output", str)):
        if key in test and not isinstance(test[key], kind):
            raise ValueError(f"python answer: tests[{i}].{key} must be a {kind.__name__}")


# The three kinds of test.


def _functions(spec, source: str, budget: Budget) -> bool:
    with budget.start("functions", source=source) as run:
        for test in spec["tests"]:
            given = {"args": [], "kwargs": {}, **test}
            call = {key: plain.encode(given[key], _no_object) for key in ("args", "kwargs")}
            call |= {"name": spec["entry_point"], "read": False}
            line = run.ask(json.dumps(call).encode() + b"\n")
            try:
                answer = plain.loads(line)
                got = plain.decode(answer["value"], plain.Remote)
                right = equal(test["expected"], got, spec["tolerance"])
            except (ValueError, TypeError, KeyError, RecursionError):
                return False
            if not right:
                return False
    return True


def _stdio(spec, source: str, budget: Budget) -> bool:
    for test in spec["tests"]:
        with budget.start("script", source=source) as run:
            output = run.finish(test["input"].encode("utf-8", "surrogatepass"))
        if not same_output(test["output"], output.decode("utf-8", "replace"), spec["tolerance"]):
            return False
    return True


def _asserts(spec, source: str, budget: Budget) -> bool:
    setup, *tests = _sources(spec)
    extra = {"setup": setup, "tests": tests, "entry_point": spec.get("entry_point", "")}
    with (
        budget.start("functions", source=source) as run,
        budget.start("tests", site_packages=True, **extra) as judge,
    ):
        while line := judge.read_line():
            message = json.loads(line)  # Of our own process, which only saw plain data.
            if "passed" in message:
                return message["passed"]
            judge.write(run.ask(json.dumps(message["call"]).encode() + b"\n") or b"null\n")
    return False


def _no_object(value: Any) -> int:
    raise ValueError(f"{value!r} is not plain data")
