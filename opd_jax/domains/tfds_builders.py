"""The problem sets as registered TFDS datasets, for `tfds build`:

    tfds build opd_gsm8k --imports=opd_jax.domains.tfds_builders --manual_dir=DIR \\
        --file_format=array_record

reads the set's published files in DIR (see `sets.py`) and downloads nothing. The folder it makes
can be a domain's `path`. The command-line program itself needs TensorFlow; without it use

    tfds.builder("opd_gsm8k", file_format="array_record").download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=DIR))

Domains need neither: a path to the published files is enough, they are built on first use.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

from opd_jax import domains
from opd_jax.domains import sets, stored


class _FromFiles(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Reads a set's files from TFDS's folder for manual downloads."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put the set's published files into manual_dir: see sets.py."
    code_path = None  # There are no checksums of downloads to look for.
    problem_set = ""

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"The problem set {self.problem_set!r} with verifiers and solutions.",
            features=stored.features(),
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        recipe = sets.recipe(self.problem_set, str(dl_manager.manual_dir), domains.VERIFIERS)
        self.info.metadata.update(recipe.made_from)
        return {split: self._generate_examples(p) for split, p in recipe.make().items()}

    def _generate_examples(self, problems: list) -> Iterator[tuple[int, dict]]:
        return stored.examples(problems)


class OpdGsm8k(_FromFiles):
    """GSM8K."""

    problem_set = "gsm8k"


class OpdMath(_FromFiles):
    """MATH, or MATH-500."""

    problem_set = "math"


class OpdMathematics(_FromFiles):
    """DeepMind's school mathematics questions."""

    problem_set = "mathematics"


class OpdMbpp(_FromFiles):
    """MBPP, sanitized."""

    problem_set = "mbpp"


class OpdHumaneval(_FromFiles):
    """HumanEval, or HumanEval+."""

    problem_set = "humaneval"
