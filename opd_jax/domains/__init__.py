r"""Domains: families of problems with levels of difficulty and a verifier.

To add a procedural domain, write a module beside `arithmetic.py` and name it in DOMAINS below:

    def generate(level):                     # Levels 1, 2, 3; the same drafts every time.
        for word in WORDS[level]:
            prompt, answer = f"reverse {word}:", word[::-1]
            worked = " ".join(answer) + f"={answer}"   # The answer stands after the last "=".
            yield Draft(key=word, prompt=prompt, answer=answer, terse=answer, worked=worked)

    DOMAIN = Domain(generate, EXACT, version="1.1.0")

Split, ids, storage and most tests follow from the table; `tools/train_tokenizer.py` takes new
characters into the miniature's vocabulary. For another kind of marking than EXACT, INTEGER or
NUMBER, give a Verifier of your own: `verify(answer, completion)` must be fast and must not raise,
whatever the text; one that cannot promise that sets `isolated` (see answers.py). To use a file of
your own problems no code is needed: name the domain "jsonl:PATH" (see `jsonl.py`).
"""

import functools
from collections.abc import Sequence
from typing import overload

from opd_jax.data.problem import SPLITS, Problem
from opd_jax.domains import (
    arithmetic,
    builder,
    countdown,
    jsonl,
    logic,
    math_answers,
    program,
    sandbox,
)
from opd_jax.domains.answers import (
    EXACT,
    INTEGER,
    NUMBER,
    Domain,
    Verifier,
    VerifierSettings,
    did_you_mean,
)

DOMAINS: dict[str, Domain] = {
    "arithmetic": arithmetic.DOMAIN,
    "program": program.DOMAIN,
    "countdown": countdown.DOMAIN,
    "logic": logic.DOMAIN,
}


def verifiers(settings: VerifierSettings, allow_unsandboxed: bool = False) -> dict[str, Verifier]:
    """All verifiers by name, with the given limits: what a problem can name as its own.

    Args:
      settings: of the isolated ones.
      allow_unsandboxed: run programs also where the host offers no isolation.
    """
    limits = sandbox.Limits(settings.code_seconds, settings.code_memory_mb, settings.code_output_kb)
    run = functools.partial(sandbox.verify, limits=limits, allow_unsandboxed=allow_unsandboxed)
    mark = functools.partial(math_answers.verify, order=settings.math_extract)
    return {
        "exact": EXACT,
        "integer": INTEGER,
        "number": NUMBER,
        "math": Verifier(mark, math_answers.check, isolated=True, prepare=math_answers.prepare),
        "python": Verifier(run, sandbox.check, isolated=True, seconds=settings.code_seconds),
        **{name: domain.verifier for name, domain in DOMAINS.items()},
    }


# With the usual limits: what loading checks answers and solutions with.
VERIFIERS = verifiers(VerifierSettings())

_JSONL = "jsonl:"


class Problems(Sequence[Problem]):
    """Problems by position: one split and some levels of one domain, in order of id."""

    def __init__(self, problems: Sequence[Problem]):
        self._problems = tuple(problems)

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> "Problems": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return Problems(self._problems[index])
        return self._problems[index]


def load(spec: str, split: str, levels: Sequence[int], data_dir: str) -> Problems:
    """The problems of one split of a domain.

    Args:
      spec: a name in DOMAINS, or "jsonl:PATH". It is also the `domain` of the problems.
      split: "train", "validation" or "test". No problem is in two of them.
      levels: the levels wanted.
      data_dir: where procedural domains are stored; built there on first use, in seconds.

    Raises:
      ValueError: unknown domain, split or level, a bad file, or no problem is left.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; one of {', '.join(SPLITS)}")
    if spec.startswith(_JSONL):
        splits = jsonl.load(spec, spec.removeprefix(_JSONL), VERIFIERS)
        problems = splits[split]
        known = sorted({p.level for part in splits.values() for p in part})
    elif spec in DOMAINS:
        problems = builder.load(spec, DOMAINS[spec], data_dir, split)
        known = list(builder.LEVELS)
    else:
        raise ValueError(f"unknown domain {spec!r}; {did_you_mean(spec, DOMAINS)}, jsonl:PATH")
    unknown = [level for level in levels if level not in known]
    if unknown:
        raise ValueError(f"domain {spec!r} has no level {unknown}; its levels: {known}")
    kept = [p for p in problems if p.level in levels]
    if not kept:
        raise ValueError(f"domain {spec!r} has no {split} problem of levels {list(levels)}")
    return Problems(kept)


def verify(problem: Problem, completion: str) -> bool:
    """Whether a completion solves the problem, marked in this process.

    Never raises, whatever the text, and is fast, unless the verifier is isolated: for those, and
    for whole batches, use rewards.Pool.
    """
    return verifier_of(problem).verify(problem.answer, completion)


def verifier_name(problem: Problem) -> str:
    """The name of a problem's verifier in VERIFIERS."""
    return problem.domain if problem.verifier is None else problem.verifier


def verifier_of(problem: Problem) -> Verifier:
    """A problem's verifier, with the usual limits."""
    return VERIFIERS[verifier_name(problem)]


def is_isolated(problem: Problem) -> bool:
    """Whether a problem's completions are marked in worker processes (see rewards.Pool)."""
    return verifier_of(problem).isolated
