"""Mathematical answers: a labelled set, the places an answer stands in, and hostile ones."""

import importlib.util
import pathlib
import threading

import pytest

from opd_jax.domains import VERIFIERS, math_answers
from opd_jax.domains.math_answers import equal, extract


def labelled():
    """(gold, answer, right) of every answer in the labelled set."""
    gold, found = "", []
    for line in (pathlib.Path(__file__).parent / "math_answers.txt").read_text().splitlines():
        mark, rest = line[:2], line[2:]
        if mark == "= ":
            gold = rest
        elif mark in ("+ ", "- "):
            found += [(gold, answer.strip(), mark == "+ ") for answer in rest.split(" | ")]
    return found


def test_the_labelled_set_is_large_and_has_no_answer_twice():
    pairs = [(gold, answer) for gold, answer, _ in labelled()]
    assert len(pairs) >= 300
    assert len(set(pairs)) == len(pairs)


def test_no_wrong_verdict_in_the_labelled_set():
    wrong = [(g, a, right) for g, a, right in labelled() if equal(gold=g, answer=a) != right]
    assert wrong == []


def test_every_gold_of_the_labelled_set_passes_the_check():
    for gold in {gold for gold, _, _ in labelled()}:
        math_answers.check(gold)


@pytest.mark.parametrize("gold", ["", " ", "$$", "???", "\\frac{1}{", "1)", "=", "\\", "1/0", "#"])
def test_r14_a_gold_that_fails_to_parse_is_an_error_at_load_time(gold):
    with pytest.raises(ValueError, match="math answer"):
        VERIFIERS["math"].check(gold)
    # And if it is there all the same, nothing is worth anything against it.
    assert not equal(gold=gold, answer="5")
    assert not equal(gold=gold, answer="") or gold.strip("$ ")


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'opd_jax\[math\]'"):
        VERIFIERS["math"].check("5")


def both(gold, right, wrong):
    for answer in right:
        assert equal(gold=gold, answer=answer), (gold, answer)
    for answer in wrong:
        assert not equal(gold=gold, answer=answer), (gold, answer)


def test_r01_equal_answers_in_another_form():
    for gold, answer in (
        (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), (r"-\frac12", r"\frac{-1}{2}"),
        (r"\sqrt8", r"2\sqrt2"), ("2^{10}", "1024"), (r"1\frac12", "1.5"), ("x=5", "5"),
    ):  # fmt: skip
        both(gold, [answer], [])
        both(answer, [gold], [])
    both("3.14", [], [r"\pi"])
    both("0.3333", [], ["1/3"])


def test_r02_thousands_separators():
    both("1000", ["1,000", "1{,}000"], [])
    both("(1,2)", [], ["12"])
    both("{1,2}", [], ["12"])


def test_r03_percent_and_units():
    both(r"28\%", ["28 percent", r"28\%", "28", "0.28"], ["2.8"])
    both("10 cm", ["10"], ["10 m"])
    both(r"90^\circ", ["90"], [])


def test_r04_nested_braces_do_not_cut_the_answer():
    verify = math_answers.verify
    assert not verify(r"\frac{1}{3}", r"\boxed{\frac{1}{2}}")
    assert verify(r"\frac{1}{3}", r"so \boxed{\frac{1}{3}}")
    assert not verify(r"\frac{12}{3}", r"\boxed{\frac{1}{23}}")
    for unclosed in (r"\boxed{\frac{1}{3}", r"\boxed{", r"\boxed{5", r"\boxed", r"\boxed}5{"):
        assert math_answers.last_box(unclosed) is None
        assert not verify(r"\frac{1}{3}", unclosed)
    assert math_answers.last_box(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert verify("{1,2}", r"\boxed{\{2,1\}}")
    assert math_answers.last_box(r"\boxed{\boxed{5}}") == r"\boxed{5}"


def test_r05_of_several_boxes_the_last_counts():
    text = r"first \boxed{5}, or rather \boxed{7}"
    assert math_answers.verify("7", text)
    assert not math_answers.verify("5", text)
    many = " ".join(rf"\boxed{{{i}}}" for i in range(1, 21))
    assert not any(math_answers.verify(str(i), many) for i in range(1, 21))
    assert math_answers.verify(
        "20", r"\boxed{20} " * 20
    )  # Control: the same one again is no guess.
    assert not math_answers.verify("5", r"\boxed{5 or 7}")


def test_r06_other_wrappers():
    verify = math_answers.verify
    assert verify("42", r"\fbox{42}")
    assert verify("E", r"\boxed{\text{E}}")
    assert verify("E", r"\boxed{E: long text}")
    assert not verify("E", r"\boxed{A: like E}")


def test_r07_gold_and_answer_go_by_name():
    assert equal(gold="0<x<12.5", answer="(0,12.5)")
    with pytest.raises(TypeError):
        equal("0<x<12.5", "(0,12.5)")
    # The library is not symmetric, so it must be handed the two the right way round.
    assert equal(gold="x=5", answer="5")
    assert equal(gold="5", answer="x=5")
    assert equal(gold="10 cm", answer="10")


def test_r08_a_part_of_all_is_not_all():
    both("{1331,1728}", ["1728, 1331", "1331 and 1728"], ["1728", "1331,1728,5"])


def test_r11_scientific_notation():
    forms = ["1e-3", "0.001", "10^{-3}", r"1\times10^{-3}"]
    for gold in forms:
        both(gold, forms, ["-3", "1e3"])


def test_r13_order_matters_for_tuples_and_not_for_sets():
    both("(1,2)", ["(1,2)"], ["(2,1)"])
    both("{1,2}", ["{2,1}"], ["(2,1)"])


def test_r15_what_is_too_deep_or_too_long_is_never_parsed(monkeypatch):
    monkeypatch.setattr(math_answers, "_library_says", lambda *_: pytest.fail("parsed"))
    for answer in ("(" * 2000 + "1" + ")" * 2000, "{" * 41 + "1" + "}" * 41, "1+" * 600 + "1",
                   "9" * 5000):  # fmt: skip
        assert not equal(gold="5", answer=answer)


def test_r16_works_in_a_thread():
    found = []
    thread = threading.Thread(
        target=lambda: found.append(math_answers.verify(r"2\sqrt{2}", r"\boxed{\sqrt{8}}"))
    )
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(("text", "found"), [
    (r"so \boxed{5}.", "5"),
    ("steps\n#### 1,234\n", "1,234"),
    ("The answer is 5.", "5"),
    ("The answer is $\\frac{1}{2}$ because", r"\frac{1}{2}"),
    ("Answer: 5.5 apples. Done.", "5.5 apples"),
    ("**Answer:** 12", "12"),
    ("the answer is 3. No, the answer is 4.", "4"),
    ("The answers are 3 and 4", "3 and 4"),
    (r"The answer is 7, so \boxed{8} #### 9", "8"),  # The order of the extractors decides.
    ("#### 9\nThe answer is 7.", "9"),
    ("####", None),
    ("5", None),
    ("I do not know", None),
    ("", None),
])  # fmt: skip
def test_where_an_answer_stands(text, found):
    assert extract(text, ("boxed", "hashes", "answer_is")) == found


def test_the_places_are_configurable():
    text = r"\boxed{8} #### 9"
    assert extract(text, ("hashes", "boxed")) == "9"
    assert extract("5", ("boxed", "whole")) == "5"
    assert extract(text, ("answer_is",)) is None


def test_extraction_is_linear_in_the_text():
    import time

    start = time.monotonic()
    for piece in (r"\boxed{", "}", "####", "answer is ", r"\boxed{1}", "$", "{", "\\", "answer: $"):
        extract(piece * 50_000, ("boxed", "hashes", "answer_is", "whole"))
    assert time.monotonic() - start < 10
