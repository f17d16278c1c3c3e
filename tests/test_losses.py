"""The loss of every algorithm on a tiny model, against the same thing from whole log-softmaxes."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import losses, scoring
from opd_jax.core import sharding
from opd_jax.core.types import Scores
from opd_jax.losses import TILES, group_loss, weigh
from opd_jax.models import transformer
from tests import batches, tiny

C, KINDS = batches.CONFIG, tuple(TILES)
EXACT = ("reverse_kl", "forward_kl", "jsd", "top_k")


def evaluate(kinds, params, nudge_BRV, group, pull_K):
    """Losses of several kinds, metrics, and the gradients of `pull_K . losses`.

    `nudge_BRV` is added to the logits, so that its gradient is theirs. All kinds share one forward
    pass of the student, as if by hand: one program to compile, not seven.
    """
    forward, logits = transformer.completion_hidden, scoring.logits

    def all_losses(params, nudge_BRV, group):
        shared = []

        def once(*args):
            shared[:] = shared or [forward(*args)]
            return shared[0]

        def nudged(*args):
            return logits(*args) + nudge_BRV

        with (
            mock.patch.object(losses.transformer, "completion_hidden", once),
            mock.patch.object(losses.scoring, "logits", logits if nudge_BRV is None else nudged),
        ):
            found = [group_loss(params, C, group, batches.settings(kind)) for kind in kinds]
        return jnp.stack([loss for loss, _ in found]), [metrics for _, metrics in found]

    loss_K, pullback, metrics_K = jax.vjp(all_losses, params, nudge_BRV, group, has_aux=True)
    grads = pullback(pull_K)
    real = jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, grads)
    return loss_K, metrics_K, real


@functools.cache
def program(kinds=KINDS):
    return jax.jit(functools.partial(evaluate, kinds))


@functools.cache
def hidden_step():
    return jax.jit(lambda p, r: transformer.completion_hidden(p, C, r.prompt, r.tokens_BR))


def whole(mesh, teacher_seed=batches.TEACHER):
    """The batch on a mesh, with the hidden states and the table of its teacher."""
    group = batches.put(mesh, batches.host(), tiny.host_params(C, teacher_seed)["embedding"])
    hidden = hidden_step()(tiny.params(mesh, C, teacher_seed), group.rollout)
    return group.replace(teacher_hidden_BRD=hidden)


def run(mesh, kind, group, params=None):
    """Loss, metrics and gradients of one kind: for parameters, logits, and fields of the group."""
    zero = np.zeros((*group.weight_BR.shape, C.vocab_size), np.float32)
    zero = jax.device_put(zero, sharding.sharding(mesh, "batch", "time", "vocab"))
    params = tiny.params(mesh, C) if params is None else params
    one_hot = jnp.asarray(np.eye(len(KINDS), dtype=np.float32)[KINDS.index(kind)])
    loss_K, metrics_K, (d_params, d_logits, d_group) = program()(params, zero, group, one_hot)
    i = KINDS.index(kind)
    return float(loss_K[i]), metrics_K[i], d_params, np.asarray(d_logits), d_group


@functools.cache
def plain():
    """Naive losses of every kind and their gradients for the logits."""

    def total(z, teacher_z, group, kind):
        return jnp.sum(group.weight_BR * batches.plain_losses(z, teacher_z, group)[kind])

    def every(z, teacher_z, group):
        return {k: jax.value_and_grad(total)(z, teacher_z, group, k) for k in KINDS}

    return jax.jit(every)


def expected(mesh, kind, group=None):
    """Naive loss and its gradients for parameters and logits."""
    group = (batches.host() if group is None else group).replace(teacher=None)
    z, teacher_z = (batches.plain_logits(s) for s in (batches.STUDENT, batches.TEACHER))
    loss, dz_BRV = plain()(z, teacher_z, group)[kind]
    return float(loss), batches.plain_pullback(tiny.params(mesh, C), dz_BRV), np.asarray(dz_BRV)


def largest_gap(a, b):
    gaps = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(), a, b)
    return max(jax.tree.leaves(gaps))


def size(tree):
    return max(np.abs(np.asarray(x)).max() for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_equal_those_of_whole_log_softmaxes(mesh, kind):
    loss, _, d_params, d_logits, _ = run(mesh, kind, whole(mesh))
    want, want_params, want_logits = expected(mesh, kind)
    assert loss == pytest.approx(want, abs=2e-6)
    assert largest_gap(d_params, want_params) < 2e-5 * max(1, size(want_params))
    # The naive logits are raw, ours are divided by the temperature.
    np.testing.assert_allclose(d_logits / batches.TEMPERATURE, want_logits, atol=1e-6)
    # Control: weights one column late are another loss with another gradient.
    late = batches.host().replace(weight_BR=np.roll(batches.host().weight_BR, 1, axis=1))
    other, other_params, _ = expected(mesh, kind, late)
    assert abs(other - want) > 3e-4
    assert largest_gap(other_params, want_params) > 1e-2 * size(want_params)


def test_kinds_differ_from_each_other(mesh):
    found = [run(mesh, kind, whole(mesh))[0] for kind in KINDS]
    assert np.min(np.abs(np.subtract.outer(found, found)) + np.eye(len(found))) > 1e-3


def test_metrics_are_means_over_the_policys_tokens(mesh):
    metrics = run(mesh, "sampled_token", whole(mesh))[1]
    real = batches.mask()
    p, q = (batches.log_softmax(batches.plain_logits(s)) for s in (0, batches.TEACHER))
    behaviour = batches.host().rollout.logp_BR
    ratio = np.exp(batches.chosen(p) - behaviour)
    advantage = batches.chosen(q) - behaviour
    upper = (advantage > 0) & (ratio > 1.28)
    lower = (advantage < 0) & ((ratio < 0.8) | (ratio > 1.5))
    entropy, teacher_entropy = (-(np.exp(x) * x).sum(-1) for x in (p, q))
    lists = [np.argsort(-x, axis=-1)[..., : batches.TOP_K] for x in (p, q)]
    shared = (lists[0][..., :, None] == lists[1][..., None, :]).any(-1)
    want = {
        "kl": batches.chosen(p) - batches.chosen(q),
        "ratio": ratio,
        "clipped": upper | lower,
        "entropy": entropy,
        "entropy_student": entropy,
        "entropy_teacher": teacher_entropy,
        "entropy_gap": np.abs(entropy - teacher_entropy),
        "overlap_ratio": shared.mean(-1),
        "overlap_mass_student": (np.exp(np.take_along_axis(p, lists[0], -1)) * shared).sum(-1),
    }
    for name, value_BR in want.items():
        assert metrics[name].count == real.sum()
        assert metrics[name].value() == pytest.approx(value_BR[real].mean(), abs=2e-5), name
        # Control: padding would be noticed.
        assert abs(value_BR.mean() - value_BR[real].mean()) > 1e-4, name
    assert {"overlap_advantage", "overlap_mass_teacher"} == metrics.keys() - want.keys()


@pytest.mark.parametrize("junk", [np.nan, np.inf, -1e10])
@pytest.mark.parametrize("kind", KINDS)
def test_n35_n10_nothing_is_read_where_the_mask_is_false(mesh, kind, junk):
    group = whole(mesh)
    want = run(mesh, kind, group)
    got = run(mesh, kind, spoilt(group, ~batches.mask(), junk))
    assert jax.tree.all(jax.tree.map(np.array_equal, got[:4], want[:4]))
    # Control: the same in a token that counts does get through.
    here = np.zeros_like(batches.mask())
    here[0, 0] = True
    if kind != "supervised":  # It reads tokens only, and they are random ones here.
        changed = run(mesh, kind, spoilt(group, here, junk))
        assert changed[0] != pytest.approx(want[0], abs=1e-4)


def spoilt(group, where_BR, junk):
    """The group with junk in some places of everything that a loss reads, tokens included."""
    rng = np.random.default_rng(5)

    def spoil(x):
        where = where_BR.reshape(where_BR.shape + (1,) * (x.ndim - 2))
        bad = rng.integers(0, C.vocab_size, x.shape) if x.dtype == np.int32 else junk
        return jax.device_put(np.where(where, bad, np.asarray(x)).astype(x.dtype), x.sharding)

    rollout = group.rollout
    return group.replace(
        rollout=rollout.replace(tokens_BR=spoil(rollout.tokens_BR), logp_BR=spoil(rollout.logp_BR)),
        **{
            name: jax.tree.map(spoil, getattr(group, name))
            for name in ("advantage_BR", "reference_logp_BR", "teacher", "teacher_hidden_BRD")
        },
    )


@pytest.mark.parametrize("kind", KINDS)
def test_m02_m17_m18_exactly_the_completions_tokens_have_a_gradient(mesh, kind):
    d_logits = run(mesh, kind, whole(mesh))[3]
    trained = np.abs(d_logits).sum(-1) > 0
    if kind in ("policy_gradient", "sampled_token"):  # The clip leaves some out.
        assert not (trained & ~batches.mask()).any()
        trained |= clipped_tokens(mesh, kind)
    # Also: a row of one token is trained on it, a row of none is finite and trains nothing, and the
    # last token of each row, the stop token, is not left out.
    np.testing.assert_array_equal(trained, batches.mask())
    assert np.isfinite(d_logits).all()


def clipped_tokens(mesh, kind):
    _, _, want = expected(mesh, kind)
    return batches.mask() & (np.abs(want).sum(-1) == 0)


def test_m17_an_instant_stop_with_a_negative_advantage_becomes_less_likely(mesh):
    group = batches.host()
    assert batches.LENGTHS[1] == 1
    behaviour = np.where(
        batches.mask(), batches.chosen(batches.log_softmax(batches.plain_logits(0))), 0
    )
    group = group.replace(
        rollout=group.rollout.replace(logp_BR=behaviour.astype(np.float32)),
        advantage_BR=np.full_like(group.advantage_BR, -1),
        reference_logp_BR=behaviour.astype(np.float32),
    )
    placed = whole(mesh)
    group = batches.put(mesh, group).replace(
        teacher_hidden_BRD=placed.teacher_hidden_BRD, teacher_table_VD=placed.teacher_table_VD
    )
    slope_V = run(mesh, "policy_gradient", group)[3][1, 0]
    token = group.rollout.tokens_BR[1, 0]
    assert slope_V[token] > 0  # Descent lowers it,
    assert (np.delete(slope_V, token) < 0).all()  # and raises all others.


def test_m14_the_last_prompt_token_predicts_the_first_completion_token(mesh):
    row = 2  # Prompt of three tokens, completion of three; the last is left out: P1 P2 P3 R1 R2.
    assert (batches.PROMPTS[row // 2], batches.LENGTHS[row]) == (3, 3)
    keep = np.zeros_like(batches.mask())
    keep[row, :2] = True
    group = whole(mesh)
    half = jax.device_put((keep / 2).astype(np.float32), group.weight_BR.sharding)
    loss, _, _, d_logits, _ = run(mesh, "supervised", group.replace(weight_BR=half))
    np.testing.assert_array_equal(np.abs(d_logits).sum(-1) > 0, keep)

    logp_TV = batches.log_softmax(batches.plain_logits(batches.STUDENT, first=0))[row]
    first, second = batches.host().rollout.tokens_BR[row, :2]
    by_hand = -(logp_TV[2, first] + logp_TV[3, second]) / 2
    assert loss == pytest.approx(by_hand, abs=1e-5)
    # Control: one position early.
    early = -(logp_TV[1, first] + logp_TV[2, second]) / 2
    assert abs(loss - early) > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_m06_a_batch_without_a_trained_row_has_no_loss_and_no_gradient(mesh, kind):
    group = whole(mesh)
    group = group.replace(weight_BR=jnp.zeros_like(group.weight_BR))
    loss, _, d_params, d_logits, _ = run(mesh, kind, group)
    assert loss == 0
    assert size(d_params) == 0
    assert size(d_logits) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_d10_no_gradient_for_the_teacher_or_for_what_the_sampler_stored(mesh, kind):
    _, _, d_params, _, d_group = run(mesh, kind, whole(mesh))
    d_group = d_group.replace(weight_BR=None)  # That of the weights is the loss itself.
    found = jax.tree.leaves(d_group)
    assert len(found) == 8
    assert size(found) == 0
    assert size(d_params) > 0


@pytest.mark.parametrize("kind", ["sampled_token", *EXACT])
def test_d08_a_teacher_equal_to_the_student_says_nothing(mesh, kind):
    group = whole(mesh, batches.STUDENT)
    own = jnp.asarray(
        np.where(batches.mask(), batches.chosen(batches.log_softmax(batches.plain_logits(0))), 0)
    )
    own = jax.device_put(own, group.weight_BR.sharding)

    def with_teacher(logp_BR, hidden_BRD):
        return group.replace(
            rollout=group.rollout.replace(logp_BR=own),
            teacher=group.teacher.replace(logp_BR=logp_BR),
            teacher_hidden_BRD=hidden_BRD,
        )

    loss, metrics, d_params, _, _ = run(mesh, kind, with_teacher(own, group.teacher_hidden_BRD))
    assert loss == pytest.approx(0, abs=1e-6)
    assert size(d_params) < 1e-5
    assert metrics["kl"].value() == pytest.approx(0, abs=1e-6)
    # Control: a teacher whose values stand one column late.
    late = with_teacher(jnp.roll(own, 1, 1), jnp.roll(group.teacher_hidden_BRD, 1, 1))
    assert size(run(mesh, kind, late)[2]) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_n16_eight_devices_and_any_order_of_prompts_give_the_same(mesh, mesh_2x2x2, kind):
    with jax.set_mesh(mesh):
        want = run(mesh, kind, whole(mesh))
        want_params = jax.tree.map(np.asarray, want[2])
    with jax.set_mesh(mesh_2x2x2):
        eight = whole(mesh_2x2x2)
        order = np.array([5, 2, 7, 0, 3, 6, 1, 4])
        table = tiny.host_params(C, batches.TEACHER)["embedding"]
        rows = jax.tree.map(np.asarray, eight.replace(teacher_table_VD=None))
        shuffled = batches.put(mesh_2x2x2, batches.take(rows, order), table)
        for group in (eight, shuffled):
            loss, metrics, d_params, _, _ = run(mesh_2x2x2, kind, group)
            assert loss == pytest.approx(want[0], abs=1e-6)
            assert largest_gap(d_params, want_params) < 1e-5
            means = {name: mean.value() for name, mean in metrics.items()}
            assert means == pytest.approx({k: m.value() for k, m in want[1].items()}, abs=1e-5)


def test_n40_the_kl_still_pulls_where_all_rewards_are_equal(mesh):
    group = whole(mesh).replace(advantage_BR=jnp.zeros_like(whole(mesh).advantage_BR))
    loss, metrics, d_params, _, _ = run(mesh, "policy_gradient", group)
    coefficient = batches.settings("policy_gradient").kl_coefficient
    assert loss == pytest.approx(coefficient * metrics["reference_kl"].value(), rel=1e-5)
    assert loss > 0.01
    assert size(d_params) > 1e-3


def test_tiles_change_nothing(mesh, monkeypatch):
    kinds = ("sampled_token", "jsd")
    want = [run(mesh, kind, whole(mesh)) for kind in kinds]
    monkeypatch.setattr(scoring, "MAX_TILE_ROWS", 2 * len(batches.LENGTHS))  # Two columns: 3 tiles.
    tiled = jax.jit(functools.partial(evaluate, kinds))
    for i, pull in enumerate(np.eye(2, dtype=np.float32)):
        loss_K, metrics_K, grads = tiled(tiny.params(mesh, C), None, whole(mesh), pull)
        assert float(loss_K[i]) == pytest.approx(want[i][0], abs=1e-6)
        assert largest_gap(grads[0], want[i][2]) < 1e-5
        for name, mean in metrics_K[i].items():
            assert mean.value() == pytest.approx(want[i][1][name].value(), abs=1e-5)


def test_weigh_leaves_out_rows_and_their_share_of_the_denominator(mesh):
    rollout = sharding.put(mesh, batches.host().rollout)
    real, stopped = batches.mask(), np.asarray(rollout.stopped_B)
    keep = np.arange(16) != 4
    for keep_B, truncated, rows in (
        (None, False, np.ones(16, bool)),
        (keep, False, keep),
        (None, True, stopped),
        (keep, True, keep & stopped),
    ):
        group = weigh(rollout, keep_B, "token-mean", None, truncated)
        kept = real & rows[:, None]
        np.testing.assert_allclose(group.weight_BR, kept / kept.sum(), rtol=1e-6)
    per_row = weigh(rollout, keep, "seq-mean-token-mean", None, False).weight_BR.sum(1)
    rows = keep & (real.sum(1) > 0)
    np.testing.assert_allclose(per_row, rows / rows.sum(), rtol=1e-5)
    constant = weigh(rollout, None, "constant-norm", 5.0, False).weight_BR
    np.testing.assert_allclose(constant, real / (5 * 14), rtol=1e-5)


def test_without_lists_there_is_no_overlap():
    logp, none = jnp.zeros((2, 3)), jnp.zeros((2, 3, 0))
    student = Scores(logp - 1, logp + 2, none.astype(jnp.int32), none)
    teacher = student.replace(logp_BR=logp - 3, entropy_BR=logp + 5)
    got = {k: float(v[0, 0]) for k, v in losses.diagnostics(student, teacher).items()}
    assert got == {"kl": 2, "entropy_student": 2, "entropy_teacher": 5, "entropy_gap": 3}
