r"""Any task of the package reasoning-gym, by name: "reasoning:chain_sum" (extra `reasoning`).

A level is a difficulty: the task's curriculum at level - 1 where it has one, and over it what the
config's `options` say, by level, e.g. {"1": {"max_terms": 2}, "2": {"max_terms": 4}}; "all" stands
for every level. A problem's split goes by a hash of its question, so no question is in two splits.

The task's own `score_answer` is the verifier: full marks are right, partial credit is wrong. The
answer it gets is what stands in the last <answer></answer>, else in the last \boxed{}, else behind
the last "answer is" or "Answer:", else the whole completion.

Some tasks evaluate answers as Python or by SymPy, which runs whatever a model writes. Those get an
answer only if it is rows of words, or an arithmetic expression without a large power; everything
else is wrong at once.
"""

import functools
import importlib
import importlib.metadata
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from opd_jax.data.problem import SPLITS, Problem
from opd_jax.domains.answers import Verifier, did_you_mean, last_boxed
from opd_jax.domains.builder import split_of
from opd_jax.domains.stored import Recipe

NAME = "reasoning"

Options = Mapping[str, Mapping[str, Any]]

# Tasks that call eval() on the answer; those that give it to SymPy's parser, which does so too.
ROWS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EXPRESSIONS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
MAX_ANSWER = 10_000  # Characters; of an expression a third.

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_SAID = re.compile(r"(?:[Aa]nswer is:?|Answer:)")
_WORDS = re.compile(r"[\w\s,-]*")
# Functions, variables that nothing is called by, numbers, small whole powers; no attribute.
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs"
_EXPONENT = r"(?:-?[0-9]{1,2}|\(\s*-?[0-9]{1,2}(?:/[0-9]{1,2})?\s*\))(?![\w.]|\s*(?:\*\*|\^))"
_TOKEN = re.compile(
    rf"\s*(?:(?:{_FUNCTIONS})(?=\s*\()|(?:pi|[A-Za-z])(?![A-Za-z_0-9]|\s*\()"
    rf"|(?:[0-9]{{1,40}}(?:\.[0-9]{{1,40}})?|\.[0-9]{{1,40}})(?![\w.])"
    rf"|(?:\*\*|\^)\s*{_EXPONENT}|\*(?!\*)|[-+/(),]|\Z)"
)
_POWER_OF_BRACKET = re.compile(r"\)\s*(?:\*\*|\^)")


def recipe(task: str, levels: Sequence[int], options: Options, size: int) -> Recipe:
    """How to make and store a task's problems.

    Args:
      task: a name that reasoning-gym knows.
      levels: the levels wanted; only those are made.
      options: level ("1", "2", ... or "all") -> fields of the task's config.
      size: problems to generate per level; those that come twice are dropped.

    Raises:
      ValueError: reasoning-gym is not installed, or knows no such task; a level is no level.
    """
    known = _gym().factory.DATASETS
    if task not in known:
        raise ValueError(f"unknown reasoning-gym task {task!r}; {did_you_mean(task, known)}")
    wrong = set(options) - {"all", *map(str, levels)}
    if wrong:
        raise ValueError(
            f"reasoning:{task}: options for {sorted(wrong)}; they may be for 'all' and for the "
            f"levels {list(levels)}"
        )
    made_from = {
        "task": task,
        "levels": list(levels),
        "options": {level: dict(fields) for level, fields in options.items()},
        "size": size,
        "reasoning_gym": importlib.metadata.version("reasoning-gym"),
    }
    return Recipe(f"{NAME}_{task}", made_from, lambda: _make(task, levels, options, size), "1.0.0")


def extract(completion: str) -> str:
    """The part of a completion that is the answer; see the module's text."""
    tagged = _TAGGED.findall(completion)
    if tagged:
        return tagged[-1].strip()
    boxed = last_boxed(completion)
    if boxed is not None:
        return boxed.strip()
    return _SAID.split(completion)[-1].strip()


def _make(task: str, levels: Sequence[int], options: Options, size: int) -> dict[str, list]:
    splits: dict[str, list[Problem]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for level in levels:
        for problem in _of_level(task, level, options, size):
            if problem.prompt not in seen:
                seen.add(problem.prompt)
                splits[split_of(problem.prompt)].append(problem)
    return splits


def _of_level(task: str, level: int, options: Options, size: int) -> Iterator[Problem]:
    config = _fields(task, level, options)
    seed = zlib.crc32(f"{task} {level}".encode())
    dataset = _dataset(task, config | {"seed": seed, "size": size})
    for i in range(size):
        entry = dataset[i]
        fields = {"task": task, "config": _pack(config), "entry": _pack(entry)}
        answer = json.dumps(fields, ensure_ascii=False)
        solutions = {}
        # Tasks with many right answers may name none.
        if isinstance(entry["answer"], str):
            if not _verify(answer, entry["answer"]):
                continue
            solutions = {"terse": entry["answer"]}
        yield Problem("", level * 1_000_000 + i, level, entry["question"], answer, solutions, NAME)


def _fields(task: str, level: int, options: Options) -> dict[str, Any]:
    """What a level sets in the task's config."""
    own = {**options.get("all", {}), **options.get(str(level), {})}
    fields = _curriculum(task, level) if task in _gym().factory.CURRICULA else {}
    if fields is None or not (fields or own or level == 1):
        raise ValueError(
            f"reasoning:{task} has no level {level} of its own; give options['{level}'], some of "
            f"the fields {_known_fields(task)}"
        )
    return fields | own


def _dataset(task: str, config: Mapping[str, Any]) -> Any:
    """The task with a config, which the task itself checks."""
    dataset_class, config_class = _gym().factory.DATASETS[task]
    try:
        return dataset_class(config_class(**config))
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"reasoning:{task}, config {dict(config)}: {error}; change it by the domain's options; "
            f"there are {_known_fields(task)}"
        ) from error


def _known_fields(task: str) -> list[str]:
    return sorted(_gym().factory.DATASETS[task][1].__dataclass_fields__)


def _curriculum(task: str, level: int) -> dict[str, Any] | None:
    """What the task's curriculum sets at a level; None beyond its last."""
    curriculum = _gym().factory.CURRICULA[task]()
    attributes = curriculum.attributes.values()
    if level > max(len(attribute.levels) for attribute in attributes):
        return None
    curriculum.set_global_level(level - 1)
    config = curriculum.generate_configuration()
    kinds = ("field_name", "lower_field_name", "upper_field_name")
    names = [getattr(a, kind) for a in attributes for kind in kinds if hasattr(a, kind)]
    return {name: getattr(config, name) for name in names}


def _verify(answer: str, completion: str) -> bool:
    task, config, entry = _read(answer)
    text = extract(completion)
    if not text or len(text) > MAX_ANSWER or not _harmless(task, text):
        return False
    if _passes_anything(answer):
        return text.casefold() == str(entry["answer"]).casefold()
    return _full_marks(task, config, text, entry)


@functools.lru_cache(maxsize=4096)
def _passes_anything(answer: str) -> bool:
    """Whether the scorer takes any text for this answer: one does where "False" is right."""
    task, config, entry = _read(answer)
    return _full_marks(task, config, "no answer", entry)


def _full_marks(task: str, config: str, text: str, entry: Mapping[str, Any]) -> bool:
    try:
        return bool(_scorer(task, config)(text, entry) >= 1)
    # A scorer is the package's; what it cannot read is no right answer, however it says so.
    except Exception:
        return False


def _check(answer: str) -> None:
    try:
        task, config, entry = _read(answer)
        _scorer(task, config)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'reasoning answer {answer[:80]!r} must be {{"task": name, "config": its fields, '
            f'"entry": what it generated}} ({error!r})'
        ) from error
    if "answer" not in entry or "metadata" not in entry:
        raise ValueError(f"reasoning answer {answer[:80]!r}: its entry lacks answer or metadata")


def _harmless(task: str, text: str) -> bool:
    """Whether the task's scorer may see this text."""
    if task in ROWS:
        return _WORDS.fullmatch(text) is not None
    if task not in EXPRESSIONS:
        return True
    # Powers of powers grow beyond all memory.
    if len(text) > MAX_ANSWER // 3 or len(_POWER_OF_BRACKET.findall(text)) > 1:
        return False
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return False
        at = token.end()
    return True


@functools.lru_cache(maxsize=4096)
def _read(answer: str) -> tuple[str, str, dict[str, Any]]:
    """Task, its config as JSON, and the entry."""
    fields = json.loads(answer)
    return fields["task"], json.dumps(fields["config"]), _unpack(fields["entry"])


@functools.lru_cache(maxsize=256)
def _scorer(task: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    return _dataset(task, _unpack(json.loads(config)) | {"seed": 0, "size": 1}).score_answer


def _pack(value: Any) -> Any:
    """JSON that keeps tuples, sets and keys that are no strings."""
    if isinstance(value, (tuple, set, frozenset)):
        return {"\0": type(value).__name__, "of": [_pack(v) for v in value]}
    if isinstance(value, Fraction):
        return {"\0": "Fraction", "of": str(value)}
    if isinstance(value, list):
        return [_pack(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: _pack(v) for k, v in value.items()}
        return {"\0": "dict", "of": [[_pack(k), _pack(v)] for k, v in value.items()]}
    return value


def _unpack(value: Any) -> Any:
    kinds = {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    if isinstance(value, dict):
        if "\0" in value:
            if value["\0"] == "Fraction":
                return Fraction(value["of"])
            return kinds[value["\0"]](_unpack(v) for v in value["of"])
        return {k: _unpack(v) for k, v in value.items()}
    return value


def _gym() -> Any:
    """The package, imported only where it is used: it is large."""
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError(
            f"reasoning-gym cannot be imported ({error}); install it: pip install "
            "'opd_jax[reasoning]'"
        ) from error


# In a worker of its own: scorers are not ours, and some take long for some texts.
VERIFIER = Verifier(_verify, _check, isolated=True, prepare=_gym)
