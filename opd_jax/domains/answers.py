"""What all domains share: drafts of problems, verifiers, and where a completion's answer stands."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


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
    """

    verify: Callable[[str, str], bool]
    check: Callable[[str], None]


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


INTEGER = Verifier(_verify_integer, _check_integer)
EXACT = Verifier(_verify_exact, _check_exact)
