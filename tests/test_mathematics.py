"""DeepMind's generators as a domain; on a stand-in for the package, which needs a SymPy of 2019."""

import random
import sys
import types

import numpy as np
import pytest

from opd_jax import domains
from opd_jax.domains import mathematics

SPEC = "mathematics:arithmetic__add"


@pytest.fixture
def package(monkeypatch):
    """A package with one module, which draws from both global streams as the real one does."""

    def add(low, high):
        a, b = random.randint(int(low), int(high)), np.random.randint(10)  # noqa: NPY002
        return types.SimpleNamespace(question=f"What is {a} + {b}?", answer=a + b)

    modules = types.ModuleType("mathematics_dataset.modules.modules")
    modules.train = lambda third: {"arithmetic": {"add": lambda: add(*third((0, 300)))}}
    modules.test = lambda: {"arithmetic": {"add": lambda: add(0, 300)}}
    modules.test_extra = lambda: {"arithmetic": {"add_big": lambda: add(1000, 2000)}}
    for name in ("mathematics_dataset", "mathematics_dataset.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mathematics_dataset.modules.modules", modules)
    versions = {"mathematics-dataset": "1.0.1", "sympy": "1.5.1"}
    monkeypatch.setattr(mathematics.importlib.metadata, "version", versions.__getitem__)


def test_levels_are_thirds_of_the_range_and_interpolate_is_test(package, tmp_path):
    source = domains.Source(SPEC, (1, 2, 3, 4), size=60)
    splits, report = domains.load_splits(source, str(tmp_path))
    assert {p.level for p in splits["train"]} == {1, 2, 3}
    assert 4 in {p.level for p in splits["test"]}
    for p in splits["train"]:
        first = int(p.prompt.split()[2])
        assert 100 * (p.level - 1) <= first <= 100 * p.level
        assert domains.verify(p, p.solutions["terse"])
    assert report["removed"] == {"exact": 0, "near": 0}
    assert sum(report["problems"].values()) > 200


def test_the_global_streams_are_left_alone_and_change_nothing(package):
    make = mathematics._modules(1)["arithmetic__add"]
    random.seed(5)
    wanted = random.Random(5).random()
    first = list(mathematics._questions(make, "seed", 50))
    assert random.random() == wanted
    random.seed(6)
    assert list(mathematics._questions(make, "seed", 50)) == first
    assert list(mathematics._questions(make, "another", 50)) != first


def test_errors_name_the_module_and_the_package(package, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown module 'arithmetic__ad'; did you mean"):
        domains.load("mathematics:arithmetic__ad", "train", [1], str(tmp_path))
    monkeypatch.setitem(sys.modules, "mathematics_dataset.modules.modules", None)
    with pytest.raises(ValueError, match=r"mathematics-dataset cannot be imported .* path of the"):
        domains.load(SPEC, "train", [1], str(tmp_path))
