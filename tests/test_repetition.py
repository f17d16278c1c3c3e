import types

import jax
import numpy as np
import pytest
from absl import logging

from opd_jax import train
from opd_jax.core import sharding
from opd_jax.repetition import repeated_share

jit = jax.jit(repeated_share, static_argnums=2)


def share(mesh, tokens_BR, length_B, n):
    mask_BR = np.arange(tokens_BR.shape[1])[None, :] < np.asarray(length_B)[:, None]
    return np.asarray(jit(*sharding.put(mesh, (tokens_BR, mask_BR)), n))


def by_hand(row, n):
    """The share by a set of what was seen."""
    grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
    return (len(grams) - len(set(grams))) / max(len(grams), 1)


def test_d20_the_share_of_repeated_ngrams(mesh):
    tokens_BR = np.array([[7, 8, 7, 8, 7], [7, 8, 7, 8, 7], [1, 1, 1, 1, 1], [1, 2, 3, 4, 5]])
    got = share(mesh, tokens_BR.astype(np.int32), [5, 3, 5, 5], 2)
    np.testing.assert_allclose(got, [2 / 4, 0, 3 / 4, 0])
    # What stands in the padding is not read; a row shorter than an n-gram repeats nothing.
    tokens_BR[1, 3:] = [7, 9]
    np.testing.assert_allclose(
        share(mesh, tokens_BR.astype(np.int32), [5, 3, 1, 5], 2), [0.5, 0, 0, 0]
    )
    np.testing.assert_allclose(
        share(mesh, tokens_BR.astype(np.int32), [5, 3, 5, 5], 6), [0, 0, 0, 0]
    )


def test_d20_random_rows_agree_with_a_set(mesh_2x2x2):
    draw = np.random.default_rng(0)
    tokens_BR, length_B = draw.integers(0, 2, (16, 14), np.int32), draw.integers(0, 15, 16)
    want = [by_hand(row[:end].tolist(), 4) for row, end in zip(tokens_BR, length_B, strict=True)]
    assert 0.1 < np.mean(want) < 0.9
    np.testing.assert_allclose(share(mesh_2x2x2, tokens_BR, length_B, 4), want, rtol=1e-6)


@pytest.mark.parametrize(("truncated", "limit", "warned"), [
    (0.95, 0.9, True), (0.9, 0.9, False), (1.0, 1.0, False), (0.5, 0.4, True),
])  # fmt: skip
def test_d20_a_batch_at_the_limit_is_warned_of_once(truncated, limit, warned, monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    stage = types.SimpleNamespace(
        warn_truncated=limit, sampling=types.SimpleNamespace(max_new_tokens=32)
    )
    run = types.SimpleNamespace(warned=False, stage=stage, job=types.SimpleNamespace(name="merge"))
    for step in (3, 4):
        metrics = {"truncated": truncated, "repeated": 0.8}
        train.StageRun._warn_of_loops(run, step, metrics)
    assert len(said) == warned
    for text in said:
        assert "stage merge, step 3" in text
        assert "max_new_tokens=32" in text
        assert "80% of their n-grams" in text
