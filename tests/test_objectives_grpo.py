"""GRPO: advantages by hand, the clip table, expected gradients by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax.core import sharding
from opd_jax.objectives.aggregate import token_weights, weighted_sum
from opd_jax.objectives.grpo import (
    VARIANTS,
    group_advantages,
    group_advantages_by_id,
    policy_gradient_terms,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


jitted_advantages = jax.jit(group_advantages, static_argnames=("scale", "ddof", "eps"))


def advantages(rewards, **options):
    return jitted_advantages(jnp.asarray(rewards, jnp.float32), **{"scale": "std"} | options)


def terms_at(ratio, advantage, **options):
    """The terms of one token whose ratio is given."""
    logp_BR, old_BR, advantage_BR = np.array([np.log(ratio), 0, advantage], np.float32).reshape(
        3, 1, 1
    )
    return jax.jit(lambda *xs: policy_gradient_terms(*xs, **CLIP | options))(
        logp_BR, old_BR, advantage_BR
    )


# Advantages.


@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.7])
def test_n18_equal_rewards_have_no_advantage_at_all(reward, scale):
    advantage_Pn, zero_variance_P = advantages([[reward] * 8, [0, 1] * 4], scale=scale)
    np.testing.assert_array_equal(advantage_Pn[0], np.zeros(8))
    np.testing.assert_array_equal(zero_variance_P, [True, False])


def test_n18_would_notice_a_plain_mean():
    reward_n = np.full(8, 0.2, np.float32)
    total = np.float32(0)
    for r in reward_n:  # In the order a sequential reduction takes them.
        total += r
    deviation_n = reward_n - total / np.float32(8)
    naive_n = deviation_n / (np.sqrt(np.mean(deviation_n**2)) + 1e-8)
    assert abs(naive_n[0]) > 0.5


@pytest.mark.parametrize(
    ("options", "first", "others"),
    [
        ({"scale": "std", "ddof": 0}, 1.732047, -0.577349),
        ({"scale": "std", "ddof": 1}, 1.499997, -0.499999),
        ({"scale": "std"}, 1.499997, -0.499999),  # The default is the sample's.
        ({"scale": "none"}, 0.75, -0.25),
    ],
)
def test_n21_population_or_sample_std(options, first, others):
    advantage_Pn, _ = advantages([[1, 0, 0, 0]], **options)
    np.testing.assert_allclose(advantage_Pn, [[first, others, others, others]], atol=1e-6)


def test_batch_std_divides_every_group_by_the_same_number():
    rewards = [[1, 0, 0, 0], [1, 1, 1, 0]]
    advantage_Pn, _ = advantages(rewards, scale="batch_std", ddof=0)
    want = (np.array(rewards) - [[0.25], [0.75]]) / (0.5 + 1e-6)
    np.testing.assert_allclose(advantage_Pn, want, rtol=1e-6)


def test_m08_a_truncated_row_counts_in_the_baseline_unless_declared_invalid():
    every, _ = advantages([[1, 0, 0, 0]], scale="none")
    np.testing.assert_allclose(every, [[0.75, -0.25, -0.25, -0.25]])
    valid_Pn = jnp.array([[True, True, True, False]])
    three, _ = advantages([[1, 0, 0, np.nan]], scale="none", valid_Pn=valid_Pn)
    np.testing.assert_allclose(three, [[2 / 3, -1 / 3, -1 / 3, 0]], rtol=1e-6)


def test_a_group_without_valid_rows_or_of_one_row_has_no_advantage():
    advantage_Pn, zero_variance_P = advantages([[1, 0]], valid_Pn=jnp.zeros((1, 2), jnp.bool_))
    np.testing.assert_array_equal(advantage_Pn, [[0, 0]])
    assert zero_variance_P[0]
    np.testing.assert_array_equal(advantages([[1], [0]])[0], [[0], [0]])


def test_m24_statistics_are_of_the_prompts_own_group():
    reward_B = np.array([1.0, 1.0, 0.0, 0.0])  # Rows A, A, B, B.
    advantage_Pn, zero_variance_P = advantages(reward_B.reshape(2, 2), ddof=0)
    np.testing.assert_array_equal(advantage_Pn, np.zeros((2, 2)))
    assert zero_variance_P.all()
    wrong, _ = advantages(reward_B.reshape(2, 2).T, ddof=0)  # Rows taken as A, B, A, B.
    np.testing.assert_allclose(np.abs(wrong), np.ones((2, 2)), rtol=1e-5)


@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
def test_m24_shuffled_rows_with_group_ids_keep_their_advantages(scale):
    rng = np.random.default_rng(0)
    reward_Pn, order = rng.random((3, 4), np.float32), rng.permutation(12)
    reward_Pn[1] = 0.2
    want_Pn, want_zero_P = advantages(reward_Pn, scale=scale)
    by_id = jax.jit(group_advantages_by_id, static_argnames=("groups", "scale"))
    got_B, zero_P = by_id(
        reward_Pn.reshape(12)[order], np.repeat(np.arange(3), 4)[order], 3, scale=scale
    )
    np.testing.assert_allclose(got_B, np.reshape(want_Pn, 12)[order], atol=1e-6)
    np.testing.assert_array_equal(zero_P, want_zero_P)
    assert not np.asarray(got_B)[np.isin(order, range(4, 8))].any()


def test_advantages_on_a_sharded_batch_equal_those_on_one_device():
    reward_Pn = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    group_B = np.repeat(np.arange(8), 4)
    mesh = sharding.make_mesh(2, 2, 2)
    want, _ = advantages(reward_Pn, scale="batch_std")
    with jax.set_mesh(mesh):
        got, _ = jax.jit(lambda r: group_advantages(r, scale="batch_std"))(
            sharding.put(mesh, reward_Pn)
        )
        by_id, _ = jax.jit(lambda r, g: group_advantages_by_id(r, g, 8, scale="batch_std"))(
            *sharding.put(mesh, (reward_Pn.reshape(32), group_B))
        )
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(by_id).reshape(8, 4), want, rtol=1e-5, atol=1e-6)


# The clipped term.


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "clipped"),
    [
        (1.5, 1, 1.28, True),
        (1.5, -1, -1.5, False),
        (0.5, 1, 0.5, False),
        (0.5, -1, -0.8, True),
        (1.25, 1, 1.25, False),
        (1.0, 0, 0.0, False),
    ],
)
def test_n30_clip_range_and_sign_table(ratio, advantage, objective, clipped):
    terms = terms_at(ratio, advantage)
    assert float(-terms.loss_BR[0, 0]) == pytest.approx(objective, abs=1e-6)
    assert float(terms.ratio_BR[0, 0]) == pytest.approx(ratio, rel=1e-6)
    assert bool(terms.clipped_BR[0, 0]) == clipped


def test_n30_the_upper_clip_may_be_the_smaller_one_or_absent():
    narrow = terms_at(1.5, 1, clip_low=0.3, clip_high=0.1)
    assert float(narrow.loss_BR[0, 0]) == pytest.approx(-1.1)
    free = terms_at(50.0, 1, clip_low=np.inf, clip_high=np.inf)
    assert float(free.loss_BR[0, 0]) == pytest.approx(-50, rel=1e-5)
    assert not free.clipped_BR[0, 0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "clipped"),
    [(10, -1, -3, True), (10, 1, 1.28, True), (2, -1, -2, False), (0.5, -1, -0.8, True)],
)
def test_n31_dual_clip_bounds_negative_advantages_only(ratio, advantage, objective, clipped):
    terms = terms_at(ratio, advantage, dual_clip=3.0)
    assert float(-terms.loss_BR[0, 0]) == pytest.approx(objective, rel=1e-6)
    assert bool(terms.clipped_BR[0, 0]) == clipped


def test_n31_a_dual_clip_of_one_or_less_is_an_error():
    for c in (1.0, 0.5, -3.0, np.nan):
        with pytest.raises(ValueError, match="dual_clip"):
            terms_at(1.0, 1, dual_clip=c)


def test_n33_the_ratio_compares_with_the_policy_that_sampled():
    def loss(logp_BR, old_BR):
        terms = policy_gradient_terms(logp_BR, old_BR, jnp.ones((1, 1)), **CLIP)
        return terms.loss_BR[0, 0], terms.ratio_BR[0, 0]

    logp_BR = jnp.full((1, 1), -0.5)
    (value, ratio), grad = jax.value_and_grad(loss, has_aux=True)(logp_BR, jnp.full((1, 1), -1.0))
    assert float(ratio) == pytest.approx(1.648721, rel=1e-6)
    assert float(value) == pytest.approx(-1.28)
    assert grad[0, 0] == 0
    # The mistake: compared with itself nothing is ever clipped.
    (_, ratio), grad = jax.value_and_grad(loss, has_aux=True)(logp_BR, logp_BR)
    assert ratio == 1
    assert grad[0, 0] == -1


def test_only_the_policy_gets_a_gradient():
    x_BR = jnp.full((1, 2), -0.7)
    for argument in (1, 2):
        grad = jax.grad(
            lambda *xs: policy_gradient_terms(*xs, **CLIP).loss_BR.sum(), argnums=argument
        )(x_BR, x_BR, x_BR)
        assert not np.asarray(grad).any()


def test_m17_a_completion_of_one_token_is_trained():
    reward_Pn = jnp.array([[1.0, 0.0, 0.0, 1.0]])  # Row 1 is a lone stop token.
    mask_BR = jnp.array([[1, 1], [1, 0], [1, 1], [1, 1]], jnp.bool_)
    advantage_Pn, _ = advantages(reward_Pn)
    advantage_BR = jnp.broadcast_to(advantage_Pn.reshape(4, 1), (4, 2))

    def loss(logp_BR):
        terms = policy_gradient_terms(logp_BR, jnp.full((4, 2), -1.0), advantage_BR, **CLIP)
        return weighted_sum(token_weights(mask_BR, "seq-mean-token-mean"), terms.loss_BR)

    grad = jax.jit(jax.grad(loss))(jnp.full((4, 2), -1.0))
    assert advantage_BR[1, 0] < 0
    assert grad[1, 0] > 0  # Descent makes it less likely.
    assert grad[1, 1] == 0
    one_column = policy_gradient_terms(*(jnp.zeros((4, 1)),) * 2, advantage_BR[:, :1], **CLIP)
    assert one_column.loss_BR.shape == (4, 1)


def test_n40_a_kl_penalty_still_pulls_on_groups_without_variance():
    kl_BR, logp_BR = jnp.full((4, 3), 0.2), jnp.full((4, 3), -1.0)
    mask_BR = jnp.ones((4, 3), jnp.bool_)

    def loss(rewards, mask_BR):
        advantage_Pn, zero_variance_P = advantages(rewards)
        advantage_BR = jnp.broadcast_to(advantage_Pn.reshape(4, 1), (4, 3))
        terms = policy_gradient_terms(logp_BR, logp_BR, advantage_BR, **CLIP)
        w_BR = token_weights(mask_BR, "token-mean")
        total = weighted_sum(w_BR, terms.loss_BR + 0.1 * kl_BR)
        return float(weighted_sum(w_BR, terms.loss_BR)), float(total), zero_variance_P

    policy, total, zero_variance_P = loss([[1, 1, 1, 1]], mask_BR)
    assert policy == 0
    assert total == pytest.approx(0.02)
    # Dropped, the group leaves numerator and denominator: the other one weighs as if alone.
    _, total, zero_variance_P = loss([[1, 1], [1, 1]], mask_BR & ~zero_variance_P[:, None])
    assert total == 0
    _, _, zero_variance_P = loss([[1, 1], [1, 0]], mask_BR)
    np.testing.assert_array_equal(zero_variance_P, [True, False])
    kept_BR = mask_BR & ~jnp.repeat(zero_variance_P, 2)[:, None]
    _, total, _ = loss([[1, 1], [1, 0]], kept_BR)
    assert total == pytest.approx(0.02)


# Expected gradients, by enumeration. Tokens 0, 1, 2; 0 stops; at most two: seven completions.
COMPLETIONS = [(0,), *((a, b) for a in (1, 2) for b in (0, 1, 2))]
TOKENS_BR = np.array([(*c, 0)[:2] for c in COMPLETIONS])
MASK_BR = np.array([[True, len(c) == 2] for c in COMPLETIONS])
REWARD_B = np.array([0.3, 1.0, 0.0, 0.2, 0.7, 0.1, 0.9], np.float32)
# Row 0 of the table holds the logits of the first token, row 1 + a those of a token after a.
THETA = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)


@jax.jit
def token_logp(theta):
    logp = jax.nn.log_softmax(theta)
    first_B = logp[0][TOKENS_BR[:, 0]]
    second_B = jnp.where(MASK_BR[:, 1], logp[1 + TOKENS_BR[:, 0], TOKENS_BR[:, 1]], 0)
    return jnp.stack([first_B, second_B], axis=1)


def completion_probability(theta):
    return jnp.exp(token_logp(theta).sum(1))


def cosine(a, b):
    a, b = np.ravel(a), np.ravel(b)
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.fixture
def exact_gradient():
    """Of minus the expected reward."""
    assert float(completion_probability(THETA).sum()) == pytest.approx(1, rel=1e-6)
    return jax.jit(jax.grad(lambda theta: -completion_probability(theta) @ REWARD_B))(THETA)


@pytest.mark.parametrize(("per_token", "exact"), [("sum", True), ("mean", False)])
def test_expected_policy_gradient_is_the_gradient_of_the_expected_reward(
    per_token, exact, exact_gradient
):
    behaviour_BR, probability_B = token_logp(THETA), completion_probability(THETA)
    advantage_BR = np.repeat((REWARD_B - 0.4)[:, None], 2, axis=1)  # Any baseline will do.
    divisor_B1 = 1 if per_token == "sum" else MASK_BR.sum(1, keepdims=True)

    def expected_loss(theta):
        terms = policy_gradient_terms(token_logp(theta), behaviour_BR, advantage_BR, **CLIP)
        w_BR = jnp.where(MASK_BR, probability_B[:, None] / divisor_B1, 0)
        return weighted_sum(w_BR, terms.loss_BR)

    got = jax.jit(jax.grad(expected_loss))(THETA)
    assert (
        np.allclose(got, exact_gradient, atol=1e-6) == exact
    )  # The mean over a row's tokens is biased.


@pytest.mark.parametrize(("scale", "unbiased"), [("none", True), ("std", False)])
def test_expected_group_gradient_over_all_pairs_of_completions(scale, unbiased, exact_gradient):
    """n = 2: the group's own mean takes the share 1/n of the gradient, and nothing else."""
    pairs = np.array([(i, j) for i in range(7) for j in range(7)])
    rows_B = pairs.reshape(98)
    advantage_Pn, _ = advantages(REWARD_B[pairs], scale=scale)
    advantage_BR = np.repeat(np.reshape(advantage_Pn, (98, 1)), 2, axis=1)
    probability_P = np.prod(np.asarray(completion_probability(THETA))[pairs], axis=1)
    w_BR = np.where(MASK_BR[rows_B], np.repeat(probability_P, 2)[:, None] / 2, 0)
    behaviour_BR = np.asarray(token_logp(THETA))[rows_B]

    def expected_loss(theta):
        logp_BR = token_logp(theta)[rows_B]
        return weighted_sum(
            w_BR, policy_gradient_terms(logp_BR, behaviour_BR, advantage_BR, **CLIP).loss_BR
        )

    got = jax.jit(jax.grad(expected_loss))(THETA)
    assert np.allclose(got, exact_gradient / 2, atol=1e-6) == unbiased
    assert (cosine(got, exact_gradient) > 0.9999) == unbiased  # Not even the direction, with std.


def test_variants_name_existing_settings():
    for settings in VARIANTS.values():
        assert set(settings) == set(VARIANTS["grpo"])
        advantages([[1, 0]], scale=settings["scale"])
        constant = 8 if settings["aggregation"] == "constant-norm" else None
        token_weights(jnp.asarray(MASK_BR), settings["aggregation"], constant=constant)
    assert VARIANTS["dapo"]["clip_high"] == 0.28
    assert VARIANTS["dr_grpo"]["scale"] == "none"


def test_bad_arguments_are_named():
    x = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match="'group'; one of std, batch_std, none"):
        group_advantages(x, scale="group")
    with pytest.raises(ValueError, match=r"\[prompts, samples\], got \[2\]"):
        group_advantages(jnp.zeros(2), scale="std")
    with pytest.raises(ValueError, match="ddof=2"):
        group_advantages(x, scale="std", ddof=2)
    with pytest.raises(ValueError, match=r"clip_low=-0\.2"):
        policy_gradient_terms(x, x, x, clip_low=-0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="advantage_BR"):
        policy_gradient_terms(x, x, jnp.zeros((2, 1)), **CLIP)
