"""DeepMind's school mathematics questions made on the spot by their own generators.

"mathematics:arithmetic__add_or_sub" without a path, where the package `mathematics-dataset` is
installed. Levels are the published regimes: 1, 2, 3 are train-easy, -medium and -hard, which are
thirds of a module's range of entropy; 4 is interpolate and 5 extrapolate, test problems only. A
question's split goes by its hash; no question is in two.
"""

import hashlib
import importlib
import importlib.metadata
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from opd_jax.data.problem import SPLITS, Problem
from opd_jax.domains.answers import did_you_mean
from opd_jax.domains.builder import split_of
from opd_jax.domains.stored import Recipe

LEVELS = (1, 2, 3, 4, 5)
# The published files hold no longer ones.
_MAX_QUESTION, _MAX_ANSWER = 160, 30
# A module may have fewer different questions than are asked for.
_TRIES = 20


def recipe(module: str, levels: Sequence[int], size: int) -> Recipe:
    """How to make and store a module's questions.

    Args:
      module: e.g. "arithmetic__add_or_sub".
      levels: the levels wanted.
      size: questions per level, fewer where the module has not as many.

    Raises:
      ValueError: the package is not installed, or has no such module.
    """
    known = {name for level in LEVELS for name in _modules(level)}
    if module not in known:
        raise ValueError(f"unknown module {module!r}; {did_you_mean(module, known)}")
    made_from = {
        "module": module,
        "levels": list(levels),
        "size": size,
        "mathematics_dataset": importlib.metadata.version("mathematics-dataset"),
        "sympy": importlib.metadata.version("sympy"),
    }
    return Recipe("mathematics", made_from, lambda: _make(module, levels, size), "1.0.0")


def _make(module: str, levels: Sequence[int], size: int) -> dict[str, list[Problem]]:
    splits: dict[str, list[Problem]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for level in levels:
        made = _modules(level)
        if module not in made:
            continue
        for question, answer in _questions(made[module], f"{module} {level}", size):
            if question not in seen:
                seen.add(question)
                number = level * 1_000_000 + len(seen)
                split = split_of(question) if level <= 3 else "test"
                solutions = {"terse": answer}
                p = Problem("", number, level, question, answer, solutions, "exact")
                splits[split].append(p)
    return splits


def _questions(make: Callable[[], Any], seed: str, size: int) -> Iterator[tuple[str, str]]:
    """Different questions and answers; the generators draw from the global streams."""
    saved = random.getstate(), np.random.get_state()  # noqa: NPY002
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    found: dict[str, str] = {}
    try:
        for _ in range(_TRIES * size):
            problem = make()
            question, answer = str(problem.question), str(problem.answer)
            if len(question) <= _MAX_QUESTION and len(answer) <= _MAX_ANSWER:
                found.setdefault(question, answer)
            if len(found) == size:
                break
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])  # noqa: NPY002
    yield from found.items()


def _modules(level: int) -> dict[str, Callable[[], Any]]:
    """All modules of a level by name."""
    try:
        modules = importlib.import_module("mathematics_dataset.modules.modules")
    except ImportError as error:
        raise ValueError(
            f"mathematics-dataset cannot be imported ({error}); install it, or give the domain the "
            "path of the published files (train-easy/MODULE.txt, ...)"
        ) from error
    nested = {4: modules.test, 5: modules.test_extra}[level]() if level > 3 else modules.train(
        lambda span: _third(span, level - 1)
    )  # fmt: skip
    flat: dict[str, Callable[[], Any]] = {}
    pending = list(nested.items())
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{name}__{key}", inner) for key, inner in value.items()]
        else:
            flat[name] = value
    return flat


def _third(span: tuple[float, float], index: int) -> tuple[float, float]:
    low, high = span
    return low + index * (high - low) / 3, low + (index + 1) * (high - low) / 3
