"""Published problem sets: read from small files in their public layouts."""

import contextlib
import gzip
import json
import os

import pytest
import tensorflow_datasets as tfds
from etils import epath
from etils.epath import testing

from opd_jax import domains
from opd_jax.domains import sets
from opd_jax.domains.answers import EXACT, NUMBER, Verifier, last_boxed

GSM8K = [
    {
        "question": f"Tom has {n} apples and buys {n + 1} more. How many apples has he now?",
        "answer": f"{n}+{n + 1}=<<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1} apples.\n#### {2 * n + 1:,}",
    }
    for n in range(1, 61)
]


def python_check(answer):
    """Stands for the sandbox's check: the keys of the schema."""
    fields = json.loads(answer)
    assert fields["kind"] == "asserts"
    assert set(fields) <= {"kind", "setup", "entry_point", "prefix", "tests"}
    if not fields["tests"]:
        raise ValueError("no tests")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """Verifiers that need no extra and no sandbox, where the real ones are not there."""
    for name, verifier in {
        "math": Verifier(lambda a, c: a == last_boxed(c) or NUMBER.verify(a, c), EXACT.check),
        "python": Verifier(lambda a, c: "return" in c, python_check),
    }.items():
        monkeypatch.setitem(domains.VERIFIERS, name, verifier)


def lines(path, rows):
    """A file of JSON lines, packed if its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def gsm8k(tmp_path):
    """A folder of the set."""
    lines(tmp_path / "gsm8k/train.jsonl", GSM8K[:50])
    lines(tmp_path / "gsm8k/test.jsonl", GSM8K[50:])
    return str(tmp_path / "gsm8k")


def load(tmp_path, name, split, path, levels=(1,)):
    """One split of a set; built below tmp_path."""
    return domains.load(name, split, levels, str(tmp_path / "data"), path=str(path))


def test_gsm8k(tmp_path, gsm8k):
    splits = {s: load(tmp_path, "gsm8k", s, gsm8k) for s in domains.SPLITS}
    assert len(splits["test"]) == 10
    assert len(splits["train"]) + len(splits["validation"]) == 50
    assert 0 < len(splits["validation"]) < 12
    assert len({p.id for part in splits.values() for p in part}) == 60
    p = splits["test"][-1]
    assert (p.domain, p.level, p.answer, p.verifier) == ("gsm8k", 1, "121", "math")
    assert p.solutions["worked"] == "60+61=121 apples.\n#### 121"
    assert all(domains.verify(p, text) for text in p.solutions.values())
    assert not domains.verify(p, "#### 120")
    # The same folder read as one file: its test problems.
    assert list(load(tmp_path, "gsm8k", "test", gsm8k + "/test.jsonl"))[-1].prompt == p.prompt


def math_row(level, n):
    """A record of MATH whose answer is n/2."""
    return {
        "problem": f"Compute ${n}/2$ of the number that was thought of in round {n}.",
        "level": f"Level {level}",
        "type": "Algebra",
        "solution": f"It is \\boxed{{\\frac{{{n}}}{{2}}}} by \\boxed{{\\dfrac{{{n}}}{{2}}}}.",
    }


def test_math_in_both_layouts_and_by_level(tmp_path):
    for split in ("train", "test"):
        for level in range(1, 6):
            for n in range(20):
                file = tmp_path / f"MATH/{split}/algebra/{level}{n:02}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                row = math_row(level, 100 * level + n + 50 * (split == "test"))
                file.write_text(json.dumps(row))
    hard = load(tmp_path, "math", "test", tmp_path / "MATH", (4, 5))
    assert sorted({p.level for p in hard}) == [4, 5]
    assert len(hard) == 40
    assert hard[0].answer == r"\dfrac{450}{2}"  # The last box, braces balanced.
    assert domains.verify(hard[0], hard[0].solutions["worked"])
    five_hundred = [
        {"problem": p.prompt, "solution": "", "answer": p.answer, "level": p.level, "subject": "x"}
        for p in hard
    ]
    lines(tmp_path / "MATH-500/test.jsonl", five_hundred)
    again = load(tmp_path, "math", "test", tmp_path / "MATH-500", (4, 5))
    assert [(p.prompt, p.answer, p.level) for p in again] == [
        (p.prompt, p.answer, p.level) for p in hard
    ]


def test_train_on_one_set_and_test_on_another(tmp_path):
    train = [math_row(1, n) for n in range(40)]
    lines(tmp_path / "MATH/train.jsonl", train)
    held = [{**math_row(1, 7), "answer": "7/2"}, {**math_row(1, 99), "answer": "99/2"}]
    lines(tmp_path / "MATH-500/test.jsonl", held)
    source = domains.Source(
        "math", (1,), path=str(tmp_path / "MATH"), test_path=str(tmp_path / "MATH-500"),
        near_duplicates=0.9,
    )  # fmt: skip
    splits, report = domains.load_splits(source, str(tmp_path / "data"))
    assert [p.answer for p in splits["test"]] == ["7/2", "99/2"]
    assert not {p.prompt for p in splits["train"]} & {p.prompt for p in splits["test"]}
    assert report["removed"] == {"exact": 1, "near": 0}
    assert report["contaminated"]["test"] == 1


def test_mbpp_sanitized(tmp_path):
    rows = [
        {"source_file": "x", "task_id": n, "prompt": f"Write a function to add {n}.",
         "code": f"def add(x):\n    return x + {n}", "test_imports": ["import math"],
         "test_list": [f"assert add(1) == {n + 1}", f"assert add(0) == {n}"]}
        for n in (2, 11, 510, 511, 600, 601, 974)
    ]  # fmt: skip
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps(rows))
    found = {s: load(tmp_path, "mbpp", s, tmp_path) for s in domains.SPLITS}
    sizes = {s: len(problems) for s, problems in found.items()}
    assert sizes == {"train": 2, "validation": 2, "test": 2}  # Task 2 is a prompt's example.
    p = found["train"][0]
    assert p.prompt == (
        "Write a function to add 601.\nYour code should pass these tests:\n"
        "assert add(1) == 602\nassert add(0) == 601"
    )
    assert json.loads(p.answer) == {
        "kind": "asserts", "setup": "import math",
        "tests": ["assert add(1) == 602", "assert add(0) == 601"],
    }  # fmt: skip
    assert p.solutions["terse"] == "```python\ndef add(x):\n    return x + 601\n```"


@pytest.mark.parametrize("name", ["HumanEval.jsonl.gz", "HumanEvalPlus.jsonl"])
def test_humaneval(tmp_path, name):
    row = {
        "task_id": "HumanEval/0", "prompt": 'def add(x):\n    """Adds one."""\n',
        "entry_point": "add", "canonical_solution": "    return x + 1\n",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    }  # fmt: skip
    lines(tmp_path / name, [row])
    (p,) = load(tmp_path, "humaneval", "test", tmp_path)
    assert json.loads(p.answer) == {
        "kind": "asserts", "entry_point": "add", "prefix": row["prompt"], "tests": row["test"]
    }  # fmt: skip
    assert p.prompt + p.solutions["terse"] == 'def add(x):\n    """Adds one."""\n    return x + 1\n'
    assert domains.verify(p, p.solutions["terse"])
    with pytest.raises(ValueError, match="'humaneval' has no train problem of levels"):
        load(tmp_path, "humaneval", "train", tmp_path)


def test_mathematics_in_its_text_layout(tmp_path):
    regimes = ("train-easy", "train-medium", "train-hard", "interpolate", "extrapolate")
    for level, regime in enumerate(regimes, start=1):
        for module in ("arithmetic__mul", "algebra__linear_1d"):
            file = tmp_path / f"m/{regime}/{module}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(f"What is {module} {level} * {n}?\n{level * n}\n" for n in range(30))
            file.write_text(text)
    spec = "mathematics:arithmetic__mul"
    train = load(tmp_path, spec, "train", tmp_path / "m", (1, 3))
    assert {p.level for p in train} == {1, 3}
    assert {p.prompt.split()[2] for p in train} == {"arithmetic__mul"}
    assert train[0].domain == spec
    test = load(tmp_path, spec, "test", tmp_path / "m", (4, 5))
    assert len(test) == 60
    assert domains.verify(test[0], test[0].answer)
    both = load(tmp_path, "mathematics", "test", tmp_path / "m", (4, 5))
    assert len(both) == 120


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "a", "answer": "7"}, "answer '7' does not end in '#### '"),
        ("gsm8k", {"question": "a", "answer": "x\n#### "}, "answer is empty"),
        ("gsm8k", {"question": "a"}, "missing key 'answer'"),
        ("math", {"problem": "a", "level": "Level 1", "solution": r"\boxed{1"}, "no .*boxed"),
        ("gsm8k", "{", "not valid JSON"),
    ],
)
def test_a_bad_record_is_named_with_file_and_line(tmp_path, name, row, message):
    good = {"gsm8k": GSM8K[0], "math": math_row(1, 1)}[name]
    file = lines(tmp_path / "x/test.jsonl", [good])
    with file.open("a") as out:
        out.write(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(ValueError, match=rf"test\.jsonl, line 2: .*{message}"):
        load(tmp_path, name, "test", tmp_path / "x")
    assert not list((tmp_path / "data").rglob("dataset_info.json"))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="domain 'gsm8k' has no path; give the folder"):
        domains.load("gsm8k", "train", [1], str(tmp_path))
    with pytest.raises(ValueError, match=r"has none of the files train\.jsonl, test\.jsonl"):
        load(tmp_path, "gsm8k", "train", tmp_path)
    with pytest.raises(ValueError, match=r"unknown domain 'gsm9k'; .*gsm8k, math"):
        load(tmp_path, "gsm9k", "train", tmp_path)


def test_other_files_are_another_dataset(tmp_path, gsm8k):
    before = load(tmp_path, "gsm8k", "test", gsm8k)
    lines(epath.Path(gsm8k) / "test.jsonl", GSM8K[55:])
    assert len(load(tmp_path, "gsm8k", "test", gsm8k)) == 5 < len(before)
    folders = [f for f in (tmp_path / "data/opd_sets/opd_gsm8k").iterdir() if f.is_dir()]
    assert len(folders) == 2
    hashes = json.loads(next(folders[0].glob("*/metadata.json")).read_text())["sha256"]
    assert set(hashes) == {"train.jsonl", "test.jsonl"}
    assert all(len(h) == 64 for h in hashes.values())


def test_tfds_builds_the_sets_from_a_manual_folder(tmp_path, gsm8k):
    """What `tfds build` does, without its command-line program, which imports TensorFlow."""
    from opd_jax.domains import tfds_builders

    builder = tfds.builder("opd_gsm8k", data_dir=str(tmp_path), file_format="array_record")
    assert isinstance(builder, tfds_builders.OpdGsm8k)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=gsm8k))
    assert os.path.basename(builder.data_dir) == "1.0.0"
    built = load(tmp_path, "gsm8k", "test", builder.data_dir)
    assert list(built) == list(load(tmp_path, "gsm8k", "test", gsm8k))
    for name in sets.SETS:
        assert tfds.builder_cls(f"opd_{name}").problem_set == name


def test_tfdss_own_gsm8k_is_read_where_it_was_prepared(tmp_path, gsm8k):
    from tensorflow_datasets.text.gsm8k import gsm8k as upstream

    class Local(upstream.Gsm8k, skip_registration=True):
        """TFDS's own builder on local files: it would download them."""

        name, code_path = "gsm8k", None

        def _split_generators(self, dl_manager):
            folder = epath.Path(gsm8k)
            return {s: self._generate_examples(folder / f"{s}.jsonl") for s in ("train", "test")}

    builder = Local(data_dir=str(tmp_path / "tfds"), file_format="array_record")
    builder.download_and_prepare()
    for split in domains.SPLITS:
        theirs, ours = (load(tmp_path, "gsm8k", split, p) for p in (builder.data_dir, gsm8k))
        # TFDS keeps records in the order of their keys' hashes.
        assert sorted((p.prompt, p.answer, str(p.solutions)) for p in theirs) == sorted(
            (p.prompt, p.answer, str(p.solutions)) for p in ours
        )


@contextlib.contextmanager
def bucket(local):
    """gs://bucket is a local folder, for everything that goes through epath."""
    here = str(local)

    def inward(call):
        def mocked(original, path, *args, **kwargs):
            return call(original, str(path).replace("gs://bucket", here), *args, **kwargs)

        return mocked

    direct = inward(lambda original, path, *args, **kwargs: original(path, *args, **kwargs))
    globbed = inward(
        lambda original, path: [f.replace(here, "gs://bucket") for f in original(path)]
    )
    calls = dict.fromkeys(("open", "exists", "isdir", "stat"), direct)
    with testing.mock_epath(glob=globbed, **calls):
        yield "gs://bucket"


def test_files_may_lie_in_a_bucket(tmp_path, gsm8k):
    rows = [{"prompt": "3+4=", "answer": "7", "verifier": "integer", "split": "train"}]
    lines(tmp_path / "mine.jsonl", rows)
    with bucket(tmp_path) as root:
        there = load(tmp_path, "gsm8k", "test", f"{root}/gsm8k")
        (mine,) = domains.load(f"jsonl:{root}/mine.jsonl", "train", [1], "")
    assert [p.prompt for p in there] == [
        p.prompt for p in load(tmp_path / "2", "gsm8k", "test", gsm8k)
    ]
    assert mine.answer == "7"


def test_last_boxed():
    assert last_boxed(r"\boxed{5} or \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{5} and \boxed{6") == "5"
    assert last_boxed("5") is None
