"""Stop texts: where a completion ends, by tokens and by text."""

import numpy as np
import pytest

from opd_jax.core.types import Rollout
from opd_jax.data import stopping, tokenizer

NANO = tokenizer.load("nano")
STOP = ("\n\nQ:",)


@pytest.mark.parametrize(
    ("text", "kept", "ends_after"),
    [
        ("42\n\nQ: and?", "42", "42\n\nQ:"),
        ("42\n\nQ:", "42", "42\n\nQ:"),
        ("\n\nQ:42", "", "\n\nQ:"),
        ("42\n\nQ", "42\n\nQ", None),
        ("", "", None),
        ("é\U0001f680\n\nQ:x", "é\U0001f680", "é\U0001f680\n\nQ:"),
    ],
)
def test_t20_text_and_tokens_end_together(text, kept, ends_after):
    ids = NANO.encode(text)
    count = None if ends_after is None else len(NANO.encode(ends_after))
    assert stopping.cut_at_text(NANO, ids, STOP) == (count, kept)


def test_t20_the_first_of_several_stop_texts_counts():
    ids = NANO.encode("a;b.c")
    assert stopping.cut_at_text(NANO, ids, (".", ";")) == (2, "a")
    assert stopping.cut_at_text(NANO, ids, ("b.", ";b")) == (3, "a")


def test_t20_a_rollouts_mask_length_and_stop_agree():
    rows = [NANO.encode("7;9"), [*NANO.encode("7"), NANO.stop_ids[0]], NANO.encode("789")]
    tokens_BR = np.array([row + [0] * (4 - len(row)) for row in rows], np.int32)
    length_B, stopped_B = np.array([3, 2, 3], np.int32), np.array([False, True, False])
    mask_BR = np.arange(4)[None, :] < length_B[:, None]
    before = Rollout(None, tokens_BR, mask_BR, tokens_BR * 0.0, length_B, stopped_B)
    after, text_B = stopping.cut_rollout(NANO, before, (";",))
    assert text_B == ["7", "7", "789"]
    assert after.length_B.tolist() == [2, 2, 3]
    assert after.stopped_B.tolist() == [True, True, False]
    np.testing.assert_array_equal(after.mask_BR, np.arange(4)[None, :] < [[2], [2], [3]])
    assert before.length_B.tolist() == [3, 2, 3]
