r"""Mathematical answers: where one stands in a completion, and whether it equals the gold one.

Numbers, percentages, units, fractions, tuples, intervals, sets, lists, letters and words are
compared by the exact rules below (numbers in quantities.py); what they do not cover (roots,
variables, functions, relations, matrices) goes to `math-verify` (extra `math`), which may take for
ever on hostile input: training calls this in worker processes with hard limits.

The rules, where people differ:

- Numbers are equal as fractions: 0.333 is not 1/3, 3.14 is not \pi.
- "28", "28\%", "28 percent" and 0.28 answer a gold 28\%; 28\% answers a gold 28 or 0.28.
- Units count only where both sides name one: "10" answers "10 cm", "10 m" and "100 mm" do not.
- "1,000" alone is a number; inside brackets a comma separates. "\$" and currency signs are units.
- (1,2) has an order and [1,2) its brackets; sets and bare lists ("1, 2", "1 and 2", "1 or 2") have
  none, and every element must be there. x=5 answers 5 and the reverse; x=5 does not answer y=5.
- Of several boxes the last counts; more than MOST_BOXES different ones are guesses, worth nothing.
"""

import functools
import importlib.util
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opd_jax.domains import quantities

MOST_BOXES = 8
MOST_CHARACTERS, MOST_DEPTH = 1000, 40  # Of an answer; beyond, no human wrote it.

# Extraction.

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_IS = re.compile(r"\banswers?\s*(?:is|are|:|=)[\s:=*]*", re.IGNORECASE)
_MATH = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def last_box(completion: str) -> str | None:
    r"""What is in the last closed \boxed{} or \fbox{}; None if there is none, or far too many."""
    open_at: list[tuple[bool, int]] = []
    boxes = []
    for token in _BRACES.finditer(completion):
        if token[0][-1] == "{" and token[0] != r"\{":
            open_at.append((token[0][0] == "\\", token.end()))
        elif token[0] == "}" and open_at:
            is_box, start = open_at.pop()
            if is_box:
                boxes.append(completion[start : token.start()])
    if not boxes or len({box.strip() for box in boxes}) > MOST_BOXES:
        return None
    return boxes[-1]


def after_hashes(completion: str) -> str | None:
    """The rest of the line after the last ####, GSM8K's mark."""
    _, mark, rest = completion.rpartition("####")
    return rest.strip().split("\n")[0] if mark and rest.strip() else None


def after_answer_is(completion: str) -> str | None:
    """The formula or the rest of the sentence after the last "answer is" or "answer:"."""
    found = list(_ANSWER_IS.finditer(completion))
    if not found:
        return None
    line = completion[found[-1].end() :].split("\n")[0].strip()
    formula = _MATH.match(line)
    if formula:
        return next(group for group in formula.groups() if group is not None)
    sentence = re.split(r"\.(?:\s|$)", line)[0].strip("* ")
    return sentence or None


def whole(completion: str) -> str | None:
    """The completion itself, for models that answer without a word around."""
    return completion.strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "boxed": last_box,
    "hashes": after_hashes,
    "answer_is": after_answer_is,
    "whole": whole,
}


def extract(completion: str, order: Sequence[str]) -> str | None:
    """What the first of the extractors that finds anything finds."""
    for name in order:
        found = EXTRACTORS[name](completion)
        if found is not None:
            return found
    return None


# The verifier.


def verify(
    answer: str, completion: str, order: Sequence[str] = ("boxed", "hashes", "answer_is")
) -> bool:
    """Whether the answer found in a completion equals `answer`, the gold one.

    Slow on hostile text; training calls it in worker processes.
    """
    found = extract(completion, order)
    return found is not None and equal(gold=answer, answer=found)


def check(answer: str) -> None:
    """Raises ValueError if a gold answer cannot be parsed, or math-verify is not installed."""
    prepare()
    text = clean(answer)
    if not text:
        raise ValueError(f"math answer {answer!r} is empty")
    if not _is_sane(text) or not _understood(text):
        raise ValueError(f"math answer {answer!r} cannot be parsed, so nothing could ever equal it")


def prepare() -> None:
    """Loads math-verify.

    Raises:
      ValueError: it is not installed; names the extra.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "the verifier 'math' needs the package math-verify: pip install 'opd_jax[math]'"
        )
    _library()


def equal(*, gold: str, answer: str) -> bool:
    """Whether an answer equals the gold one; not symmetric, so both go by name."""
    gold, answer = clean(gold), clean(answer)
    letter = _LETTER.fullmatch(gold)
    if letter:
        return _letter_of(answer) == letter[1]
    return bool(gold and answer) and _is_sane(answer) and _equal(gold, answer)


def _equal(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    letter = _LETTER.fullmatch(gold)
    if letter:
        return _letter_of(answer) == letter[1]
    gold_name, gold_rest = _assignment(gold)
    name, rest = _assignment(answer)
    if (gold_name or name) and not ("=" in gold_rest or "=" in rest):
        return (not gold_name or not name or gold_name == name) and _equal(gold_rest, rest)
    numbers = quantities.read(gold), quantities.read(answer)
    if None not in numbers:
        return quantities.same(*numbers)
    groups = _group(gold), _group(answer)
    if groups != (None, None):
        return _compare_groups(gold, answer, groups, numbers)
    words = _words(gold)
    if words:
        return words == _words(answer)
    return _library_says(gold, answer)


# Cleaning.

_WRAPPED = re.compile(r"\$\$?(.*?)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_REPLACED = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])"), ""),
    (re.compile(r"(?<!\\)\\[!,;:]|~"), ""),
    (re.compile(r"\\(?:quad|qquad|displaystyle)(?![a-zA-Z])|(?<!\\)\\ "), " "),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"[−–]"), "-"),
    (re.compile("×"), r"\\times "),
    (re.compile("·"), r"\\cdot "),
    (re.compile("π"), r"\\pi "),
    (re.compile("∞"), r"\\infty "),
    (re.compile("°"), r"^\\circ "),
    (re.compile(r"\^\{\\circ\}"), r"^\\circ "),
    (re.compile(r"\\leq?(?![a-zA-Z])|≤"), r"\\le "),
    (re.compile(r"\\geq?(?![a-zA-Z])|≥"), r"\\ge "),
    (re.compile(r"√"), r"\\sqrt "),
)


def clean(text: str) -> str:
    """One spelling for what only differs in typesetting; \\text{} becomes spaces and its words."""
    text = text.strip()
    box = last_box(text) if text.startswith((r"\boxed", r"\fbox")) else None
    if box is not None and text.endswith("}"):
        return clean(box)
    wrapped = _WRAPPED.fullmatch(text)
    if wrapped and wrapped.lastindex:
        text = wrapped[wrapped.lastindex]
    for pattern, new in _REPLACED:
        text = pattern.sub(new, text)
    text = _TEXT.sub(r" \1 ", text)
    return " ".join(text.split()).strip("*").rstrip(".,;: ").strip()


def _is_sane(text: str) -> bool:
    """Short, closed and not absurdly nested."""
    if len(text) > MOST_CHARACTERS:
        return False
    depth = 0
    for token in re.finditer(r"\\.|[{}()\[\]]", text):
        if token[0] in ("{", "(", "["):
            depth += 1
        elif token[0] in ("}", ")", "]"):
            depth -= 1
        if not 0 <= depth <= MOST_DEPTH:
            return False
    return depth == 0


def _understood(text: str) -> bool:
    """Whether a gold answer has a meaning here or for math-verify."""
    _, rest = _assignment(text)
    if _LETTER.fullmatch(rest) or quantities.read(rest) is not None or _words(rest):
        return True
    group = _group(rest)
    if group is not None:
        return all(_understood(clean(item)) for item in group.items)
    parsed = _parse(text)
    return bool(parsed) and not re.search(r"\b(?:zoo|nan)\b", str(parsed[0]))


# Letters, words, assignments.

_LETTER = re.compile(r"\(?([A-J])\)?")
_LETTER_FIRST = re.compile(r"\(?([A-J])(?:\)|[.:](?=\s|$)|$)")
_ASSIGNMENT = re.compile(
    r"([a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?|\\[a-z]+)\s*(?:=|\\in(?![a-zA-Z]))\s*(.+)"
)


def _letter_of(answer: str) -> str | None:
    """The option chosen in "E", "(E)", "E." or "E: because"."""
    found = _LETTER_FIRST.match(answer)
    return found[1] if found else None


def _words(text: str) -> str | None:
    """A verbal answer in lower case, e.g. "Tuesday"; None for anything with a formula in it."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z' -]*", text) or not re.search("[A-Za-z]{3}", text):
        return None
    if any(word in quantities.FUNCTIONS for word in text.lower().split()):
        return None
    return " ".join(text.lower().replace("-", " ").split())


def _assignment(text: str) -> tuple[str, str]:
    r"""("x", "5") of x=5 or x \in 5; ("", text) of anything else."""
    found = _ASSIGNMENT.fullmatch(text)
    if not found or "=" in found[2] or re.search(r"[<>]|\\[lg]e", found[2]):
        return "", text
    return found[1], found[2]


# Tuples, intervals, sets, lists.


class _Group(NamedTuple):
    brackets: str  # "()", "[)", ... ; "{}" for a set; "" for a bare list; "u" for a union.
    items: tuple[str, ...]


_CUP = re.compile(r"\\cup(?![a-zA-Z])|∪")


@functools.lru_cache(maxsize=4096)
def _group(text: str) -> _Group | None:
    """A text as several values; None if it is one."""
    if text.startswith(r"\pm") and quantities.read(text[3:].strip()) is not None:
        return _Group("", (text[3:].strip(), "-" + text[3:].strip()))
    parts = quantities.split(text, _CUP)
    if len(parts) > 1:
        return _Group("u", tuple(parts))
    inner, brackets = text, ""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner, brackets = text[2:-2], "{}"
    elif text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        inner, brackets = text[1:-1], "{}"
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_at_end(text):
        inner, brackets = text[1:-1], text[0] + text[-1]
    if not brackets and quantities.read(text) is not None:
        return None
    items = quantities.split(inner)
    if brackets and any(re.fullmatch("0[0-9]{2}", item) for item in items):
        return None  # (1,000) is a number in parentheses.
    if len(items) < 2 and brackets != "{}":
        return None
    return _Group(brackets, tuple(items) if inner.strip() else ())


def _closes_at_end(text: str) -> bool:
    """Whether the first bracket is closed by the last one, and not before."""
    depth = 0
    for token in re.finditer(r"\\.|[{}()\[\]]", text):
        depth += (token[0] in ("{", "(", "[")) - (token[0] in ("}", ")", "]"))
        if depth == 0:
            return token.end() == len(text)
    return False


def _compare_groups(gold: str, answer: str, groups: Any, numbers: Any) -> bool:
    """At least one side has several values."""
    g, a = groups
    if g is None or a is None:
        one, other = (g, answer) if a is None else (a, gold)
        if len(one.items) == 1:
            pair = (one.items[0], other) if a is None else (other, one.items[0])
            return _equal(clean(pair[0]), clean(pair[1]))
        single_is_plain = numbers != (None, None) or bool(_words(other))
        return not single_is_plain and _library_says(gold, answer)
    if {g.brackets, a.brackets} <= {"{}", "", "u"}:
        if ("u" in (g.brackets, a.brackets)) and g.brackets != a.brackets:
            return _library_says(gold, answer)
        return _same_items(g.items, a.items)
    ordered = g.brackets == a.brackets or {g.brackets, a.brackets} == {"()", ""}
    if not ordered:
        return "u" in (g.brackets, a.brackets) and _library_says(gold, answer)
    return len(g.items) == len(a.items) and all(
        _equal(clean(x), clean(y)) for x, y in zip(g.items, a.items, strict=True)
    )


def _same_items(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether each has a partner on the other side."""
    golds, answers = ([clean(x) for x in side] for side in (gold, answer))
    return all(any(_equal(x, y) for y in answers) for x in golds) and all(
        any(_equal(x, y) for x in golds) for y in answers
    )


# math-verify.

_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)")
_PLAIN_NAMES = re.compile(
    r"(?<![\\a-zA-Z])(pi|infty|sin|cos|tan|cot|sec|csc|log|ln|exp|cup|cap|theta|alpha|beta)"
    r"(?![a-zA-Z])"
)
_PLAIN_INFINITY = re.compile(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])")


@functools.cache
def _library() -> Any:
    import math_verify

    # It warns that it was told not to stop itself by signals, which work in one thread only.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _latex(text: str) -> str:
    """Plain spellings as LaTeX: sqrt(2), 2**3, 2*pi."""
    text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)
    text = _PLAIN_INFINITY.sub(r"\\infty ", text)
    text = _PLAIN_NAMES.sub(r"\\\1 ", text)
    return text.replace("**", "^").replace("*", r"\cdot ")


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> list[Any]:
    """What math-verify makes of a formula; empty if it can make nothing of it."""
    library = _library()
    return library.parse(
        f"${_latex(text)}$",
        extraction_config=[library.LatexExtractionConfig(boxed_match_priority=-1)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def _exact(text: str) -> str:
    """A number as a fraction, which the library cannot read in another way; others as they are."""
    number = quantities.read(text)
    if number is None or number.percent:
        return text
    return rf"\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"


def _library_says(gold: str, answer: str) -> bool:
    parsed = _parse(_exact(gold)), _parse(_exact(answer))
    return all(parsed) and _library().verify(
        gold=parsed[0],
        target=parsed[1],
        float_rounding=10,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
