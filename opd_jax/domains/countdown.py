"""Countdown: `5 2 3=17:` -> `5*3+2`, or worked, `5*3=15;15+2=17=5*3+2`.

Reach the target with +, - and * and parentheses, every given number used at most once. Any
expression that does counts. The level is the count of numbers less one, and the target needs all of
them. A problem is its set of numbers and its target, whatever the order of the numbers.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from opd_jax.domains.answers import Domain, Draft, Verifier, final_answer

# Limits of the expression parser: neither text nor nesting can make it slow or deep.
MAX_LENGTH = 64
MAX_DIGITS = 6

_LARGEST = {1: 30, 2: 18, 3: 9}  # Largest number, by level.
_MAX_VALUE = 99  # Of the target and of every step of a reference solution.
_MAX_TERSE = 9
_MAX_WORKED = 31
_SPACED = re.compile(r" *([-+*()]) *")  # Spaces may surround signs, not split a number.


class _Solution(NamedTuple):
    text: str
    product: bool  # Needs no parentheses as a factor.
    steps: tuple[str, ...]


def generate(level: int) -> Iterator[Draft]:
    """Drafts of one level in a fixed pseudo-random order."""
    rng = random.Random(f"countdown {level}")
    sets = list(itertools.combinations_with_replacement(range(1, _LARGEST[level] + 1), level + 1))
    rng.shuffle(sets)
    pool = []
    # Sets of four numbers have some twenty targets each: half of the sets are plenty.
    for numbers in sets[: 250 if level == 3 else None]:
        pool += [(numbers, t, s) for t, s in _solutions(numbers).items()]
    rng.shuffle(pool)
    for numbers, target, solution in pool:
        orders = sorted(set(itertools.permutations(numbers)))
        for order in orders if level == 1 else (rng.choice(orders),):
            yield _draft(order, target, solution)


def evaluate(expression: str) -> tuple[int, list[int]] | None:
    """Value of an expression of integers, + - * and parentheses, and the numbers it uses.

    Returns:
      None for any other text, or one over the limits. There is no unary minus.
    """
    if len(expression) > MAX_LENGTH:
        return None
    text = _SPACED.sub(r"\1", expression.strip())
    try:
        value, used, end = _sum(text, 0)
    except _SyntaxError:
        return None
    return (value, used) if end == len(text) else None


def _draft(numbers: tuple[int, ...], target: int, solution: _Solution) -> Draft:
    return Draft(
        key=" ".join(map(str, sorted(numbers))) + f"={target}",
        prompt=" ".join(map(str, numbers)) + f"={target}:",
        answer=json.dumps({"numbers": numbers, "target": target}, separators=(",", ":")),
        terse=solution.text,
        worked=_worked(solution),
    )


def _worked(solution: _Solution) -> str:
    return ";".join(solution.steps) + f"={solution.text}"


def _solutions(numbers: tuple[int, ...]) -> dict[int, _Solution]:
    """Targets that need all of these numbers -> the shortest solution."""
    # Subsets as bit masks, small ones first, so that both halves of a subset are done before it.
    every = (1 << len(numbers)) - 1
    best: dict[int, dict[int, _Solution]] = {
        1 << i: {n: _Solution(str(n), True, ())} for i, n in enumerate(numbers)
    }
    for subset in range(1, every + 1):
        if subset not in best:
            best[subset] = _combine(subset, best)
    reachable = {value for subset in range(1, every) for value in best[subset]}
    return {
        target: s
        for target, s in best[every].items()
        if target not in reachable and len(s.text) <= _MAX_TERSE and len(_worked(s)) <= _MAX_WORKED
    }


def _combine(subset: int, best: dict[int, dict[int, _Solution]]) -> dict[int, _Solution]:
    """All values of a subset: every split in two, every operation. Values stay in 1.._MAX_VALUE."""
    found: dict[int, _Solution] = {}
    left = (subset - 1) & subset
    while left:
        for (a, s), (b, t) in itertools.product(best[left].items(), best[subset ^ left].items()):
            for op, value in (("+", a + b), ("-", a - b), ("*", a * b)):
                if not 1 <= value <= _MAX_VALUE:
                    continue
                text = _join(s, op, t)
                if value not in found or (len(text), text) < (
                    len(found[value].text),
                    found[value].text,
                ):
                    steps = (*s.steps, *t.steps, f"{a}{op}{b}={value}")
                    found[value] = _Solution(text, op == "*", steps)
        left = (left - 1) & subset
    return found


def _join(s: _Solution, op: str, t: _Solution) -> str:
    left = s.text if s.product or op != "*" else f"({s.text})"
    right = t.text if t.product or op == "+" else f"({t.text})"
    return f"{left}{op}{right}"


class _SyntaxError(Exception):
    """The text is no expression; never leaves this module."""


def _sum(text: str, at: int) -> tuple[int, list[int], int]:
    """Parses product (("+" | "-") product)* from `at`: (value, numbers used, where it ended)."""
    value, used, at = _product(text, at)
    while at < len(text) and text[at] in "+-":
        other, more, end = _product(text, at + 1)
        value = value + other if text[at] == "+" else value - other
        used, at = used + more, end
    return value, used, at


def _product(text: str, at: int) -> tuple[int, list[int], int]:
    """Parses atom ("*" atom)*."""
    value, used, at = _atom(text, at)
    while at < len(text) and text[at] == "*":
        other, more, at = _atom(text, at + 1)
        value, used = value * other, used + more
    return value, used, at


def _atom(text: str, at: int) -> tuple[int, list[int], int]:
    """Parses a number or a parenthesised sum."""
    if text.startswith("(", at):
        value, used, end = _sum(text, at + 1)
        if not text.startswith(")", end):
            raise _SyntaxError
        return value, used, end + 1
    end = at
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if not 0 < end - at <= MAX_DIGITS:
        raise _SyntaxError
    return int(text[at:end]), [int(text[at:end])], end


def _verify(answer: str, completion: str) -> bool:
    problem = json.loads(answer)
    result = evaluate(final_answer(completion))
    if result is None:
        return False
    value, used = result
    return value == problem["target"] and not Counter(used) - Counter(problem["numbers"])


def _check(answer: str) -> None:
    try:
        problem = json.loads(answer)
    except ValueError:
        problem = None
    if (
        not isinstance(problem, dict)
        or set(problem) != {"numbers", "target"}
        or not (
            isinstance(problem["numbers"], list)
            and problem["numbers"]
            and all(type(n) is int for n in [*problem["numbers"], problem["target"]])
        )
    ):
        raise ValueError(
            f'countdown answer {answer!r} must be {{"numbers": [integers], "target": integer}}'
        )


DOMAIN = Domain(generate, Verifier(_verify, _check), version="1.1.0")
