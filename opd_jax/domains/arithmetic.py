"""Arithmetic: `47-38=` -> `9`, or worked, `47-30=17;17-8=9`.

Level 1: one-digit + and -.  Level 2: two-digit + and -.  Level 3: three two-digit operands, or a
two-digit number times a one-digit one. Results may be negative. One problem, one key, whatever the
order of commuting operands: if 47+38 is held out, so is 38+47.
"""

import random
from collections.abc import Iterator

from opd_jax.domains.answers import INTEGER, Domain, Draft


def generate(level: int) -> Iterator[Draft]:
    """Drafts of one level in a fixed pseudo-random order."""
    rng = random.Random(f"arithmetic {level}")
    drafts = {1: _one_digit, 2: _two_digit, 3: lambda: _two_steps(rng)}[level]()
    rng.shuffle(drafts)
    yield from drafts


def _one_digit() -> list[Draft]:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return [_chain(a, (b,), worked=_step(a, b)) for a, b in pairs] + [
        _chain(a, (-b,), worked=_step(a, -b)) for a, b in pairs if b
    ]


def _two_digit() -> list[Draft]:
    numbers = range(10, 100)
    return [
        _chain(a, (sign * b,), worked=_by_place(a, sign * b))
        for a in numbers
        for b in numbers
        for sign in (1, -1)
    ]


def _two_steps(rng: random.Random) -> list[Draft]:
    products = [_product(a, b) for a in range(10, 100) for b in range(2, 10)]
    sums = []
    for _ in range(3600):
        a, b, c = (rng.randint(10, 99) for _ in range(3))
        b, c = rng.choice((b, -b)), rng.choice((c, -c))
        sums.append(_chain(a, (b, c), worked=f"{_step(a, b)};{_step(a + b, c)}"))
    return products + sums


def _chain(first: int, others: tuple[int, ...], worked: str) -> Draft:
    """`first` plus signed `others`."""
    key = " ".join(f"{term:+d}" for term in sorted((first, *others)))
    prompt = f"{first}" + "".join(f"{term:+d}" for term in others) + "="
    answer = str(first + sum(others))
    return Draft(key, prompt, answer, answer, worked)


def _product(a: int, b: int) -> Draft:
    tens, ones = a - a % 10, a % 10
    worked = f"{tens}*{b}={tens * b};{ones}*{b}={ones * b};{_step(tens * b, ones * b)}"
    return Draft(f"{a}*{b}", f"{a}*{b}=", str(a * b), str(a * b), worked)


def _step(a: int, b: int) -> str:
    return f"{a}{b:+d}={a + b}"


def _by_place(a: int, b: int) -> str:
    """First the tens of b, then its ones: 47-38 -> 47-30=17;17-8=9."""
    ones = abs(b) % 10
    tens = abs(b) - ones
    sign = 1 if b > 0 else -1
    middle = a + sign * tens
    last = f"{middle}{'+' if b > 0 else '-'}{ones}={a + b}"
    return f"{_step(a, sign * tens)};{last}"


DOMAIN = Domain(generate, INTEGER, version="1.1.0")
