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
whatever the text; one that cannot promise that sets `isolated` (see answers.py). Other sources need
no code:

    "jsonl:PATH"            a file of your own problems (see `jsonl.py`)
    "gsm8k", "math", ...    a published set in local files, at the domain's `path` (see `sets.py`)
    "reasoning:TASK"        any task of reasoning-gym (see `reasoning.py`)
    "mathematics:MODULE"    DeepMind's generators, or their files at `path` (see `mathematics.py`)
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, overload

from etils import epath

from opd_jax.data.problem import SPLITS, Problem
from opd_jax.domains import (
    arithmetic,
    builder,
    countdown,
    jsonl,
    logic,
    math_answers,
    mathematics,
    overlap,
    program,
    reasoning,
    sandbox,
    sets,
    stored,
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
        reasoning.NAME: reasoning.VERIFIER,
        "math": Verifier(mark, math_answers.check, isolated=True, prepare=math_answers.prepare),
        "python": Verifier(run, sandbox.check, isolated=True, seconds=settings.code_seconds),
        **{name: domain.verifier for name, domain in DOMAINS.items()},
    }


# With the usual limits: what loading checks answers and solutions with.
VERIFIERS = verifiers(VerifierSettings())

_JSONL, _REASONING, _MATHEMATICS = "jsonl:", "reasoning:", "mathematics:"
# Kinds of a domain's prompts that differ by a number or a word: only equal texts are duplicates.
_TEMPLATED = (_REASONING, "mathematics")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a domain's problems come from."""

    source: str  # A name in the tables, "jsonl:PATH", "reasoning:TASK" or "mathematics:MODULE".
    levels: tuple[int, ...] = (1, 2, 3)  # Difficulties to train and evaluate on.
    path: str = ""  # Of a published set: its files, or a folder that TFDS prepared.
    test_source: str = ""  # Another source for the test split, e.g. "humaneval"; same levels.
    test_path: str = ""  # Its path. One of the same source may be given by the path alone.
    options: dict[str, dict[str, Any]] = dataclasses.field(  # Of a task, by level or "all".
        default_factory=dict
    )
    size: int = 2000  # Problems per level that generators of packages make.
    near_duplicates: float = 0.5  # Share of common n-grams that makes one; 0: only equal texts.

    def __post_init__(self):
        if not 0 <= self.near_duplicates <= 1:
            raise ValueError(f"near_duplicates={self.near_duplicates}: must be in [0, 1]")
        if self.size < 1:
            raise ValueError(f"size={self.size}: must be at least 1")
        if self.options and not self.source.startswith(_REASONING):
            raise ValueError(f"options={self.options}: only reasoning:TASK has any")


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


def load(
    spec: str,
    split: str,
    levels: Sequence[int],
    data_dir: str,
    *,
    path: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    size: int = 2000,
    verifiers: Mapping[str, Verifier] | None = None,
) -> Problems:
    """The problems of one split of a source.

    Args:
      spec: a name in DOMAINS or sets.SETS, "jsonl:PATH", "reasoning:TASK" or
        "mathematics:MODULE". It is also the `domain` of the problems.
      split: "train", "validation" or "test". No problem is in two of them.
      levels: the levels wanted.
      data_dir: where datasets are stored; built there on first use.
      path: of a published set.
      options: of a reasoning-gym task, by level.
      size: problems per level, where a package makes them.
      verifiers: check gold answers and solutions; None: VERIFIERS, which no limit stops.

    Raises:
      ValueError: unknown domain, split or level, a bad file, or no problem is left.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; one of {', '.join(SPLITS)}")
    table = VERIFIERS if verifiers is None else verifiers
    kept = _of_levels(spec, split, levels, data_dir, path, options or {}, size, table)
    if not kept:
        raise ValueError(
            f"domain {spec!r} has no {split} problem of levels {list(levels)}"
            + (f" at {path}" if path else "")
        )
    return Problems(kept)


def load_splits(
    source: Source, data_dir: str, verifiers: Mapping[str, Verifier] | None = None
) -> tuple[dict[str, Problems], dict[str, Any]]:
    """All splits of a domain, no problem in two of them, and a report of what was taken out.

    Args:
      source: where from.
      data_dir: where datasets are stored.
      verifiers: as in `load`.

    Returns:
      The problems by split, and overlap.separate's report.

    Raises:
      ValueError: as in `load`.
    """
    s, splits = source, {}
    for split in SPLITS:
        other = split == "test" and (s.test_source or s.test_path)
        spec, path = (s.test_source or s.source, s.test_path) if other else (s.source, s.path)
        splits[split] = load(
            spec, split, s.levels, data_dir, path=path, options=s.options, size=s.size,
            verifiers=verifiers,
        )  # fmt: skip
    by_key = s.source in DOMAINS or s.source.startswith(_TEMPLATED)
    kept, report = overlap.separate(splits, 0.0 if by_key else s.near_duplicates)
    for split, problems in kept.items():
        if not problems:
            raise ValueError(
                f"domain {s.source!r}: every {split} problem is also held out; look at its splits, "
                "or raise near_duplicates"
            )
    return {split: Problems(problems) for split, problems in kept.items()}, report


def _of_levels(spec, split, levels, data_dir, path, options, size, verifiers) -> list[Problem]:
    """The problems of a split and some levels; ValueError if a level is unknown."""
    if spec in DOMAINS:
        splits, known = {split: builder.load(spec, DOMAINS[spec], data_dir, split)}, builder.LEVELS
    else:
        splits = _published(spec, levels, data_dir, path, options, size, verifiers)
        known = None
    known = sorted(known or {p.level for part in splits.values() for p in part})
    unknown = [level for level in levels if level not in known]
    if unknown:
        raise ValueError(f"domain {spec!r} has no level {unknown}; its levels: {known}")
    return [p for p in splits[split] if p.level in levels]


def _published(spec, levels, data_dir, path, options, size, verifiers) -> dict[str, list[Problem]]:
    """All splits of a source that is no procedural domain of ours."""
    name, _, part = spec.partition(":")
    if spec.startswith(_JSONL):
        return jsonl.load(spec, part, verifiers)
    if spec.startswith(_REASONING):
        recipe = reasoning.recipe(part, levels, options, size)
    elif spec.startswith(_MATHEMATICS) and not path:
        recipe = mathematics.recipe(part, levels, size)
    elif name in sets.SETS and (not part or spec.startswith(_MATHEMATICS)):
        if not path:
            raise ValueError(
                f"domain {spec!r} has no path; give the folder of its published files "
                "(opd_jax/domains/sets.py says which)"
            )
        if (epath.Path(path) / "dataset_info.json").exists():
            found = sets.prepared(name, path, verifiers)
            return {s: [dataclasses.replace(p, domain=spec) for p in found[s]] for s in SPLITS}
        recipe = sets.recipe(name, path, verifiers, part)
    else:
        names = ", ".join([*sets.SETS, "jsonl:PATH", "reasoning:TASK", "mathematics:MODULE"])
        raise ValueError(f"unknown domain {spec!r}; {did_you_mean(spec, DOMAINS)}, {names}")
    return {split: stored.load(recipe, spec, split, data_dir) for split in SPLITS}


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
