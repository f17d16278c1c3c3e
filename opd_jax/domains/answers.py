"""What all domains share: drafts of problems, verifiers, and where a completion's answer stands."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")

# Commas part thousands only where every group has three digits: "1,430" is one number, "1,2" two.
# A minus behind a word or a bracket is a subtraction or a hyphen. The exponent is short, so that
# no text can ask for a number that fills the memory.
_NUMBER = re.compile(
    r"""(?P<sign> (?<![\w)\]}]) [-\u2212])?  (?:\\?[$€£¥])?  (?P<minus> (?<=[$€£¥]) [-\u2212])?
    (?P<digits> (?: (?<![0-9],) [0-9]{1,3} (?: (?:,|\{,\}) [0-9]{3} )+ (?![0-9]) | [0-9]+ )
        (?: \.[0-9]+ )? | (?<![\w.]) \.[0-9]+ )
    (?P<rest> [eE][-+]?[0-9]{1,3} (?![0-9]) | /[0-9]+ )?""",
    re.VERBOSE | re.ASCII,
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")


class Draft(NamedTuple):
    """A problem before it has a split and an id.

    `key` says what the problem is, however it is written: drafts with equal keys are one problem in
    several wordings and always land in the same split.
    """

    key: str
    prompt: str
    answer: str
    terse: str
    worked: str


class Verifier(NamedTuple):
    """`verify(answer, completion)` marks any text and never raises, once `check(answer)` passed.

    `check` raises ValueError if `answer` is nothing that `verify` can mark against, so that a
    broken gold answer is found when problems are loaded and can never pay a reward.

    A verifier that may be slow, or that runs what a model wrote, is `isolated`: training calls it
    in worker processes with hard limits (see rewards.py), where it may raise: TimeoutError if the
    completion used up a limit, which is worth 0; anything else makes the row invalid.
    """

    verify: Callable[[str, str], bool]
    check: Callable[[str], None]
    isolated: bool = False
    seconds: float = 0.0  # CPU seconds that `verify` itself allows to what it starts.
    prepare: Callable[[], None] = lambda: None  # Once per worker: imports what `verify` needs.


@dataclasses.dataclass(frozen=True)
class VerifierSettings:
    """Limits and rules of the isolated verifiers; training and held-out metric share them."""

    # Where a mathematical answer stands, tried in order; see math_answers.EXTRACTORS.
    math_extract: tuple[str, ...] = ("boxed", "hashes", "answer_is")
    seconds: float = 5.0  # CPU seconds of a verifier's own work on one completion.
    memory_mb: int = 1024  # The same for memory.
    code_seconds: float = 10.0  # CPU seconds of a model's program, over all tests of one problem.
    code_memory_mb: int = 1024
    code_output_kb: int = 1024  # Of one test.

    def __post_init__(self):
        for name in ("seconds", "memory_mb", "code_seconds", "code_memory_mb", "code_output_kb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"verifiers.{name}={getattr(self, name)}: must be above 0")


class Domain(NamedTuple):
    """A procedural domain: `generate(level)` yields Drafts, the same ones every time.

    Raise `version` whenever `generate` changes: data built by an older version is then not reused.
    """

    generate: Callable[[int], Iterable[Draft]]
    verifier: Verifier
    version: str


def final_answer(completion: str) -> str:
    """What stands after the last "=" (the whole text if there is none), without outer spaces."""
    return completion.rpartition("=")[2].strip()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} whose braces balance; None if there is none."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at]
    return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the likeliest intended name, and all there are."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(known)}"


def _verify_integer(answer: str, completion: str) -> bool:
    # `answer` is in the one accepted spelling, so equality is the whole test: "042" and "42." fail.
    return final_answer(completion) == answer


def _check_integer(answer: str) -> None:
    if not _INTEGER.fullmatch(answer):
        raise ValueError(f"answer {answer!r} is not an integer written like 0, 42 or -7")


def _verify_exact(answer: str, completion: str) -> bool:
    # The whole completion counts too, so that an answer may itself contain "=".
    return answer.strip() in (completion.strip(), final_answer(completion))


def _check_exact(answer: str) -> None:
    if not answer.strip():
        raise ValueError("answer is empty: an empty completion would be right")


def _number(match: re.Match[str]) -> Fraction | None:
    """The exact value of what _NUMBER found; None for a division by 0 or thousands of digits."""
    sign = "-" if match["sign"] or match["minus"] else ""
    digits = match["digits"].replace("{,}", "").replace(",", "")
    try:
        return Fraction(sign + digits) * Fraction(f"1{match['rest'] or ''}")
    except (ValueError, ZeroDivisionError):
        return None


def _verify_number(answer: str, completion: str) -> bool:
    # Since the last number counts, "#### 42" and "\\boxed{42}" need no rule of their own.
    found = list(_NUMBER.finditer(_LATEX_FRACTION.sub(r"\1/\2", completion)))
    return bool(found) and _number(found[-1]) == _number(_NUMBER.fullmatch(answer.strip()))


def _check_number(answer: str) -> None:
    match = _NUMBER.fullmatch(answer.strip())
    if match is None or _number(match) is None:
        raise ValueError(f"answer {answer!r} is not a number written like 42, -3.5, 1,430 or 1/2")


INTEGER = Verifier(_verify_integer, _check_integer)
EXACT = Verifier(_verify_exact, _check_exact)
NUMBER = Verifier(_verify_number, _check_number)
