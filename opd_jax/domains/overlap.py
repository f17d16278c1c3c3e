"""Training problems that are also held-out ones, exactly or nearly: found, removed and counted.

Two texts are compared by their sets of n-grams of words, n = 8 (numbers and signs are words, case
and spacing do not count; a shorter text is one gram). They are near duplicates if they share a
given part of the smaller set. It is always the training problem that goes: published test sets stay
what they are.
"""

import dataclasses
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from opd_jax.data.problem import Problem

N = 8
SHOWN = 5

_WORD = re.compile(r"\w+|[^\w\s]")

Gram = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """A training problem that was removed, the held-out one it repeats, and how much is shared."""

    removed: Problem
    kept: Problem
    shared: float  # Of the smaller set of n-grams; 1 for equal texts.
    exact: bool


def words(text: str) -> Gram:
    """A text's words and signs, in lower case."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).lower()))


def grams(text: str) -> frozenset[Gram]:
    """Its n-grams."""
    w = words(text)
    return frozenset(w[i : i + N] for i in range(max(1, len(w) - N + 1)))


def separate(
    splits: Mapping[str, Sequence[Problem]], near: float
) -> tuple[dict[str, list[Problem]], dict[str, Any]]:
    """Takes out of training what is held out, and out of validation what is in the test.

    Args:
      splits: "train", "validation" and "test".
      near: share of common n-grams from which on two problems are near duplicates; 0: only equal
        texts are.

    Returns:
      The splits, and a report ready for JSON: `problems` left by split; `removed` {exact, near};
      `contaminated`, the held-out problems by split that had a duplicate in training; `shared`, by
      held-out split what is left after removal: `problems` with any n-gram in common with training
      and `grams`, the share of all their n-grams; and `examples` of near duplicates.
    """
    test = list(splits["test"])
    validation, from_validation = _without(splits["validation"], test, near)
    train, from_train = _without(splits["train"], [*validation, *test], near)
    kept = {"train": train, "validation": validation, "test": test}
    found = from_validation + from_train
    twice = {id(d.kept) for d in from_train}
    report = {
        "problems": {split: len(ps) for split, ps in kept.items()},
        "n": N,
        "near": near,
        "removed": {
            "exact": sum(d.exact for d in found),
            "near": sum(not d.exact for d in found),
        },
        "contaminated": {s: sum(id(p) in twice for p in kept[s]) for s in ("validation", "test")},
        "shared": {s: _shared(kept[s], train) for s in ("validation", "test")} if near else None,
        "examples": [
            {"removed": d.removed.prompt, "kept": d.kept.prompt, "shared": round(d.shared, 3)}
            for d in [d for d in found if not d.exact][:SHOWN]
        ],
    }
    return kept, report


def _without(
    problems: Sequence[Problem], held_out: Sequence[Problem], near: float
) -> tuple[list[Problem], list[Duplicate]]:
    """The problems that are not held out, and the others."""
    exact = {words(h.prompt): h for h in held_out}
    where: dict[Gram, list[int]] = defaultdict(list)
    size = [0] * len(held_out)
    for i, h in enumerate(held_out if near else ()):
        own = grams(h.prompt)
        size[i] = len(own)
        for gram in own:
            where[gram].append(i)
    kept, gone = [], []
    for p in problems:
        twin = exact[w] if (w := words(p.prompt)) in exact else None
        found = Duplicate(p, twin, 1.0, True) if twin else _nearest(p, held_out, where, size, near)
        if found is None:
            kept.append(p)
        else:
            gone.append(found)
    return kept, gone


def _nearest(p, held_out, where, size, near: float) -> Duplicate | None:
    """The held-out problem that shares most with p, if it is a near duplicate."""
    if not near:
        return None
    own = grams(p.prompt)
    common = Counter(i for gram in own if gram in where for i in where[gram])
    shared = {i: n / min(size[i], len(own)) for i, n in common.items()}
    best = max(shared, key=lambda i: shared[i], default=None)
    if best is None or shared[best] < near:
        return None
    return Duplicate(p, held_out[best], shared[best], False)


def _shared(held_out: Sequence[Problem], train: Sequence[Problem]) -> dict[str, float]:
    known = set().union(*(grams(p.prompt) for p in train)) if train else set()
    of_each = [(len(g & known), len(g)) for g in (grams(p.prompt) for p in held_out)]
    total = sum(n for _, n in of_each)
    return {
        "problems": sum(hit > 0 for hit, _ in of_each),
        "grams": sum(hit for hit, _ in of_each) / total if total else 0.0,
    }
