"""Masked statistics, KL estimators and ratios: worked by hand, or by summing over all tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax.core import sharding
from opd_jax.objectives import estimators as est
from opd_jax.objectives.opd import forward_kl, reverse_kl

P = jnp.array([0.7, 0.2, 0.1])
R = jnp.array([0.5, 0.25, 0.25])
REVERSE = [0.166040, -0.064483, -0.101556]  # ∇_z KL(p || r), p = softmax(z).
FORWARD = [0.2, -0.05, -0.15]  # ∇_z KL(r || p).


def expected(per_token, z_V, sampled_from=None):
    """E_y[per_token(log p)], y enumerated; the sampling itself is not differentiated."""
    logp_V = jax.nn.log_softmax(z_V)
    p_V = jnp.exp(logp_V) if sampled_from is None else sampled_from
    return jnp.sum(jax.lax.stop_gradient(p_V) * per_token(logp_V))


def value_and_gradient(per_token):
    return jax.value_and_grad(lambda z_V: expected(per_token, z_V))(jnp.log(P))


def test_the_reference_gradients_are_those_of_the_exact_divergences():
    np.testing.assert_allclose(jax.grad(reverse_kl)(jnp.log(P), jnp.log(R)), REVERSE, atol=1e-6)
    np.testing.assert_allclose(jax.grad(forward_kl)(jnp.log(P), jnp.log(R)), FORWARD, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mean", "raw_gradient"),
    [("k1", 0.099273, [0, 0, 0]), ("k2", 0.086583, REVERSE), ("k3", 0.099273, FORWARD)],
)
def test_n04_penalty_has_the_estimators_value_and_the_reverse_kl_gradient(kind, mean, raw_gradient):
    value, grad = value_and_gradient(lambda logp: est.kl_penalty(logp, jnp.log(R), kind))
    assert float(value) == pytest.approx(mean, abs=1e-6)
    np.testing.assert_allclose(grad, REVERSE, atol=1e-6)
    # What the estimator as it stands would do under jax.grad.
    value, grad = value_and_gradient(lambda logp: est.kl_estimate(logp, jnp.log(R), kind))
    assert float(value) == pytest.approx(mean, abs=1e-6)
    np.testing.assert_allclose(grad, raw_gradient, atol=1e-6)


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_n06_each_name_is_one_estimator(kind, value):
    logp, ref_logp = jnp.array(-1.0), jnp.array(-1.5)
    assert float(est.kl_estimate(logp, ref_logp, kind)) == pytest.approx(value, abs=1e-6)
    assert float(est.kl_penalty(logp, ref_logp, kind)) == pytest.approx(value, abs=1e-6)


def test_n06_unknown_estimator_is_an_error():
    for function in (est.kl_estimate, est.kl_penalty):
        with pytest.raises(ValueError, match="'k4'; one of k1, k2, k3"):
            function(jnp.zeros(1), jnp.zeros(1), "k4")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_penalty_is_finite_and_its_slope_bounded_far_from_the_reference(kind):
    for logp, ref_logp in [(0.0, -1e4), (-1e4, 0.0), (0.0, -np.inf)]:
        value, grad = jax.value_and_grad(est.kl_penalty)(
            jnp.float32(logp), jnp.float32(ref_logp), kind
        )
        assert np.isfinite(value)
        assert grad == (20 if logp > ref_logp else -20)


def test_penalty_sends_no_gradient_to_the_reference():
    grad = jax.grad(est.kl_penalty, argnums=1)(jnp.float32(-1), jnp.float32(-2), "k3")
    assert grad == 0


@pytest.mark.parametrize("padding", [0.0, 1e10, np.nan, np.inf, -np.inf])
def test_n22_whitening_never_sees_padding(padding):
    x = jnp.array([[1, 2, padding, padding], [3, 4, 5, padding]])
    mask = jnp.array([[1, 1, 0, 0], [1, 1, 1, 0]], jnp.bool_)
    np.testing.assert_allclose(
        est.whiten(x, mask),
        [[-1.414214, -0.707107, 0, 0], [0, 0.707107, 1.414214, 0]],
        atol=1e-6,
    )
    assert est.masked_mean(x, mask) == 3


@pytest.mark.parametrize("ddof", [0, 1])
def test_n23_whitening_of_one_token_or_none_is_zero(ddof):
    x = jnp.array([3.0, 7.0, np.nan])
    for mask in ([1, 0, 0], [0, 0, 0]):
        white = est.whiten(x, jnp.array(mask, jnp.bool_), ddof=ddof)
        np.testing.assert_array_equal(white, [0, 0, 0])


def test_whitening_of_equal_values_is_exactly_zero():
    x = jnp.full(8, 0.2)
    np.testing.assert_array_equal(est.whiten(x, jnp.ones(8, jnp.bool_)), np.zeros(8))


def test_n25_whitening_uses_all_shards_also_an_empty_one():
    x = np.array([[1, 2], [3, 6], [9, 9], [9, 9]], np.float32)
    mask = np.array([[1, 1], [1, 1], [0, 0], [0, 0]], np.bool_)
    mesh = sharding.make_mesh(4, 1, 1, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        white = jax.jit(est.whiten)(*sharding.put(mesh, (x, mask)))
    want = [[-1.069045, -0.534522], [0, 1.603567], [0, 0], [0, 0]]
    np.testing.assert_allclose(np.asarray(white), want, atol=1e-6)
    per_shard = est.whiten(jnp.asarray(x[:1]), jnp.asarray(mask[:1]))
    np.testing.assert_allclose(per_shard, [[-1, 1]], atol=1e-6)


def test_n34_a_sequence_ratio_adds_up_what_a_token_ratio_does_not_see():
    new_BR, old_BR = jnp.full((1, 100), -1.0), jnp.full((1, 100), -1.012)
    mask_BR = jnp.ones((1, 100), jnp.bool_)
    assert est.ratio(new_BR, old_BR)[0, 0] == pytest.approx(1.012072, abs=1e-6)
    assert est.sequence_ratio(new_BR, old_BR, mask_BR)[0, 0] == pytest.approx(3.320117, abs=1e-4)
    for level, share in [("token", 1.0), ("sequence", 0.0)]:
        weight_BR, kept_BR = est.gated_importance(
            new_BR, old_BR, mask_BR, low=0, high=3, level=level
        )
        assert kept_BR.mean() == share
        np.testing.assert_array_equal(weight_BR != 0, kept_BR)


def test_a_gate_drops_both_sides_and_never_keeps_padding():
    old_BR = jnp.zeros((2, 3))
    new_BR = jnp.log(jnp.array([[0.4, 1.0, 2.5], [1.5, 1.5, 99]]))
    mask_BR = jnp.array([[1, 1, 1], [1, 1, 0]], jnp.bool_)
    gate = {"low": 0.5, "high": 2.0}
    token_BR, kept_BR = est.gated_importance(new_BR, old_BR, mask_BR, level="token", **gate)
    np.testing.assert_allclose(token_BR, [[0, 1, 0], [1.5, 1.5, 0]], rtol=1e-6)
    np.testing.assert_array_equal(kept_BR, [[0, 1, 0], [1, 1, 0]])
    row_BR, _ = est.gated_importance(new_BR, old_BR, mask_BR, level="sequence", **gate)
    np.testing.assert_allclose(row_BR, [[1, 1, 1], [0, 0, 0]], rtol=1e-6)  # 1.0 and 2.25.


@pytest.mark.parametrize("padding", [5.0, 1e10, np.nan])
def test_a_sequence_ratio_is_of_kept_tokens_only(padding):
    new_BR = jnp.log(jnp.array([[1.2, 1.5, 1.0]])).at[0, 2].set(padding)
    mask_BR = jnp.array([[True, True, False]])
    value, grad = jax.value_and_grad(
        lambda x: est.sequence_ratio(x, jnp.zeros((1, 3)), mask_BR)[0, 0]
    )(new_BR)
    assert float(value) == pytest.approx(1.8, rel=1e-6)
    np.testing.assert_allclose(grad, [[1.8, 1.8, 0]], rtol=1e-6)


def test_importance_weights_correct_the_sampler_until_the_cap_bites():
    mu_V, signal_V, z_V = jnp.array([0.3, 0.3, 0.4]), jnp.array([1.0, -2.0, 0.5]), jnp.log(P)

    def gradient(cap):
        def per_token(logp_V):
            return est.truncated_importance(logp_V, jnp.log(mu_V), cap) * signal_V * logp_V

        return jax.grad(lambda z_V: expected(per_token, z_V, sampled_from=mu_V))(z_V)

    exact = jax.grad(lambda z_V: jnp.sum(jax.nn.softmax(z_V) * signal_V))(z_V)
    np.testing.assert_allclose(gradient(3.0), exact, atol=1e-6)  # Largest ratio: 7/3.
    assert np.abs(gradient(2.0) - exact).max() > 0.02


def test_truncated_importance_is_a_capped_constant():
    trainer, sampler = jnp.log(jnp.array([0.9, 0.1])), jnp.log(jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(est.truncated_importance(trainer, sampler, 2), [2, 0.5], rtol=1e-6)
    grad = jax.grad(lambda x: est.truncated_importance(x, sampler, 2).sum())(trainer)
    assert not np.asarray(grad).any()


def test_bad_arguments_are_named():
    x, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), jnp.bool_)
    with pytest.raises(ValueError, match=r"\[1, 2\].*\[2\]"):
        est.ratio(x, jnp.zeros(2))
    with pytest.raises(ValueError, match="ddof=2"):
        est.whiten(x, mask, ddof=2)
    with pytest.raises(ValueError, match="cap=0"):
        est.truncated_importance(x, x, 0)
    with pytest.raises(ValueError, match="low=2, high=1"):
        est.gated_importance(x, x, mask, low=2, high=1, level="token")
    with pytest.raises(ValueError, match="'row'; one of token, sequence"):
        est.gated_importance(x, x, mask, low=0, high=2, level="row")
