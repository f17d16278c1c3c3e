r"""Public problem sets, read from local files in the layouts in which they are published.

    gsm8k        train.jsonl, test.jsonl: question, answer ("... #### 18"). The level is the number
                 of calculations in the worked answer.
    math         train/SUBJECT/N.json, test/..., or train.jsonl, test.jsonl (MATH-500): problem,
                 solution, level ("Level 3" or 3) and maybe answer. Levels 1 to 5.
    mathematics  train-easy/MODULE.txt, train-medium, train-hard, interpolate, extrapolate: question
                 and answer on two lines. Levels 1 to 5 in this order, the last two test only.
    mbpp         sanitized-mbpp.json, split by task id as published. Level 1.
    humaneval    HumanEval.jsonl.gz or HumanEvalPlus.jsonl.gz, test only. Level 1.

A domain's path is the folder, or one file of these, anywhere that epath reaches. It may also be a
folder that TFDS prepared as array_record: its own `gsm8k` or `math_dataset`, or what `tfds build`
made with `tfds_builders.py`. Published test problems stay the test split; where a set has no
validation problems, 8% of its training problems become them, by a hash of the text.
"""

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow_datasets as tfds
from etils import epath

from opd_jax.data.problem import SPLITS, Problem
from opd_jax.domains import stored
from opd_jax.domains.answers import Verifier, last_boxed

_FIRST_ID = {"train": 1, "validation": 1_000_001, "test": 2_000_001}
_VALIDATION_SHARE = 0.08
_CALCULATION = re.compile(r"<<[^<>]*>>")


class Row(NamedTuple):
    """One record of a file, and where it stands, for error messages."""

    split: str
    where: str
    fields: Mapping[str, Any]


class Parsed(NamedTuple):
    """What a set's parser makes of a record; None in its place leaves the record out."""

    level: int
    prompt: str
    answer: str
    solutions: Mapping[str, str]


class ProblemSet(NamedTuple):
    """A published set.

    Attributes:
      files: split -> patterns of its files below the path.
      parse: a record as a problem; raises ValueError or KeyError if it is none.
      verifier: marks its problems.
      version: of the parser; raise it whenever the problems change.
      split: the split of a record, where the file does not tell.
    """

    files: Mapping[str, tuple[str, ...]]
    parse: Callable[[Mapping[str, Any]], Parsed]
    verifier: str
    version: str
    split: Callable[[Mapping[str, Any]], str | None] | None = None


def recipe(
    name: str, path: str, verifiers: Mapping[str, Verifier], module: str = ""
) -> stored.Recipe:
    """How to store the problems of a set's files.

    Args:
      name: a key of SETS.
      path: the folder or file.
      verifiers: by name; every gold answer is checked.
      module: of `mathematics`, the one to take; empty: all.

    Raises:
      ValueError: none of the set's files is there.
    """
    root = epath.Path(path)
    files = _files(SETS[name], root, module or "*", name)
    hashes = {
        str(file.relative_to(root if root.is_dir() else root.parent)): hashlib.sha256(
            file.read_bytes()
        ).hexdigest()
        for _, file in files
    }
    rows = (row for split, file in files for row in _read(split, file))
    return stored.Recipe(
        f"opd_{name}",
        {"set": name, "sha256": hashes},
        lambda: problems(name, rows, verifiers),
        SETS[name].version,
    )


def prepared(name: str, path: str, verifiers: Mapping[str, Verifier]) -> dict[str, list[Problem]]:
    """The problems of a folder that TFDS prepared, of its builder or of ours."""
    builder = tfds.builder_from_directory(path)
    sources = {split: builder.as_data_source(split=split) for split in builder.info.splits}
    rows = {split: s.__getitems__(list(range(len(s)))) for split, s in sources.items()}
    if "verifier" in builder.info.features:
        return {
            split: sorted((stored.problem(r, name) for r in some if r["id"]), key=lambda p: p.id)
            for split, some in rows.items()
        }
    texts = (
        Row(split, f"{path}, {split}, row {i}", {k: v.decode() for k, v in row.items()})
        for split in rows
        if split in SPLITS
        for i, row in enumerate(rows[split])
    )
    return problems(name, texts, verifiers)


def problems(
    name: str, rows: Iterator[Row], verifiers: Mapping[str, Verifier]
) -> dict[str, list[Problem]]:
    """Problems by split, each prompt once within a split.

    Raises:
      ValueError: a record is not as the set's layout has it, or its gold answer cannot be marked
        against; names the place.
    """
    found = SETS[name]
    splits: dict[str, dict[str, Problem]] = {split: {} for split in SPLITS}
    count = dict(_FIRST_ID)
    for split, where, fields in rows:
        try:
            split = found.split(fields) if found.split else split
            if split is None:
                continue
            parsed = found.parse(fields)
            verifiers[found.verifier].check(parsed.answer)
        except (KeyError, ValueError, TypeError) as error:
            missing = "missing key " if isinstance(error, KeyError) else ""
            raise ValueError(f"{name}: {where}: {missing}{error}") from error
        number = count[split]
        count[split] += 1
        level, prompt, answer, solutions = parsed
        p = Problem(name, number, level, prompt, answer, solutions, found.verifier)
        splits[split].setdefault(prompt, p)
    if not splits["validation"]:
        held = {t: p for t, p in splits["train"].items() if _share(t) < _VALIDATION_SHARE}
        splits["validation"] = held
        splits["train"] = {t: p for t, p in splits["train"].items() if t not in held}
    return {split: list(unique.values()) for split, unique in splits.items()}


def _share(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


def _files(
    found: ProblemSet, path: epath.Path, module: str, name: str
) -> list[tuple[str, epath.Path]]:
    """Each file with its split, in a fixed order."""
    patterns = [(s, p.replace("MODULE", module)) for s, ps in found.files.items() for p in ps]
    if path.is_file():
        of_file = {s: p for s, p in patterns if epath.Path(p).name == path.name}
        return [(split, path) for split in of_file] or [("test", path)]
    files = [(s, f) for s, p in patterns for f in sorted(path.glob(p), key=str)]
    if not files:
        wanted = ", ".join(dict.fromkeys(p for _, p in patterns))
        raise ValueError(f"domain {name!r}: {path} has none of the files {wanted}")
    return files


def _read(split: str, file: epath.Path) -> Iterator[Row]:
    """The records of a file of lines, of JSON, or of question and answer in turn."""
    try:
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if file.suffix == ".txt":
        lines = text.split("\n")
        level = _REGIMES.index(file.parent.name) + 1 if file.parent.name in _REGIMES else 1
        for i in range(0, len(lines) - 1, 2):
            fields = {"question": lines[i], "answer": lines[i + 1], "level": level}
            yield Row(split, f"{file}, line {i + 1}", fields)
    elif file.suffix == ".json":
        value = _json(text, str(file))
        for i, fields in enumerate(value if isinstance(value, list) else [value]):
            yield Row(split, f"{file}, record {i + 1}", fields)
    else:
        for i, line in enumerate(text.split("\n")):
            if line.strip():
                where = f"{file}, line {i + 1}"
                yield Row(split, where, _json(line, where))


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error


def _gsm8k(fields: Mapping[str, Any]) -> Parsed:
    worked, mark, gold = fields["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"answer {fields['answer'][:80]!r} does not end in '#### ' and a number")
    gold = gold.strip().replace(",", "")
    steps = max(1, len(_CALCULATION.findall(worked)))
    text = f"{_CALCULATION.sub('', worked).strip()}\n#### {gold}"
    return Parsed(
        steps, fields["question"].strip(), gold, {"terse": f"#### {gold}", "worked": text}
    )


def _math(fields: Mapping[str, Any]) -> Parsed:
    level = re.fullmatch(r"(?:Level )?([1-5])", str(fields["level"]))
    gold = fields["answer"] if "answer" in fields else last_boxed(fields["solution"])
    if gold is None:
        raise ValueError("the solution has no \\boxed{answer}")
    solutions = {"terse": f"\\boxed{{{gold}}}", "worked": fields["solution"]}
    # A handful of problems have "Level ?".
    return Parsed(int(level[1]) if level else 5, fields["problem"].strip(), gold, solutions)


_REGIMES = ("train-easy", "train-medium", "train-hard", "interpolate", "extrapolate")


def _mathematics(fields: Mapping[str, Any]) -> Parsed:
    # TFDS's own copy of the set does not tell how hard a problem is.
    level = fields.get("level", 1)
    question, answer = fields["question"].strip(), fields["answer"].strip()
    return Parsed(level, question, answer, {"terse": answer})


def _mbpp(fields: Mapping[str, Any]) -> Parsed:
    tests, imports = fields["test_list"], fields["test_imports"]
    prompt = f"{fields['prompt'].strip()}\nYour code should pass these tests:\n" + "\n".join(tests)
    answer = {"kind": "asserts", "setup": "\n".join(imports), "tests": tests}
    return Parsed(1, prompt, json.dumps(answer), {"terse": _fenced(fields["code"])})


def _mbpp_split(fields: Mapping[str, Any]) -> str | None:
    """The published split by task id; the first ten are examples for prompts."""
    task = fields["task_id"]
    if task <= 10:
        return None
    return "test" if task <= 510 else "validation" if task <= 600 else "train"


def _humaneval(fields: Mapping[str, Any]) -> Parsed:
    answer = {
        "kind": "asserts",
        "entry_point": fields["entry_point"],
        "prefix": fields["prompt"],
        "tests": fields["test"],
    }
    # As a continuation of the prompt; a whole function in a fence is marked as well.
    solutions = {"terse": fields["canonical_solution"]}
    return Parsed(1, fields["prompt"], json.dumps(answer), solutions)


def _fenced(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


_LINES = {"train": ("train.jsonl",), "test": ("test.jsonl",)}
_MATH_FILES = {split: (f"{split}.jsonl", f"{split}/*/*.json") for split in ("train", "test")}

SETS: dict[str, ProblemSet] = {
    "gsm8k": ProblemSet(_LINES, _gsm8k, "math", "1.0.0"),
    "math": ProblemSet(_MATH_FILES, _math, "math", "1.0.0"),
    "mathematics": ProblemSet(
        {
            "train": tuple(f"{regime}/MODULE.txt" for regime in _REGIMES[:3]),
            "test": tuple(f"{regime}/MODULE.txt" for regime in _REGIMES[3:]),
        },
        _mathematics,
        "exact",
        "1.0.0",
    ),
    "mbpp": ProblemSet(
        {"test": ("sanitized-mbpp.json",)}, _mbpp, "python", "1.0.0", split=_mbpp_split
    ),
    "humaneval": ProblemSet(
        {
            "test": (
                "HumanEval.jsonl.gz",
                "HumanEval.jsonl",
                "HumanEvalPlus.jsonl.gz",
                "HumanEvalPlus.jsonl",
            )
        },
        _humaneval,
        "python",
        "1.0.0",
    ),
}
