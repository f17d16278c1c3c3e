"""Held-out problems among the training ones: found however they are spaced, removed, counted."""

import time

import numpy as np
import pytest

from opd_jax.data.problem import Problem
from opd_jax.domains import overlap

LONG = "A farmer has seven fields of wheat and sells the grain of two of them for 30 coins each."


def problems(*texts):
    """Problems with these prompts."""
    return [Problem("a", i, 1, text, "1", {}) for i, text in enumerate(texts)]


def separate(train, test, near=0.5, validation=()):
    """Prompts left in training, and the report."""
    splits = {"train": train, "validation": validation, "test": test}
    kept, report = overlap.separate({s: problems(*texts) for s, texts in splits.items()}, near)
    return {s: [p.prompt for p in part] for s, part in kept.items()}, report


def test_words_and_grams():
    assert overlap.words("What's 2+ 2?\n") == ("what", "'", "s", "2", "+", "2", "?")
    assert overlap.grams("one two") == {("one", "two")}
    assert len(overlap.grams("a b c d e f g h i j")) == 3
    assert overlap.grams("a b c d e f g h") == {tuple("abcdefgh")}
    assert overlap.words("ﬁne １") == ("fine", "1")


@pytest.mark.parametrize("near", [0.0, 0.5])
def test_equal_texts_are_removed_from_training_whatever_their_spacing(near):
    kept, report = separate(["2+2?", f"  {LONG.upper()}\n", "else"], [LONG, "2 + 2 ?"], near)
    assert kept["train"] == ["else"]
    assert kept["test"] == [LONG, "2 + 2 ?"]
    assert report["removed"] == {"exact": 2, "near": 0}
    assert report["contaminated"] == {"validation": 0, "test": 2}
    assert report["problems"] == {"train": 1, "validation": 0, "test": 2}


def test_near_duplicates_share_a_part_of_the_smaller_set():
    changed = LONG.replace("coins each", "euros each")
    other = "A farmer has seven cows and three of them give forty litres of milk on every morning."
    kept, report = separate([changed, other, LONG + " How much is that?"], [LONG])
    assert kept["train"] == [other]
    assert report["removed"] == {"exact": 0, "near": 2}
    assert report["contaminated"]["test"] == 1
    # By hand: 20 words and signs, 13 grams; the changed word stands in 3 of them.
    assert len(overlap.grams(LONG)) == 13
    assert [e["shared"] for e in report["examples"]] == [0.769, 1.0]
    kept, report = separate([changed], [LONG], near=0.8)
    assert kept["train"] == [changed]
    assert report["shared"]["test"] == {"problems": 1, "grams": 10 / 13}
    # Control: without, nothing but equal texts is found.
    assert separate([changed], [LONG], near=0.0)[1]["removed"] == {"exact": 0, "near": 0}


def test_numbers_make_another_problem_of_a_short_text():
    kept, _ = separate(["What is 3 + 4?"], ["What is 3 + 5?"])
    assert kept["train"] == ["What is 3 + 4?"]


def test_validation_gives_way_to_test_and_training_to_both():
    kept, report = separate([LONG, "x", "y"], [LONG], validation=[LONG, "x"])
    assert kept == {"train": ["y"], "validation": ["x"], "test": [LONG]}
    assert report["removed"]["exact"] == 3
    assert report["contaminated"] == {"validation": 1, "test": 1}


def test_thousands_of_problems_take_seconds():
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.zipf(1.3, 45) % 3000) for _ in range(6000)]
    start = time.process_time()
    _, report = separate([*texts[:5000], texts[5500] + " more"], texts[5000:])
    assert time.process_time() - start < 20
    assert report["removed"]["near"] >= 1
