"""Problem sets kept as TFDS datasets (array_record): from files, or made by a package's generators.

A dataset's folder is named after what it was made from: the SHA-256 of the source files, or the
options and version of the generator. Other files or options are therefore another dataset, never a
stale one. `metadata.json` in the folder says what went in.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from opd_jax.data.problem import Problem
from opd_jax.domains import builder

FOLDER = "opd_sets"

Splits = Mapping[str, list[Problem]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a stored set comes to be.

    Attributes:
      name: of the set, lower case with underscores, e.g. "gsm8k".
      made_from: what its content depends on, ready for JSON; names the dataset's folder.
      make: the problems by split; called only if the folder is not there yet.
      version: raise it whenever `make` changes its output for the same `made_from`.
    """

    name: str
    made_from: Mapping[str, Any]
    make: Callable[[], Splits]
    version: str

    def digest(self) -> str:
        """Of what it is made from."""
        text = json.dumps(self.made_from, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(recipe: Recipe, domain: str, split: str, data_dir: str) -> list[Problem]:
    """The problems of one split, in order of id; builds the dataset on first use.

    Args:
      recipe: what to build.
      domain: the name that the problems get.
      split: "train", "validation" or "test"; one that the set lacks is empty.
      data_dir: where datasets are kept.

    Raises:
      ValueError: the folder on disk is broken; names it and the remedy.
    """
    parts = (data_dir, FOLDER, recipe.name, recipe.digest(), recipe.version)
    rows = builder.read(lambda: _Builder(recipe, data_dir), os.path.join(*parts), split)
    return sorted((problem(row, domain) for row in rows if row["id"]), key=lambda p: p.id)


def features() -> tfds.features.FeaturesDict:
    """A stored problem; `solutions` is a JSON object of style: text."""
    text = tfds.features.Text
    return tfds.features.FeaturesDict(
        {
            "id": np.uint32,
            "level": np.int32,
            "prompt": text(),
            "answer": text(),
            "verifier": text(),
            "solutions": text(),
        }
    )


def examples(problems: list[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Problems as TFDS stores them. A split may not be empty there: it has one row of id 0."""
    for p in problems or [Problem("", 0, 0, "", "", {}, "")]:
        row = {"id": p.id, "level": p.level, "prompt": p.prompt, "answer": p.answer}
        yield p.id, row | {"verifier": p.verifier, "solutions": json.dumps(dict(p.solutions))}


def problem(row: Mapping[str, Any], domain: str) -> Problem:
    """The problem of a stored row."""
    prompt, answer, verifier, solutions = (
        row[key].decode() for key in ("prompt", "answer", "verifier", "solutions")
    )
    number, level = int(row["id"]), int(row["level"])
    return Problem(domain, number, level, prompt, answer, json.loads(solutions), verifier)


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The TFDS builder of a recipe."""

    code_path = None  # It downloads nothing, so there are no checksums of downloads to look for.

    def __init__(self, recipe: Recipe, data_dir: str):
        # TFDS takes folder and metadata from these two; they are set before it looks.
        self.name = recipe.name
        self.VERSION = tfds.core.Version(recipe.version)
        self._recipe = recipe
        super().__init__(
            data_dir=os.path.join(data_dir, FOLDER),
            config=tfds.core.BuilderConfig(name=recipe.digest(), version=self.VERSION),
            file_format="array_record",
        )

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Problems with verifiers and reference solutions.",
            features=features(),
            metadata=tfds.core.MetadataDict(json.loads(json.dumps(self._recipe.made_from))),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager
        return {split: self._generate_examples(p) for split, p in self._recipe.make().items()}

    def _generate_examples(self, problems: list[Problem]) -> Iterator[tuple[int, dict]]:
        return examples(problems)
