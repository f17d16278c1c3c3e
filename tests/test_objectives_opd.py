"""OPD: every estimator's expectation and gradient against the exact divergence, by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from opd_jax.objectives import opd
from opd_jax.objectives.grpo import policy_gradient_terms

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
TEACHER, STUDENT = jnp.log(jnp.array([0.7, 0.2, 0.1])), jnp.log(jnp.array([0.5, 0.3, 0.2]))


def logs(*probabilities):
    return jnp.log(jnp.array(probabilities))


# The sampled token.


def test_d01_expected_gradient_is_that_of_the_reverse_kl():
    student_V, teacher_V = logs(0.5, 0.3, 0.2), logs(0.2, 0.3, 0.5)

    def expected_loss(z_V, term):
        logp_V = jax.nn.log_softmax(z_V)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp_V)) * term(logp_V))

    def policy_gradient(logp_V):
        advantage = opd.sampled_token_advantage(teacher_V[None], student_V[None])
        return policy_gradient_terms(logp_V[None], student_V[None], advantage, **CLIP).loss_BR[0]

    grad = jax.grad(expected_loss)(student_V, policy_gradient)
    np.testing.assert_allclose(grad, [0.320702, -0.082466, -0.238236], atol=1e-6)
    exact = jax.grad(opd.reverse_kl)(student_V, teacher_V)
    np.testing.assert_allclose(grad, exact, atol=1e-6)
    # Differentiated as a loss the teacher does not enter.
    grad = jax.grad(expected_loss)(student_V, lambda logp_V: logp_V - teacher_V)
    np.testing.assert_allclose(grad, np.zeros(3), atol=1e-6)


def test_expected_advantage_is_minus_the_kl():
    p_V = jnp.exp(STUDENT)
    advantage_V = opd.sampled_token_advantage(TEACHER[None], STUDENT[None])[0]
    kl = opd.reverse_kl(STUDENT, TEACHER)
    assert float(p_V @ advantage_V) == pytest.approx(-float(kl), abs=1e-6)


def test_the_prefix_is_held_fixed():
    """Two tokens: expected gradient = E_prefix[∇ KL of each position], not ∇ of the sequence KL."""
    theta, teacher = two(0, 4, 3)  # Row 0: logits of the first token; 1 + a: after a.
    teacher = jax.nn.log_softmax(teacher)
    first, second = np.divmod(np.arange(9), 3)

    def logp_BR(table):
        return jnp.stack([table[0][first], table[1 + first, second]], axis=1)

    behaviour_BR = logp_BR(jax.nn.log_softmax(theta))
    probability_B1 = jnp.exp(behaviour_BR.sum(1, keepdims=True))
    advantage_BR = opd.sampled_token_advantage(logp_BR(teacher), behaviour_BR)

    def sampled(theta):
        student_BR = logp_BR(jax.nn.log_softmax(theta))
        terms = policy_gradient_terms(student_BR, behaviour_BR, advantage_BR, **CLIP)
        return jnp.sum(probability_B1 * terms.loss_BR)

    def exact(theta, prefix_probability):
        kl = opd.reverse_kl(theta, teacher)
        return kl[0] + prefix_probability @ kl[1:]

    local = jax.jit(jax.grad(exact))(theta, jax.nn.softmax(theta[0]))
    whole = jax.jit(jax.grad(lambda theta: exact(theta, jax.nn.softmax(theta[0]))))(theta)
    np.testing.assert_allclose(jax.jit(jax.grad(sampled))(theta), local, atol=1e-6)
    assert np.abs(local - whole).max() > 0.01


def test_d08_advantages_stand_in_the_students_columns():
    student_BR = jnp.array([[-0.1, -0.2, -0.3, -0.4]])
    teacher_BR = jnp.array([[-0.5, -0.1, -0.3, -1.0]])
    advantage_BR = opd.sampled_token_advantage(teacher_BR, student_BR)
    np.testing.assert_allclose(advantage_BR, [[-0.4, 0.1, 0, -0.6]], atol=1e-6)
    shifted_BR = opd.sampled_token_advantage(teacher_BR[:, 1:], student_BR[:, :-1])
    np.testing.assert_allclose(shifted_BR, [[0, -0.1, -0.7]], atol=1e-6)
    same_BR = opd.sampled_token_advantage(student_BR, student_BR)
    np.testing.assert_array_equal(same_BR, np.zeros((1, 4)))


def test_the_clamp_is_symmetric_and_optional():
    student_BR, teacher_BR = jnp.zeros((1, 3)), jnp.array([[-9.0, 0.5, 9.0]])
    free_BR = opd.sampled_token_advantage(teacher_BR, student_BR)
    np.testing.assert_array_equal(free_BR, [[-9, 0.5, 9]])
    clamped_BR = opd.sampled_token_advantage(teacher_BR, student_BR, limit=2.0)
    np.testing.assert_array_equal(clamped_BR, [[-2, 0.5, 2]])


def test_extrapolation_has_its_optimum_beyond_the_teacher():
    reference_V = logs(0.3, 0.4, 0.3)
    for strength in (0.5, 1.0, 1.25):
        optimum_V = jax.nn.log_softmax(strength * TEACHER + (1 - strength) * reference_V)

        def gradient(z_V, strength=strength):
            behaviour_V = jax.nn.log_softmax(z_V)
            advantage_V = opd.extrapolated_advantage(
                TEACHER, behaviour_V, reference_V, strength=strength
            )
            return jax.grad(lambda z: jnp.exp(behaviour_V) @ (advantage_V * jax.nn.log_softmax(z)))(
                z_V
            )

        np.testing.assert_allclose(gradient(optimum_V), np.zeros(3), atol=1e-6)
        assert (np.abs(gradient(TEACHER)).max() < 1e-6) == (strength == 1)
    np.testing.assert_allclose(
        opd.extrapolated_advantage(TEACHER, STUDENT, reference_V, strength=1.0),
        opd.sampled_token_advantage(TEACHER, STUDENT),
        atol=1e-6,
    )


# The whole vocabulary.


def test_d17_the_two_directions_by_name():
    assert float(opd.forward_kl(STUDENT, TEACHER)) == pytest.approx(0.085123, abs=1e-6)
    assert float(opd.reverse_kl(STUDENT, TEACHER)) == pytest.approx(0.092033, abs=1e-6)
    student_V, teacher_V = logs(0.98, 0.01, 0.01), logs(0.5, 0.49, 0.01)
    assert float(opd.reverse_kl(student_V, teacher_V)) == pytest.approx(0.620567, abs=1e-6)
    assert float(opd.forward_kl(student_V, teacher_V)) == pytest.approx(1.570520, abs=1e-5)


@pytest.mark.parametrize(
    ("beta", "value"), [(0, 0.085123), (0.5, 0.021901), (0.999, 0.000092), (1, 0.092033)]
)
def test_d16_jsd_is_the_papers_form_with_trls_ends(beta, value):
    assert float(opd.jsd(STUDENT, TEACHER, beta)) == pytest.approx(value, abs=1e-6)


def test_d16_jsd_near_an_end_is_that_kl_times_the_vanishing_weight():
    for beta, kl in ((0.01, opd.forward_kl), (0.99, opd.reverse_kl)):
        weight = min(beta, 1 - beta)
        near = float(opd.jsd(STUDENT, TEACHER, beta)) / weight
        assert near == pytest.approx(float(kl(STUDENT, TEACHER)), rel=0.03)
        swapped = float(opd.jsd(TEACHER, STUDENT, beta)) / weight
        assert swapped != pytest.approx(float(kl(STUDENT, TEACHER)), rel=0.03)


def _divergence(name, z_V, t_V):
    """The textbook formulas in float64 on plain probabilities."""
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (z_V, t_V))

    def kl(a, b):
        return np.sum(a * np.log(a / b))

    mixture = 0.3 * q + 0.7 * p
    return {
        "reverse": kl(p, q),
        "forward": kl(q, p),
        "jsd": 0.3 * kl(q, mixture) + 0.7 * kl(p, mixture),
        "entropy": -np.sum(p * np.log(p)),
    }[name]


@pytest.mark.parametrize("name", ["reverse", "forward", "jsd", "entropy"])
def test_values_and_gradients_equal_textbook_formulas_and_finite_differences(name):
    function = {
        "reverse": opd.reverse_kl,
        "forward": opd.forward_kl,
        "jsd": lambda z, t: opd.jsd(z, t, 0.3),
        "entropy": lambda z, t: opd.entropy(z),
    }[name]
    z, t = np.random.default_rng(0).normal(size=(2, 6)) * 2
    value, (grad, teacher_grad) = jax.value_and_grad(function, (0, 1))(
        jnp.asarray(z, jnp.float32), jnp.asarray(t, jnp.float32)
    )
    assert float(value) == pytest.approx(_divergence(name, z, t), abs=1e-6)
    step = 1e-5 * np.eye(6)
    slope = [(_divergence(name, z + e, t) - _divergence(name, z - e, t)) / 2e-5 for e in step]
    np.testing.assert_allclose(grad, slope, atol=2e-6)
    assert not np.asarray(teacher_grad).any()


@pytest.mark.parametrize("name", ["reverse", "forward", "jsd", "top_k"])
def test_equal_models_have_a_gradient_of_nothing(name):
    """0, or far below Adam's eps of 1e-8: through rounding noise it would walk at full speed."""
    function = {
        "reverse": opd.reverse_kl,
        "forward": opd.forward_kl,
        "jsd": lambda z, t: opd.jsd(z, t, 0.3),
        "top_k": lambda z, t: opd.topk_reverse_kl(z, t, mode="renormalised"),
    }[name]
    z_TV = jnp.asarray(np.random.default_rng(0).normal(size=(50, 300)) * 3, jnp.float32)

    def largest(function):
        grad_TV = jax.jit(jax.grad(lambda z, t: function(z, t).sum()))(z_TV, z_TV)
        return float(jnp.abs(grad_TV).max())

    def plain(z, t):
        p, q = jax.nn.log_softmax(z), jax.nn.log_softmax(t)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    assert largest(function) < 1e-13
    assert largest(plain) > 1e-9  # What autodiff leaves.


def test_n09_no_probability_contributes_nothing_and_no_nan():
    student_V, teacher_V = logs(0.6, 0.4, 0.0), logs(0.5, 0.5, 0.0)
    value, grad = jax.value_and_grad(opd.reverse_kl)(student_V, teacher_V)
    assert float(value) == pytest.approx(0.020136, abs=1e-6)
    assert np.isfinite(grad).all()
    for function in (opd.forward_kl, lambda s, t: opd.jsd(s, t, 0.5)):
        assert np.isfinite(jax.value_and_grad(function)(student_V, teacher_V)[1]).all()


def test_n09_entropy_on_a_restricted_support():
    logits_V = jnp.array([0.0, 0.0, -jnp.inf])
    value, grad = jax.value_and_grad(opd.entropy)(logits_V)
    assert float(value) == pytest.approx(0.693147, abs=1e-6)
    np.testing.assert_allclose(grad, np.zeros(3), atol=1e-7)

    def naive(logits_V):
        p_V = jax.nn.softmax(logits_V)
        return -jnp.sum(p_V * jnp.log(p_V))

    assert np.isnan(jax.value_and_grad(naive)(logits_V)[1]).all()


def test_n09_zero_on_one_side_only():
    no_third, third = logs(0.6, 0.4, 0.0), logs(0.4, 0.4, 0.2)
    value, grad = jax.value_and_grad(opd.reverse_kl)(no_third, third)
    assert float(value) == pytest.approx(0.6 * np.log(1.5), abs=1e-6)
    assert np.isfinite(grad).all()
    value, grad = jax.value_and_grad(opd.reverse_kl)(third, no_third)
    assert float(value) == pytest.approx(0.2 * 1000, rel=0.01)  # Floored, see LOG_FLOOR.
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("name", ["reverse", "forward", "jsd", "entropy"])
def test_divergences_on_a_sharded_vocabulary_equal_those_on_one_device(name, mesh_2x2x2):
    function = {
        "reverse": opd.reverse_kl,
        "forward": opd.forward_kl,
        "jsd": lambda z, t: opd.jsd(z, t, 0.5),
        "entropy": lambda z, t: opd.entropy(z),
    }[name]
    rng = np.random.default_rng(0)
    z, t = (rng.normal(size=(4, 3, 8)).astype(np.float32) for _ in range(2))
    total = jax.jit(jax.value_and_grad(lambda z, t: jnp.sum(function(z, t))))
    layout = NamedSharding(mesh_2x2x2, PartitionSpec(("data", "fsdp"), None, "tensor"))
    value, grad = total(*(jax.device_put(x, layout) for x in (z, t)))
    assert grad.sharding.spec == layout.spec
    whole = NamedSharding(mesh_2x2x2, PartitionSpec())
    want, want_grad = total(*(jax.device_put(x, whole) for x in (z, t)))
    assert float(value) == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_allclose(np.asarray(grad), np.asarray(want_grad), atol=1e-6)


# A few tokens.


def topk(student_V, teacher_V, ids, mode, support_k=None):
    student_k, teacher_k = jax.nn.log_softmax(student_V)[ids], jax.nn.log_softmax(teacher_V)[ids]
    return opd.topk_reverse_kl(student_k, teacher_k, mode=mode, support_k=support_k)


topk_and_gradient = jax.jit(jax.value_and_grad(topk), static_argnames="mode")


def two(seed, *shape):
    """Logits of a student and a teacher."""
    return np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)


def test_d03_without_the_rest_mass_leaks_out_of_the_top_k():
    teacher_V, leaked_V = logs(0.6, 0.3, 0.05, 0.05), logs(0.3, 0.15, 0.275, 0.275)
    assert float(topk(teacher_V, teacher_V, np.arange(2), "tail_bucket")) == pytest.approx(
        0, abs=1e-6
    )
    value = float(topk(leaked_V, teacher_V, np.arange(2), "tail_bucket"))
    assert value == pytest.approx(0.625695, abs=1e-6)
    assert value == pytest.approx(float(opd.reverse_kl(leaked_V, teacher_V)), abs=1e-6)
    # Neither of these sees the leak: the plain partial sum even rewards it.
    p_k, q_k = jnp.exp(leaked_V[:2]), jnp.exp(teacher_V[:2])
    assert float(jnp.sum(p_k * jnp.log(p_k / q_k))) == pytest.approx(-0.311916, abs=1e-6)
    assert float(topk(leaked_V, teacher_V, np.arange(2), "renormalised")) == pytest.approx(
        0, abs=1e-6
    )


def test_d03_with_the_rest_it_is_a_divergence_below_the_full_one():
    student_TV, teacher_TV = jax.nn.log_softmax(2 * two(0, 20, 5))
    student_Tk, ids = jax.lax.top_k(student_TV, 2)
    teacher_Tk = np.take_along_axis(np.asarray(teacher_TV), np.asarray(ids), axis=1)
    value_T = opd.topk_reverse_kl(student_Tk, teacher_Tk, mode="tail_bucket")
    assert (value_T > 1e-4).all()
    assert (value_T <= opd.reverse_kl(student_TV, teacher_TV) + 1e-6).all()


def test_d05_a_rest_without_mass():
    def value_and_grad(student, teacher):
        return jax.value_and_grad(opd.topk_reverse_kl)(
            logs(*student), logs(*teacher), mode="tail_bucket"
        )

    value, grad = value_and_grad([0.7, 0.3], [0.7, 0.3])  # Both rests are 0.
    assert value == 0
    assert np.isfinite(grad).all()
    value, grad = value_and_grad([0.7, 0.3], [0.6, 0.3])  # The student's only.
    assert float(value) == pytest.approx(0.7 * np.log(7 / 6), abs=2e-5)
    assert np.isfinite(grad).all()
    value, grad = value_and_grad([0.6, 0.3], [0.7, 0.3])  # The teacher's only: dear, and finite.
    assert float(value) == pytest.approx(0.6 * np.log(6 / 7) + 0.1 * np.log(0.1 / 1e-6), rel=0.02)
    assert np.isfinite(grad).all()


def test_gradients_of_the_top_k_forms_equal_their_formulas():
    """The two differ by b ∇log P, and for the whole vocabulary by nothing."""
    student_V, teacher_V = two(2, 5)
    ids = np.argsort(-student_V)[:3]
    logp_V, q_logp_V = jax.nn.log_softmax(student_V), jax.nn.log_softmax(teacher_V)
    score_kV = jax.jacobian(lambda z: jax.nn.log_softmax(z)[ids])(student_V)  # ∇ log p(v).
    pbar_k, d_k = jax.nn.softmax(logp_V[ids]), (logp_V - q_logp_V)[ids]
    b = pbar_k @ d_k
    mass = jax.value_and_grad(lambda z: jax.nn.logsumexp(jax.nn.log_softmax(z)[ids]))
    log_p_mass, mass_grad = mass(student_V)

    value, exact = topk_and_gradient(student_V, teacher_V, ids, "renormalised")
    np.testing.assert_allclose(exact, (pbar_k * (d_k - b)) @ score_kV, atol=1e-6)
    assert float(b) == pytest.approx(float(value + log_p_mass - mass(teacher_V)[0]), abs=1e-6)

    value, code = topk_and_gradient(student_V, teacher_V, ids, "without_baseline")
    assert float(value) == pytest.approx(float(b), abs=1e-6)
    np.testing.assert_allclose(code, (pbar_k * d_k) @ score_kV, atol=1e-6)
    np.testing.assert_allclose(code - exact, b * mass_grad, atol=1e-6)
    assert np.abs(code - exact).max() > 0.01


@pytest.mark.parametrize("mode", ["renormalised", "tail_bucket", "without_baseline"])
def test_top_k_over_the_whole_vocabulary_is_the_reverse_kl(mode):
    student_V, teacher_V = two(6, 4)
    value, grad = topk_and_gradient(student_V, teacher_V, np.arange(4), mode)
    want, want_grad = jax.jit(jax.value_and_grad(opd.reverse_kl))(student_V, teacher_V)
    assert float(value) == pytest.approx(float(want), abs=1e-5)
    np.testing.assert_allclose(grad, want_grad, atol=1e-5)


def test_tail_bucket_gradient_equals_that_of_the_bucketed_distributions():
    student_V, teacher_V = two(7, 6)

    def bucketed(z_V):
        p_V, q_V = jax.nn.softmax(z_V), jax.nn.softmax(teacher_V)
        merge = [jnp.log(jnp.stack([x[1], x[4], 1 - x[1] - x[4]])) for x in (p_V, q_V)]
        return opd.reverse_kl(*merge)

    got = topk_and_gradient(student_V, teacher_V, np.array([1, 4]), "tail_bucket")
    want = jax.jit(jax.value_and_grad(bucketed))(student_V)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


@pytest.mark.parametrize("mode", ["renormalised", "tail_bucket", "without_baseline"])
def test_a_support_mask_is_the_same_as_a_shorter_list(mode):
    student_V, teacher_V = two(8, 6)
    support_k = np.array([True, False, True, False])
    masked = topk_and_gradient(student_V, teacher_V, np.arange(4), mode, support_k=support_k)
    short = topk_and_gradient(student_V, teacher_V, np.array([0, 2]), mode)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), masked, short)
    none = np.zeros(4, np.bool_)
    value, grad = topk_and_gradient(student_V, teacher_V, np.arange(4), mode, support_k=none)
    assert float(value) == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(grad, np.zeros(6), atol=1e-6)


def test_top_k_sends_no_gradient_to_the_teacher():
    for mode in opd.TOPK_MODES:
        grad = jax.grad(lambda t, m=mode: topk(STUDENT, t, np.arange(2), m))(TEACHER)
        assert not np.asarray(grad).any()


def test_d06_fewer_entries_than_asked_is_an_error():
    with pytest.raises(ValueError, match=r"\[2, 50\].*\[2, 20\]"):
        opd.topk_reverse_kl(jnp.zeros((2, 50)), jnp.zeros((2, 20)), mode="renormalised")
    filled = np.where(np.arange(50) < 20, -1.0, -np.inf)
    for logp_k in (np.zeros((2, 20)), filled, np.zeros((2, 0))):
        with pytest.raises(ValueError, match=r"teacher 'math': asked for the top 50.* got (20|0)"):
            opd.check_top_k(logp_k, 50, "teacher 'math'")
    opd.check_top_k(np.zeros((2, 50)), 50, "teacher 'math'")


# Overlap.

overlap = jax.jit(opd.overlap)


def test_overlap_worked_example():
    """k = 3. Student lists 7, 2, 5 and teacher 5, 9, 7, so I = {7, 5} in the student's order.

    p = .5, .1 on I: pbar = 5/6, 1/6. q = .2, .6 on I, out of the teacher's order: qbar = 1/4, 3/4.
    """
    got = overlap(
        jnp.array([7, 2, 5]), logs(0.5, 0.3, 0.1), jnp.array([5, 9, 7]), logs(0.6, 0.15, 0.2)
    )
    kl = 5 / 6 * np.log(5 / 6 * 4) + 1 / 6 * np.log(1 / 6 / 0.75)
    assert float(got.ratio) == pytest.approx(2 / 3)
    assert float(got.size) == 2
    assert float(got.advantage) == pytest.approx(-kl / 2, abs=1e-6)
    assert float(got.mass_student) == pytest.approx(0.6, abs=1e-6)
    assert float(got.mass_teacher) == pytest.approx(0.8, abs=1e-6)


def test_overlap_of_equal_models_and_of_disjoint_lists():
    ids = np.array([[3, 1], [0, 4]])
    logp = np.log(np.array([[0.5, 0.3], [0.6, 0.2]], np.float32))
    same = overlap(ids, logp, ids[:, ::-1], logp[:, ::-1])
    np.testing.assert_allclose(same.ratio, [1, 1])
    np.testing.assert_allclose(same.advantage, [0, 0], atol=1e-6)
    np.testing.assert_allclose(same.mass_student, [0.8, 0.8], rtol=1e-6)
    apart = overlap(ids, logp, ids + 10, logp)
    for value in jax.tree.leaves(apart):
        np.testing.assert_array_equal(value, [0, 0])


def test_overlap_equals_sets_and_full_vocabularies():
    rng = np.random.default_rng(0)
    student, teacher = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(2, 10, 12)) * 2))
    (p_logp, p_ids), (q_logp, q_ids) = jax.lax.top_k(student, 5), jax.lax.top_k(teacher, 5)
    got = overlap(p_ids, p_logp, q_ids, q_logp)
    for t in range(10):
        both = np.array(sorted({*p_ids[t].tolist()} & {*q_ids[t].tolist()}), np.int32)
        p, q = np.exp(student[t])[both], np.exp(teacher[t])[both]
        pbar, qbar = p / p.sum(), q / q.sum()
        assert float(got.ratio[t]) == pytest.approx(len(both) / 5)
        assert float(got.mass_student[t]) == pytest.approx(p.sum(), abs=1e-6)
        assert float(got.mass_teacher[t]) == pytest.approx(q.sum(), abs=1e-6)
        want = np.sum(pbar * np.log(qbar / pbar)) / max(len(both), 1)
        assert float(got.advantage[t]) == pytest.approx(want, abs=1e-6)


def test_membership_gives_the_supports_of_the_ablation():
    student_ids, teacher_ids = jnp.array([3, 1, 4]), jnp.array([1, 5, 3])
    np.testing.assert_array_equal(opd.is_in(student_ids, teacher_ids), [True, True, False])
    both = jnp.concatenate([student_ids, teacher_ids])
    apart = jnp.concatenate(
        [~opd.is_in(student_ids, teacher_ids), ~opd.is_in(teacher_ids, student_ids)]
    )
    assert set(both[apart].tolist()) == {4, 5}


def test_entropy_gap_is_absolute():
    np.testing.assert_allclose(
        opd.entropy_gap(jnp.array([1.0, 2.0]), jnp.array([1.5, 0.5])), [0.5, 1.5]
    )


def test_topk_and_overlap_on_a_sharded_batch(mesh_2x2x2):
    layout = NamedSharding(mesh_2x2x2, PartitionSpec(("data", "fsdp"), None, None))
    logits = np.random.default_rng(0).normal(size=(2, 4, 3, 8)).astype(np.float32)
    (p_logp, p_ids), (q_logp, q_ids) = (jax.lax.top_k(jax.nn.log_softmax(x), 4) for x in logits)

    def everything(p_ids, p_logp, q_ids, q_logp):
        support = opd.is_in(p_ids, q_ids)
        forms = [
            opd.topk_reverse_kl(p_logp, q_logp, mode=mode, support_k=support)
            for mode in opd.TOPK_MODES
        ]
        return forms, opd.overlap(p_ids, p_logp, q_ids, q_logp)

    lists = (p_ids, p_logp, q_ids, q_logp)
    sharded = jax.jit(everything)(*(jax.device_put(np.asarray(x), layout) for x in lists))
    whole = NamedSharding(mesh_2x2x2, PartitionSpec())
    single = jax.jit(everything)(*(jax.device_put(np.asarray(x), whole) for x in lists))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6),
        sharded,
        single,
    )


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"beta=1.5: must be in \[0, 1\]"):
        opd.jsd(STUDENT, TEACHER, 1.5)
    with pytest.raises(ValueError, match=r"student_logits.*teacher_logits"):
        opd.reverse_kl(STUDENT, TEACHER[:2])
    with pytest.raises(ValueError, match="'topk'; one of renormalised, tail_bucket"):
        opd.topk_reverse_kl(STUDENT, TEACHER, mode="topk")
    with pytest.raises(ValueError, match="limit=0"):
        opd.sampled_token_advantage(STUDENT, TEACHER, limit=0)
    with pytest.raises(ValueError, match="teacher_ids_k"):
        opd.overlap(jnp.arange(3), STUDENT, jnp.arange(2), TEACHER[:2])
