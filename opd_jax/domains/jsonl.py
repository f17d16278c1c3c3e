"""Your own problems, one JSON object per line:

    {"prompt": "3+4=", "answer": "7", "verifier": "integer"}
    {"prompt": "...", "answer": {"numbers": [2, 3], "target": 6}, "verifier": "countdown",
     "level": 2, "split": "test", "solutions": {"terse": "2*3"}}

`level` is 1 and the split goes by a hash of the prompt unless the line says otherwise. An answer
that is not a string is kept as JSON text. Everything is checked when the file is read, also that
the solutions given verify.
"""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from opd_jax.data.problem import SPLITS, Problem
from opd_jax.domains.answers import Verifier, did_you_mean
from opd_jax.domains.builder import split_of

_REQUIRED = ("prompt", "answer", "verifier")
_OPTIONAL = ("level", "split", "solutions")


def load(name: str, path: str, verifiers: Mapping[str, Verifier]) -> dict[str, list[Problem]]:
    """All problems of a file by split; a problem's id is its line number.

    Raises:
      ValueError: what is wrong with the first bad line, with file and line number.
    """
    splits: dict[str, list[Problem]] = {split: [] for split in SPLITS}
    first_seen: dict[str, tuple[str, int]] = {}
    try:
        lines = epath.Path(path).read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"domain {name!r}: cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problem, split = _parse(name, number, line, verifiers)
            before, at = first_seen.setdefault(problem.prompt, (split, number))
            if before != split:
                raise ValueError(f"the prompt is in {split!r} here but in {before!r} on line {at}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        splits[split].append(problem)
    return splits


def _parse(
    name: str, number: int, line: str, verifiers: Mapping[str, Verifier]
) -> tuple[Problem, str]:
    """One line as a problem and its split; ValueError without file and line."""
    fields = _fields(line)
    verifier = fields["verifier"]
    if verifier not in verifiers:
        raise ValueError(f"unknown verifier {verifier!r}; {did_you_mean(verifier, verifiers)}")
    answer = fields["answer"]
    if not isinstance(answer, str):
        answer = json.dumps(answer, separators=(",", ":"))
    verifiers[verifier].check(answer)
    for style, text in fields["solutions"].items():
        if not isinstance(text, str) or not verifiers[verifier].verify(answer, text):
            raise ValueError(f"solution {style!r} does not verify: {text!r}")
    split = fields["split"] or split_of(fields["prompt"])
    problem = Problem(
        name, number, fields["level"], fields["prompt"], answer, fields["solutions"], verifier
    )
    return problem, split


def _fields(line: str) -> dict[str, Any]:
    """The fields of a line with the optional ones filled in, names and types checked."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error}): {line[:80]!r}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, got {line[:80]!r}")
    for key in fields:
        if key not in _REQUIRED + _OPTIONAL:
            raise ValueError(f"unknown key {key!r}; {did_you_mean(key, _REQUIRED + _OPTIONAL)}")
    for key in _REQUIRED:
        if key not in fields:
            raise ValueError(f"missing key {key!r}; needed: {', '.join(_REQUIRED)}")
    fields = {"level": 1, "split": None, "solutions": {}, **fields}
    for key in ("prompt", "verifier"):
        if not isinstance(fields[key], str):
            raise ValueError(f"{key} {fields[key]!r} must be a string")
    if type(fields["level"]) is not int or fields["level"] < 1:
        raise ValueError(f"level {fields['level']!r} must be an integer of at least 1")
    if fields["split"] not in (None, *SPLITS):
        raise ValueError(f"split {fields['split']!r} must be one of {', '.join(SPLITS)}")
    if not isinstance(fields["solutions"], dict):
        raise ValueError(f"solutions {fields['solutions']!r} must be an object of style: text")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no text") from error
    return fields
