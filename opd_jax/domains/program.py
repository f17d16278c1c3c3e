"""Programs: `0>4;2>10;5>19:` -> `3*4+`, or worked, `0*3=0;0+4=4=3*4+`.

The prompt shows inputs and outputs of a function of one integer. The completion is a program of a
stack language that computes it: the input is pushed, then every character is one instruction, and
one value must be left. Any program that is right on the shown and the hidden inputs counts.

    0-9  push the digit     d  duplicate the top     + - *  replace the two on top, a then b,
    s    swap the two on top                                by a + b, a - b, a * b

The level is the number of arithmetic instructions, counted over chains of the steps in _STEPS, and
no other function of that level or below fits the shown examples. A problem is its set of shown
examples: a function may occur in several splits, as a number may in sums, but never with the same
examples.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator

from opd_jax.domains.answers import Domain, Draft, Verifier, final_answer

# Limits of the interpreter. There are no loops, so a program's length bounds its running time.
MAX_STEPS = 64
MAX_STACK = 16
MAX_INTEGER = 10**6

_INPUTS = range(10)
_MAX_OUTPUT = 99
_SHOWN = {1: 2, 2: 3, 3: 3}  # Examples in the prompt, by level.
_MAX_WORKED = 31
_COMBINATIONS = 45  # Sets of shown inputs, and functions tried with each: enough, and fast.
_PER_COMBINATION = 200
_DIGITS = "0123456789"
# Steps that solutions are chains of -> the coefficients (q, m, c) of q x² + m x + c.
_STEPS = {
    **{f"{k}+": (0, 1, k) for k in range(1, 10)},
    **{f"{k}-": (0, 1, -k) for k in range(1, 10)},
    **{f"{k}*": (0, k, 0) for k in range(2, 10)},
    **{f"{k}s-": (0, -1, k) for k in range(1, 10)},
    "d*": (1, 0, 0),
}


def run(program: str, value: int) -> int | None:
    """The one value that `program` leaves for an input; None if it breaks a rule or a limit."""
    trace = _execute(program, value)
    return trace[-1][-1] if trace is not None else None


def generate(level: int) -> Iterator[Draft]:
    """Drafts of one level in a fixed pseudo-random order."""
    rng = random.Random(f"program {level}")
    tables = _functions(level)
    easier = [outputs for table in tables for outputs in table]
    combinations = list(itertools.combinations(_INPUTS, _SHOWN[level]))
    rng.shuffle(combinations)
    drafts = []
    for shown in combinations[:_COMBINATIONS]:
        explanations = Counter(tuple(outputs[x] for x in shown) for outputs in easier)
        functions = list(tables[-1].items())
        for outputs, program in rng.sample(functions, min(_PER_COMBINATION, len(functions))):
            if explanations[tuple(outputs[x] for x in shown)] == 1:
                drafts.append((shown, outputs, program))
    rng.shuffle(drafts)
    for shown, outputs, program in drafts:
        orders = list(itertools.permutations(shown))
        for order in orders if level == 1 else (rng.choice(orders),):
            draft = _draft(order, outputs, program)
            if len(draft.worked) <= _MAX_WORKED:
                yield draft


def _functions(level: int) -> list[dict[tuple[int, ...], str]]:
    """Per level up to this one: outputs on _INPUTS -> a shortest program for them."""
    tables: list[dict[tuple[int, ...], str]] = [{tuple(_INPUTS): ""}]
    for _ in range(level):
        longer: dict[tuple[int, ...], str] = {}
        for outputs, program in tables[-1].items():
            for step, (q, m, c) in _STEPS.items():
                new = tuple([(q * x + m) * x + c for x in outputs])
                if max(map(abs, new)) <= _MAX_OUTPUT and not any(new in t for t in tables):
                    longer.setdefault(new, program + step)
        tables.append(longer)
    return tables


def _draft(shown: tuple[int, ...], outputs: tuple[int, ...], program: str) -> Draft:
    examples = [[x, outputs[x]] for x in shown]
    answer = {"shown": examples, "hidden": [[x, outputs[x]] for x in _INPUTS if x not in shown]}
    trace = _execute(program, shown[0])
    assert trace is not None
    steps = ";".join(f"{a}{op}{b}={c}" for a, op, b, c in trace[1:])
    return Draft(
        key=" ".join(f"{x}>{y}" for x, y in sorted(examples)),
        prompt=";".join(f"{x}>{y}" for x, y in examples) + ":",
        answer=json.dumps(answer, separators=(",", ":")),
        terse=program,
        worked=f"{steps}={program}",
    )


def _execute(program: str, value: int) -> list[tuple[int, str, int, int]] | None:
    """(a, op, b, result) of every arithmetic instruction; first an entry that holds the input."""
    if len(program) > MAX_STEPS:
        return None
    stack, trace = [value], [(value, "", 0, value)]
    for op in program:
        if op in _DIGITS:
            stack.append(int(op))
        elif op == "d":
            stack.append(stack[-1])
        elif len(stack) < 2:
            return None
        elif op == "s":
            stack[-2:] = stack[:-3:-1]
        elif op in "+-*":
            b, a = stack.pop(), stack.pop()
            result = a + b if op == "+" else a - b if op == "-" else a * b
            trace.append((a, op, b, result))
            stack.append(result)
        else:
            return None
        if len(stack) > MAX_STACK or abs(stack[-1]) > MAX_INTEGER:
            return None
    # The trace ends with the last result, which is what is left if exactly one value is.
    return trace if len(stack) == 1 else None


def _verify(answer: str, completion: str) -> bool:
    program = final_answer(completion)
    tests = json.loads(answer)
    return all(run(program, x) == y for x, y in tests["shown"] + tests["hidden"])


def _check(answer: str) -> None:
    try:
        tests = json.loads(answer)
    except ValueError:
        tests = None
    if not isinstance(tests, dict) or set(tests) != {"shown", "hidden"} or not _tests(tests):
        raise ValueError(
            f"program answer {answer!r} must be "
            '{"shown": [[input, output], ...], "hidden": [[input, output], ...]}, all integers'
        )


def _tests(tests: dict) -> bool:
    """Whether both values are lists of pairs of integers, with one pair at least."""
    if not all(isinstance(pairs, list) for pairs in tests.values()):
        return False
    pairs = [*tests["shown"], *tests["hidden"]]
    integers = [isinstance(p, list) and [type(x) for x in p] == [int, int] for p in pairs]
    return bool(pairs) and all(integers)


DOMAIN = Domain(generate, Verifier(_verify, _check), version="1.1.0")
