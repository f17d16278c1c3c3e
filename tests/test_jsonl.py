"""People's own problems: what a line may hold, and that a wrong one is named."""

import json
import time

import pytest

from opd_jax import domains

GOOD = {"prompt": "3+4=", "answer": "7", "verifier": "integer"}


def write(tmp_path, *lines):
    """A file of lines (objects or raw text); returns its spec."""
    path = tmp_path / "mine.jsonl"
    path.write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in lines),
        encoding="utf-8",
    )
    return f"jsonl:{path}"


def test_fields_and_defaults(tmp_path):
    spec = write(
        tmp_path,
        {**GOOD, "split": "test"},
        "",
        {
            "prompt": "make 6 of 2 3:",
            "answer": {"numbers": [2, 3], "target": 6},
            "verifier": "countdown",
            "level": 2,
            "split": "test",
            "solutions": {"terse": "3*2"},
        },
        {
            "prompt": "Größte Stadt\u2028hier? ",
            "answer": "Wien",
            "verifier": "exact",
            "split": "train",
        },
    )
    first, second = domains.load(spec, "test", [1, 2], "unused")
    assert (first.id, first.level, first.domain, dict(first.solutions)) == (1, 1, spec, {})
    assert (second.id, second.level) == (3, 2)
    assert domains.verify(first, "3+4=7")
    assert domains.verify(second, "2*3")
    assert not domains.verify(second, "6")
    (third,) = domains.load(spec, "train", [1], "unused")
    assert third.prompt == "Größte Stadt\u2028hier? "
    assert domains.verify(third, " Wien")
    assert not domains.verify(third, "Wien.")


def test_splits_by_hash_do_not_depend_on_other_lines(tmp_path):
    lines = [{**GOOD, "prompt": f"question {i}"} for i in range(300)]
    whole = {
        split: {p.prompt for p in domains.load(write(tmp_path, *lines), split, [1], "")}
        for split in domains.SPLITS
    }
    assert sum(map(len, whole.values())) == 300
    assert 190 < len(whole["train"]) < 260
    for split in domains.SPLITS:
        part = {p.prompt for p in domains.load(write(tmp_path, *lines[::-2]), split, [1], "")}
        assert part <= whole[split]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ({"prompt": "a", "answer": "1"}, "missing key 'verifier'"),
        ({**GOOD, "verifier": "interger"}, "unknown verifier 'interger'; did you mean 'integer'"),
        ({**GOOD, "verifier": ["exact"]}, "verifier .* must be a string"),
        ({**GOOD, "solution": {}}, "unknown key 'solution'; did you mean 'solutions'"),
        ({**GOOD, "prompt": 3}, "prompt 3 must be a string"),
        ({**GOOD, "level": 0}, "level 0 must be an integer of at least 1"),
        ({**GOOD, "level": True}, "level True must be"),
        ({**GOOD, "split": "dev"}, "split 'dev' must be one of train, validation, test"),
        ({**GOOD, "solutions": ["7"]}, "must be an object"),
        ({**GOOD, "solutions": {"terse": "8"}}, "solution 'terse' does not verify: '8'"),
        ({**GOOD, "answer": "07"}, "answer '07' is not an integer"),
        ({**GOOD, "answer": " ", "verifier": "exact"}, "answer is empty"),
        ({**GOOD, "answer": "about 7", "verifier": "number"}, "answer 'about 7' is not a number"),
        ({**GOOD, "answer": "", "verifier": "number"}, "answer '' is not a number"),
        ({**GOOD, "answer": "7/0", "verifier": "number"}, "answer '7/0' is not a number"),
        ({**GOOD, "answer": [7], "verifier": "number"}, r"answer '\[7\]' is not a number"),
        ({**GOOD, "verifier": "program"}, "program answer '7' must be"),
        ({**GOOD, "verifier": "program", "answer": {"shown": [], "hidden": []}}, "must be"),
        ({**GOOD, "verifier": "program", "answer": {"shown": [[1]], "hidden": []}}, "must be"),
        ({**GOOD, "verifier": "program", "answer": {"shown": 3, "hidden": []}}, "must be"),
        ({**GOOD, "verifier": "countdown", "answer": "{"}, "countdown answer '{' must be"),
        ({**GOOD, "verifier": "countdown", "answer": {"numbers": [1.5], "target": 1}}, "must be"),
        ({**GOOD, "verifier": "countdown", "answer": {"numbers": 5, "target": 1}}, "must be"),
        ('{"prompt": "\\ud800", "answer": "1", "verifier": "exact"}', "surrogate"),
        ({**GOOD, "prompt": "first", "split": "test"}, "'test' here but in 'train' on line 1"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, message):
    spec = write(tmp_path, {**GOOD, "prompt": "first", "split": "train"}, "", line)
    path = spec.removeprefix("jsonl:")
    with pytest.raises(ValueError, match=f"^{path}, line 3: .*{message}"):
        domains.load(spec, "train", [1], "unused")


def test_files_that_cannot_serve(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*missing\.jsonl"):
        domains.load(f"jsonl:{tmp_path}/missing.jsonl", "train", [1], "unused")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"cannot read .*binary\.jsonl"):
        domains.load(f"jsonl:{binary}", "train", [1], "unused")
    spec = write(tmp_path, {**GOOD, "split": "train"})
    with pytest.raises(ValueError, match="has no test problem of levels"):
        domains.load(spec, "test", [1], "unused")
    with pytest.raises(ValueError, match=r"has no level \[2\]; its levels: \[1\]"):
        domains.load(spec, "train", [2], "unused")


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("18", ["18", "it is 18.", "#### 18", r"so \boxed{18}.", "3, then **18**", "18 eggs"],
         ["", "eighteen", "18 of 20", "1.8", "-18", "118", "18.5", "1\u0668"]),
        ("1430", ["1,430", "1430.0", "$1,430.00.", r"\$1430", "1{,}430", "1.43e3", "€1430"],
         ["1,43", "430", "1430,0", "21,430", "1,430,0", "1,1,430"]),
        (1430, ["1,430"], ["1"]),
        ("-5", ["-5", "x=-5.", "-$5", "$-5", "\u22125", "(-5)"], ["5", "9-5", "(9)-5", "item-5"]),
        ("5", ["9-4=5", "9-5", "2 + 3 = 5."], ["- 4", "-5", "5-4"]),
        ("0.5", [".5", "1/2", r"\frac{1}{2}", r"\dfrac{2}{4}", "5e-1"], ["5", "2", ".05", "1/0"]),
        ("2", ["2", "6/3"], ["1/2", r"\frac{1}{2}", "1e2"]),
        ("1,000", ["1000", "1,000"], ["(1,000,0)", "1"]),
    ],
)  # fmt: skip
def test_r01_r02_the_last_number_counts_whatever_its_form(tmp_path, answer, right, wrong):
    line = {**GOOD, "answer": answer, "verifier": "number", "split": "train"}
    (problem,) = domains.load(write(tmp_path, line), "train", [1], "unused")
    for text in right:
        assert domains.verify(problem, text), text
    for text in wrong:
        assert not domains.verify(problem, text), text


def test_r11_r15_no_text_holds_up_the_number_verifier():
    verifier = domains.VERIFIERS["number"]
    start = time.monotonic()
    for piece in ["1", "1,", "1,000", "1{,}000", "-", "$", "1/", ".1", "1e9", "\\frac{1}{1"]:
        assert not verifier.verify("7", piece * 50_000), piece
    for huge in ("1e999999999", "1" * 5_000, "1/" + "0" * 5_000):
        assert not verifier.verify("7", huge)
    assert verifier.verify("1000", "1e3")
    assert verifier.verify("7", "9" * 5_000 + " 7")
    assert time.monotonic() - start < 5
