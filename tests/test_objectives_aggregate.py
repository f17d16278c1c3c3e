"""Aggregation: worked examples, additivity over micro-batches and devices, safe padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax.core import sharding
from opd_jax.objectives.aggregate import AGGREGATIONS, keep, token_weights, weighted_sum
from opd_jax.objectives.estimators import kl_penalty
from opd_jax.objectives.grpo import policy_gradient_terms
from opd_jax.objectives.opd import sampled_token_advantage, topk_reverse_kl
from opd_jax.objectives.sft import nll_terms

CONSTANT = {"constant-norm": 16.0}
MODES = sorted(AGGREGATIONS)

jitted_weights = jax.jit(token_weights, static_argnames=("mode", "constant", "empty_rows"))


def weights(mask_BR, mode, **options):
    return jitted_weights(jnp.asarray(mask_BR), mode, constant=CONSTANT.get(mode), **options)


def rows(lengths, columns):
    return np.arange(columns)[None, :] < np.asarray(lengths)[:, None]


def per_row(values, columns):
    return np.repeat(np.array(values, np.float32)[:, None], columns, axis=1)


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("token-mean", 26 / 10),
        ("seq-mean-token-mean", 2.0),
        ("seq-mean-token-sum", 13.0),
        ("constant-norm", 26 / 32),
    ],
)
def test_n17_loss_types_differ_as_their_formulas_do(mode, loss):
    w_BR = weights(rows([2, 8], 16), mode)
    assert weighted_sum(w_BR, per_row([1, 3], 16)) == pytest.approx(loss, rel=1e-6)


@jax.jit
@jax.value_and_grad
def squared_nll(logp_BR, w_BR):
    return weighted_sum(w_BR, nll_terms(logp_BR) ** 2)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("mode", MODES)
def test_n14_micro_batches_add_up(mode, micro_batches):
    mask_BR = rows([1, 9, 3, 0, 4, 7, 2, 2, 9, 5], 9)
    w_BR = np.asarray(weights(mask_BR, mode))
    logp_BR = -np.random.default_rng(0).random(mask_BR.shape, np.float32)

    whole, whole_grad = squared_nll(logp_BR, w_BR)
    parts = [
        squared_nll(*part)
        for part in zip(*(np.split(x, micro_batches) for x in (logp_BR, w_BR)), strict=True)
    ]
    assert sum(value for value, _ in parts) == pytest.approx(float(whole), abs=1e-6)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts]), whole_grad, atol=1e-6)


def test_n14_mean_of_micro_batch_means_is_another_number():
    mask_BR, loss_BR = rows([1, 9], 9), per_row([2, 1], 9)
    right = weighted_sum(weights(mask_BR, "token-mean"), loss_BR)
    wrong = np.mean(
        [
            weighted_sum(weights(mask_BR[i : i + 1], "token-mean"), loss_BR[i : i + 1])
            for i in (0, 1)
        ]
    )
    assert right == pytest.approx(1.1, rel=1e-6)
    assert wrong == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_n16_rows_may_land_on_any_device_in_any_order(mode):
    rng = np.random.default_rng(0)
    mask_BR = np.asarray(rows(range(1, 9), 8))
    x_BR = rng.normal(size=(8, 8)).astype(np.float32)

    def loss(x_BR, mask_BR):
        return weighted_sum(weights(mask_BR, mode), x_BR**2)

    step = jax.jit(jax.value_and_grad(loss))
    expected, expected_grad = jax.tree.map(np.asarray, step(x_BR, mask_BR))
    for devices in (2, 4):
        order = rng.permutation(8)
        mesh = sharding.make_mesh(devices, 1, 1, devices=jax.devices()[:devices])
        with jax.set_mesh(mesh):
            batch = sharding.put(mesh, (x_BR[order], mask_BR[order]))
            value, grad = step(*batch)
        assert float(value) == pytest.approx(float(expected), rel=1e-6)
        np.testing.assert_allclose(np.asarray(grad), expected_grad[order], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_d18_a_batch_repeated_k_times_has_the_same_loss(mode):
    mask_BR = rows([3, 1, 0, 5], 5)
    loss_BR = np.random.default_rng(1).normal(size=(4, 5))
    once = weighted_sum(weights(mask_BR, mode), loss_BR)
    for k in (2, 3):
        again = weighted_sum(weights(np.tile(mask_BR, (k, 1)), mode), np.tile(loss_BR, (k, 1)))
        assert float(again) == pytest.approx(float(once), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_m06_a_batch_without_any_kept_token_has_loss_and_gradient_zero(mode):
    mask_BR = jnp.zeros((3, 4), jnp.bool_)

    def loss(logp_BR):
        return weighted_sum(weights(mask_BR, mode), nll_terms(keep(mask_BR, logp_BR)))

    value, grad = jax.value_and_grad(loss)(jnp.full((3, 4), -jnp.inf))
    assert value == 0
    assert not np.asarray(grad).any()


@pytest.mark.parametrize(
    ("mode", "skipped", "counted"),
    [
        ("token-mean", 1.75, 1.75),
        ("seq-mean-token-mean", 1.5, 1.0),
        ("seq-mean-token-sum", 3.5, 7 / 3),
        ("constant-norm", 7 / 32, 7 / 48),
    ],
)
def test_rows_without_a_kept_token_count_only_if_asked(mode, skipped, counted):
    mask_BR, loss_BR = rows([1, 3, 0], 4), per_row([1, 2, 5], 4)
    assert weighted_sum(weights(mask_BR, mode), loss_BR) == pytest.approx(skipped)
    assert weighted_sum(weights(mask_BR, mode, empty_rows=True), loss_BR) == pytest.approx(counted)


@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_and_columns_change_nothing(mode):
    mask_BR = rows([3, 1], 4)
    padded_BR = np.pad(mask_BR, ((0, 3), (0, 2)))
    np.testing.assert_array_equal(
        weights(padded_BR, mode), np.pad(weights(mask_BR, mode), ((0, 3), (0, 2)))
    )


def test_n07_a_kl_penalty_is_averaged_over_kept_tokens_only():
    mask_BR = jnp.array([[True, True, False, False]])
    kl_BR = jnp.array([[1.0, 1.0, 9.0, 9.0]])
    loss = weighted_sum(weights(mask_BR, "token-mean"), 0 + 0.1 * kl_BR)
    assert loss == pytest.approx(0.1)
    assert float(0.1 * kl_BR.mean()) == pytest.approx(0.5)  # What an unmasked mean gives.


@pytest.mark.parametrize("padding", [0.0, -200.0, -1e10, np.nan, np.inf, -np.inf])
def test_n10_an_overflow_at_a_padded_token_stays_there(padding):
    mask_BR = jnp.array([[True, True, False]])
    old_BR = jnp.array([[0.0, 0.0, padding]])
    w_BR = weights(mask_BR, "seq-mean-token-sum")

    def loss(new_BR, clean):
        return weighted_sum(w_BR, jnp.exp(clean(new_BR) - clean(old_BR)))

    new_BR = jnp.array([[-1.0, -2.0, 0.0]])
    value, grad = jax.value_and_grad(loss)(new_BR, lambda x: keep(mask_BR, x))
    assert value == pytest.approx(0.503215, abs=1e-6)
    np.testing.assert_allclose(grad, [[0.367879, 0.135335, 0]], atol=1e-6)
    if padding == -200:  # Without `keep` the value survives and the gradient does not.
        value, grad = jax.value_and_grad(loss)(new_BR, lambda x: x)
        assert value == pytest.approx(0.503215, abs=1e-6)
        assert np.isnan(grad[0, 2])


# Every loss, from raw inputs to a scalar: for the tests of what padding may hold.
def grpo_loss(x, mask_BR, w_BR, clean):
    x = {name: clean(mask_BR, value) for name, value in x.items()}
    terms = policy_gradient_terms(
        x["logp"], x["old"], x["advantage"], clip_low=0.2, clip_high=0.28, dual_clip=3.0
    )
    return weighted_sum(w_BR, terms.loss_BR + 0.1 * kl_penalty(x["logp"], x["teacher"], "k3"))


def opd_loss(x, mask_BR, w_BR, clean):
    x = {name: clean(mask_BR, value) for name, value in x.items()}
    advantage_BR = sampled_token_advantage(x["teacher"], x["old"])
    terms = policy_gradient_terms(x["logp"], x["old"], advantage_BR, clip_low=0.2, clip_high=0.2)
    return weighted_sum(w_BR, terms.loss_BR)


def topk_loss(x, mask_BR, w_BR, clean):
    x = {name: clean(mask_BR, value) for name, value in x.items()}
    student_BRk = jnp.stack([x["logp"], x["old"]], axis=-1)
    teacher_BRk = jnp.stack([x["teacher"], x["advantage"] - 9], axis=-1)
    return weighted_sum(w_BR, topk_reverse_kl(student_BRk, teacher_BRk, mode="tail_bucket"))


def sft_loss(x, mask_BR, w_BR, clean):
    return weighted_sum(w_BR, nll_terms(clean(mask_BR, x["logp"])))


LOSSES = {"grpo": grpo_loss, "opd": opd_loss, "topk": topk_loss, "sft": sft_loss}


def batch_with(padding, mask_BR):
    rng = np.random.default_rng(0)
    return {
        name: np.where(mask_BR, rng.uniform(-1, 0, mask_BR.shape), padding).astype(np.float32)
        for name in ("logp", "old", "teacher", "advantage")
    }


@partial(jax.jit, static_argnames=("name", "clean"))
def loss_and_gradient(x, mask_BR, w_BR, name, clean=keep):
    return jax.value_and_grad(LOSSES[name])(x, mask_BR, w_BR, clean)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_n35_padding_is_never_read(name, mode):
    mask_BR = rows([5, 0, 2, 1], 5)
    w_BR = weights(mask_BR, mode)
    expected = loss_and_gradient(batch_with(0.0, mask_BR), mask_BR, w_BR, name)
    noise_BR = np.random.default_rng(9).normal(size=mask_BR.shape)
    for padding in (noise_BR, -1e10, 1e10, np.nan, np.inf, -np.inf):
        got = loss_and_gradient(batch_with(padding, mask_BR), mask_BR, w_BR, name)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_n35_would_notice_a_loss_that_reads_padding():
    mask_BR = rows([5, 0, 2, 1], 5)
    w_BR = weights(mask_BR, "token-mean")
    x = batch_with(np.nan, mask_BR)
    _, grad = loss_and_gradient(x, mask_BR, w_BR, "grpo", clean=lambda _, value: value)
    assert np.isnan(grad["logp"]).any()


def test_m20_tokens_the_policy_did_not_choose_are_in_no_term():
    mask_BR = np.array([[True, True, False, False, True]])
    w_BR = weights(mask_BR, "token-mean")
    _, grad = loss_and_gradient(batch_with(-3.0, mask_BR), mask_BR, w_BR, "grpo")
    np.testing.assert_array_equal(np.asarray(grad["logp"]) != 0, mask_BR)
    np.testing.assert_allclose(w_BR, [[1 / 3, 1 / 3, 0, 0, 1 / 3]])


def test_bad_arguments_are_named():
    mask_BR = jnp.ones((2, 3), jnp.bool_)
    with pytest.raises(ValueError, match=r"'token'; one of token-mean, seq-mean"):
        token_weights(mask_BR, "token")
    with pytest.raises(ValueError, match="'constant-norm' needs one"):
        token_weights(mask_BR, "constant-norm")
    with pytest.raises(ValueError, match="constant=16"):
        token_weights(mask_BR, "token-mean", constant=16)
    with pytest.raises(ValueError, match="constant=0"):
        token_weights(mask_BR, "constant-norm", constant=0)
    with pytest.raises(ValueError, match="bool"):
        token_weights(mask_BR.astype(jnp.float32), "token-mean")
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 4\]"):
        weighted_sum(jnp.ones((2, 3)), jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="does not fit"):
        keep(mask_BR, jnp.ones((3, 3)))
