"""Procedural domains as TFDS datasets: built on first use, then read from disk.

A problem's split is a function of its key alone, so splits are disjoint by construction: nothing
that is generated later, by anybody, can move a problem from one split to another.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from opd_jax.data.problem import SPLITS, Problem
from opd_jax.domains.answers import Domain, Draft

LEVELS = (1, 2, 3)
STYLES = ("terse", "worked")

# Problems kept per level; a small level gives what it has, in the shares of `split_of`.
LIMITS = {"train": 8000, "validation": 400, "test": 400}

_FOLDER = "opd_problems"
_IDS_PER_LEVEL = 100_000


def split_of(key: str) -> str:
    """The split of a problem key: 76 % train, 12 % validation, 12 % test, by a stable hash."""
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
    return "train" if share < 0.76 else "validation" if share < 0.88 else "test"


def allot(name: str, generate: Callable[[int], Iterable[Draft]]) -> dict[str, list[Problem]]:
    """All problems of a domain by split: deterministic, no prompt twice, LIMITS per level."""
    splits: dict[str, list[Problem]] = {split: [] for split in SPLITS}
    for level in LEVELS:
        room = dict(LIMITS)
        seen: set[str] = set()
        for draft in generate(level):
            split = split_of(draft.key)
            if draft.prompt in seen or not room[split]:
                continue
            seen.add(draft.prompt)
            room[split] -= 1
            solutions = {"terse": draft.terse, "worked": draft.worked}
            number = level * _IDS_PER_LEVEL + len(seen)
            splits[split].append(
                Problem(name, number, level, draft.prompt, draft.answer, solutions)
            )
            if not any(room.values()):
                break
    return splits


def load(name: str, domain: Domain, data_dir: str, split: str) -> list[Problem]:
    """The problems of one split, in order of id; builds the dataset on first use (seconds).

    They are read from the TFDS data source into memory at once: there are a few thousand.

    Raises:
      ValueError: the folder on disk is broken; names it and the remedy.
    """
    folder = os.path.join(data_dir, _FOLDER, name, domain.version)
    rows = read(lambda: _Builder(name, domain, data_dir), folder, split)
    return sorted((_problem(name, row) for row in rows), key=lambda p: p.id)


def read(
    make: Callable[[], tfds.core.GeneratorBasedBuilder], folder: str, split: str
) -> list[dict[str, Any]]:
    """All rows of a split; builds the dataset on first use.

    Args:
      make: the builder; called within the error handling, for it reads files.
      folder: where its data are or will be.
      split: the split wanted.

    Raises:
      ValueError: the folder on disk is broken; names it and the remedy.
    """
    found = os.path.exists(folder)
    try:
        builder = make()
        _prepare(builder)
        source = builder.as_data_source(split=split)
        rows = source.__getitems__(list(range(len(source))))
        # A record that a cut file lost is read as one without content.
        if lost := [key for row in rows for key in row if row[key] is None]:
            raise ValueError(f"a record has no {lost[0]}")
    # Each library between here and the disk has its own kind of error for a damaged file.
    except Exception as error:
        if not found:
            raise
        raise ValueError(
            f"dataset folder {folder} cannot be read ({type(error).__name__}: {error}). "
            "Delete the folder and start again: it is rebuilt on first use"
        ) from error
    return rows


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The TFDS builder of any procedural domain."""

    # It downloads nothing. TFDS would look for checksums beside this file, through a package
    # (importlib_resources) that it does not declare as a dependency.
    code_path = None

    def __init__(self, name: str, domain: Domain, data_dir: str):
        # TFDS takes folder and metadata from these two; they are set before it looks.
        self.name = name
        self.VERSION = tfds.core.Version(domain.version)
        self._generate = domain.generate
        super().__init__(data_dir=os.path.join(data_dir, _FOLDER), file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            description="Procedurally generated problems with verifiers and reference solutions.",
            features=tfds.features.FeaturesDict(
                {
                    "id": np.uint32,
                    "level": np.int32,
                    "prompt": text(),
                    "answer": text(),
                    **{style: text() for style in STYLES},
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager
        splits = allot(self.name, self._generate)
        return {split: self._generate_examples(problems) for split, problems in splits.items()}

    def _generate_examples(self, problems: list[Problem]) -> Iterator[tuple[str, dict]]:
        for p in problems:
            fields = {"id": p.id, "level": p.level, "prompt": p.prompt, "answer": p.answer}
            yield p.prompt, {**fields, **p.solutions}


def _prepare(builder: tfds.core.GeneratorBasedBuilder) -> None:
    tfds.disable_progress_bar()
    try:
        builder.download_and_prepare()
    except OSError:
        # Another process may have finished the same folder first; then it is there and complete.
        if not os.path.exists(os.path.join(str(builder.data_dir), "dataset_info.json")):
            raise
        builder.info.read_from_directory(builder.data_dir)


def _problem(name: str, row: dict[str, Any]) -> Problem:
    prompt, answer, *solutions = (row[k].decode() for k in ("prompt", "answer", *STYLES))
    styles = dict(zip(STYLES, solutions, strict=True))
    return Problem(name, int(row["id"]), int(row["level"]), prompt, answer, styles)
