"""Numbers in answers: how they are written, what unit they have, when two are the same.

One half of math_answers, whose docstring has the rules: numbers are equal as fractions, percent
signs and units count where both sides have one.
"""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

_MOST_DIGITS, _MOST_EXPONENT = 400, 400

# Between the elements of a list.
AND = re.compile(r"\s*,?\s+(?:and|or)\s+|\s*[,;]\s*")

_THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9])"
_PLAIN = rf"(?:{_THOUSANDS}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_INNER = r"\s*([-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))\s*"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?P<currency>[$€£]?)\s*(?P<minus>-?)\s*
    (?: (?P<whole>[0-9]+)?\s*\\frac\s*(?:\{{{_INNER}\}}|([0-9]))\s*(?:\{{{_INNER}\}}|([0-9]))
      | (?P<mixed>[0-9]+\s+)?(?P<top>[0-9]+)\s*/\s*(?P<bottom>[0-9]+)
      | (?P<base>[0-9]+)\s*\^\s*
        (?:\{{\s*(?P<power>-?[0-9]{{1,3}})\s*\}}|(?P<digit>-?[0-9]{{1,3}}(?![0-9])))
      | (?P<plain>{_PLAIN})
        (?: [eE](?P<e>[-+]?[0-9]{{1,3}})(?![0-9])
          | \s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*
            (?:\{{\s*(?P<ten>[-+]?[0-9]{{1,3}})\s*\}}|(?P<one>-?[0-9]{{1,3}}(?![0-9])))
        )?
    )(?P<rest>.*)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_MULTIPLIERS = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12,
}  # fmt: skip
_PERCENT = ("%", "percent", "per cent")
# What a word after a number means; other words of three letters and more name themselves.
_UNITS = {
    name: unit
    for unit, names in {
        "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
        "km": "kilometer kilometre", "in": "inch inche", "ft": "foot feet", "yd": "yard",
        "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound lbs",
        "oz": "ounce", "s": "second sec", "min": "minute", "h": "hour hr", "l": "liter litre",
        "ml": "milliliter millilitre", "mi/h": "mph", "degree": "deg", "rad": "radian",
        "$": "dollar", "cent": "", "": "unit",
    }.items()
    for name in (unit, *names.split())
}  # fmt: skip
# Words after a number that make another number of it, or are the names of functions.
FUNCTIONS = frozenset(
    """pi squared cubed plus minus times over sqrt root factorial half halves third thirds quarter
    quarters fourth fourths fifth fifths infinity mod choose sin cos tan log ln exp and or to of
    not is divided""".split()  # noqa: SIM905
)


class Number(NamedTuple):
    value: Fraction
    percent: bool
    unit: str


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Number | None:
    """A number with its unit; None if the text is anything more or else."""
    while text.startswith("(") and text.endswith(")") and split(text[1:-1]) == [text[1:-1]]:
        text = text[1:-1].strip()
    found = _NUMBER.fullmatch(text) if len(text) <= _MOST_DIGITS else None
    if found is None:
        return None
    suffix = _suffix(found["rest"], found["currency"])
    value = _value(found)
    if suffix is None or value is None:
        return None
    multiplier, percent, unit = suffix
    negative = (found["sign"] == "-") != (found["minus"] == "-")
    return Number((-value if negative else value) * multiplier, percent, unit)


def _value(m: re.Match[str]) -> Fraction | None:
    try:
        if m["plain"] is not None:
            digits = Fraction(re.sub("[, ]", "", m["plain"]).rstrip(".") or "0")
            exponent = int(m["e"] or m["ten"] or m["one"] or 0)
            return _power(Fraction(10), exponent, digits)
        if m["base"] is not None:
            return _power(Fraction(m["base"]), int(m["power"] or m["digit"]), Fraction(1))
        if m["bottom"] is not None:
            return Fraction(m["mixed"] or 0) + Fraction(int(m["top"]), int(m["bottom"]))
        # The groups of \frac have no names: they are the ones right after `whole`.
        start = _NUMBER.groupindex["whole"]
        top, bottom = (m[start + i] or m[start + i + 1] for i in (1, 3))
        fraction = Fraction(top) / Fraction(bottom)
        if m["whole"] is not None and fraction < 0:
            return None
        return Fraction(m["whole"] or 0) + fraction
    except (ZeroDivisionError, ValueError):
        return None


def _power(base: Fraction, exponent: int, factor: Fraction) -> Fraction | None:
    if abs(exponent) > _MOST_EXPONENT or base > 10**6:
        return None
    return factor * base**exponent


def _suffix(rest: str, currency: str) -> tuple[int, bool, str] | None:
    """(multiplier, whether percent, unit) of what follows a number; None if it is no unit."""
    spaced = rest.startswith(" ")
    rest = rest.strip().lower()
    multiplier = 1
    first, _, after = rest.partition(" ")
    if first in _MULTIPLIERS:
        multiplier, rest = _MULTIPLIERS[first], after.strip()
    if rest in _PERCENT:
        return multiplier, True, ""
    unit = _unit(rest, spaced)
    if unit is None:
        return None
    return multiplier, False, unit or {"": "", "$": "$"}.get(currency, currency)


def _unit(text: str, spaced: bool) -> str | None:
    """A unit in one spelling; "" for none; None if the text cannot be one."""
    text = text.replace(r"^\circ", " degree ").replace("^{", "^").replace("}", "")
    text = re.sub(r"\bper\b", "/", text)
    factors = []
    for part in text.split("/"):
        words = re.findall(r"[a-z$€£]+|\^[23]|\S", part)
        power = ""
        kept = []
        for word in words:
            if word in ("square", "squared", "sq", "^2"):
                power = "^2"
            elif word in ("cubic", "cubed", "cu", "^3"):
                power = "^3"
            elif not _may_be_unit(word, spaced):
                return None
            else:
                kept.append(_singular(word))
        if len(kept) > 4 or (power and not kept):
            return None
        factors.append(" ".join(kept) + (power if "".join(kept) else ""))
    return "/".join(factors)


def _may_be_unit(word: str, spaced: bool) -> bool:
    if word in FUNCTIONS or not re.fullmatch(r"[a-z]+|[$€£]", word):
        return False
    known = word in _UNITS or _singular(word) in _UNITS.values()
    return (known and (spaced or len(word) > 1)) or len(word) >= 3


def _singular(word: str) -> str:
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in _UNITS:
            return _UNITS[form]
    return word.removesuffix("s")


def same(gold: Number, answer: Number) -> bool:
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.percent == answer.percent:
        return gold.value == answer.value
    if gold.percent:
        return answer.value in (gold.value, gold.value / 100)
    # 28% is 0.28; and where 28 is the answer to "what percentage", so is 28%.
    return answer.value == gold.value * 100 or (answer.value == gold.value and gold.value > 1)


def split(text: str, separator: re.Pattern[str] = AND) -> list[str]:
    """The parts of a text between separators that stand outside of all brackets."""
    depth, start, parts = 0, 0, []
    tokens = re.compile(rf"(?P<cut>{separator.pattern})|\\[{{}}]|\\.|[{{}}()\[\]]")
    for token in tokens.finditer(text):
        if token["cut"] is not None:
            if depth == 0:
                parts.append(text[start : token.start()].strip())
                start = token.end()
        elif token[0] in ("{", "(", "[", r"\{"):
            depth += 1
        elif token[0] in ("}", ")", "]", r"\}"):
            depth -= 1
    return [*parts, text[start:].strip()]
