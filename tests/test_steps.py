"""The compiled steps on a tiny model: micro-batches, meshes, teachers, donation, precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import steps
from opd_jax.config import GrpoSettings
from opd_jax.core import sharding, tree
from opd_jax.losses import weigh
from opd_jax.objectives import aggregate
from opd_jax.optim import OptimizerSettings
from tests import batches, tiny

C = batches.CONFIG
# With eps 1 and no clip, Adam's first update is smooth in the gradient: -lr * g / (|g| + 1).
SMOOTH = OptimizerSettings(learning_rate=0.1, eps=1.0, clip_norm=0.0)
ANOTHER = 9  # Seed of a second teacher.


def update(kind="reverse_kl", micro_batches=1, config=C):
    return steps.make_update_step(config, SMOOTH, 10, batches.settings(kind), micro_batches)


def fresh(mesh, seed=batches.STUDENT, config=C):
    return steps.make_state(SMOOTH, 10)(tiny.params(mesh, config, seed))


def taught(mesh, teacher=batches.TEACHER, group=None, config=C):
    """A group (by default the whole batch) with the hidden states and table of a teacher."""
    params = tiny.params(mesh, config, teacher)
    group = batches.put(mesh, bare()) if group is None else group
    hidden = steps.make_hidden_step(config)(params, group.rollout)
    return group.replace(teacher_hidden_BRD=hidden, teacher_table_VD=params["embedding"])


def bare():
    return batches.host().replace(advantage_BR=None, reference_logp_BR=None, teacher=None)


@functools.cache
def one_update():
    """What one update on the whole batch gives on one device: loss, metrics, parameters."""
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        return summary(update()(fresh(mesh), [taught(mesh)]))


def summary(out):
    state, report = out
    groups = [{k: m.value() for k, m in group.items()} for group in report["groups"]]
    return report["loss"].value(), groups, jax.tree.map(np.asarray, state.params)


def gap(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), a, b)))


def check_equal(got, want, atol=2e-6):
    assert got[0] == pytest.approx(want[0], abs=atol)
    assert gap(got[2], want[2]) < atol
    if len(got[1]) == len(want[1]):
        for mine, theirs in zip(got[1], want[1], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_n14_micro_batches_change_nothing(mesh):
    pieces = 4  # Two are tried on eight devices below.
    step = update(micro_batches=pieces)
    check_equal(summary(step(fresh(mesh), [taught(mesh)])), one_update())
    # Control: a mean of each piece's own mean is something else.
    own = np.zeros_like(bare().weight_BR)
    for j in range(pieces):
        rows = (np.arange(16) // 2) % pieces == j
        kept = batches.mask() & rows[:, None]
        own += kept / kept.sum() / pieces
    wrong = taught(mesh).replace(weight_BR=jax.device_put(own))
    loss, _, params = summary(step(fresh(mesh), [wrong]))
    assert abs(loss - one_update()[0]) > 1e-3
    assert gap(params, one_update()[2]) > 1e-4


def test_n16_the_order_of_prompts_changes_nothing(mesh):
    host = batches.take(bare(), np.array([5, 2, 7, 0, 3, 6, 1, 4]))
    shuffled = taught(mesh, group=batches.put(mesh, host))
    check_equal(summary(update()(fresh(mesh), [shuffled])), one_update())


def test_n16_micro_batches_on_eight_devices_equal_one_device(mesh, mesh_2x2x2):
    step, group = update(micro_batches=2), taught(mesh_2x2x2)
    state = fresh(mesh_2x2x2)
    types = jax.tree.map(jax.typeof, state)
    compiled = step._cache_size()
    for i in range(3):
        out = step(state, [group])
        state = out[0]
        if i == 0:
            check_equal(summary(out), one_update(), atol=1e-5)
        assert jax.tree.map(jax.typeof, state) == types
    assert step._cache_size() - compiled == 1
    assert types.params["layers"]["q"].sharding.spec == jax.P(None, "fsdp", "tensor", None)
    # Moments lie as their parameters do: each device holds its share only.
    by_path = tree.leaves_by_path(types.opt_state)
    moments = [t for path, t in by_path.items() if "['q']" in path]
    assert moments == [types.params["layers"]["q"]] * 2


def halves(mesh, first, second):
    """The batch in two groups of four prompts, each with a teacher."""
    whole = batches.put(mesh, bare())
    return [
        taught(mesh, teacher, steps.make_take_step(start, start + 4)(whole))
        for start, teacher in ((0, first), (4, second))
    ]


def test_d23_two_teachers_each_speak_about_their_own_rows(mesh):
    def expected(first, second):
        """Reverse KL per token, by whole log-softmaxes."""
        z = [batches.plain_logits(s) for s in (first, second)]
        p = batches.log_softmax(batches.plain_logits(batches.STUDENT))
        q = batches.log_softmax(np.concatenate([z[0][:8], z[1][8:]]))
        return (np.exp(p) * (p - q)).sum(-1)

    pair = (batches.TEACHER, ANOTHER)
    got = summary(update()(fresh(mesh), halves(mesh, *pair)))
    kl_BR = expected(*pair)
    real = batches.mask()
    assert got[0] == pytest.approx(kl_BR[real].mean(), abs=1e-5)
    for rows, metrics in zip((slice(0, 8), slice(8, 16)), got[1], strict=True):
        assert metrics["kl"] == pytest.approx(kl_BR[rows][real[rows]].mean(), abs=1e-5)
    # Control: the teachers exchanged.
    exchanged = expected(*pair[::-1])
    assert abs(exchanged[real].mean() - got[0]) > 1e-2


def test_d23_one_checkpoint_named_twice_is_one_teacher(mesh):
    got = summary(update()(fresh(mesh), halves(mesh, batches.TEACHER, batches.TEACHER)))
    check_equal(got, one_update())
    # Control: another teacher for half of the rows.
    other = summary(update()(fresh(mesh), halves(mesh, batches.TEACHER, ANOTHER)))
    assert gap(other[2], one_update()[2]) > 1e-3


def test_take_keeps_rows_in_order(mesh):
    whole = batches.put(mesh, bare())
    got = steps.make_take_step(2, 5)(whole).rollout
    np.testing.assert_array_equal(got.tokens_BR, whole.rollout.tokens_BR[4:10])
    np.testing.assert_array_equal(got.prompt.tokens_PL, whole.rollout.prompt.tokens_PL[2:5])


def test_m06_a_batch_without_a_trained_row_changes_no_parameter(mesh):
    group = taught(mesh)
    state, report = update()(fresh(mesh), [group.replace(weight_BR=0 * group.weight_BR)])
    assert report["loss"].value() == 0
    assert report["grad_norm"].value() == 0
    assert report["update_norm"].value() == 0
    assert np.asarray(report["finite"]).all()
    tree.check_same(tiny.params(mesh, C), state.params, "parameters", values=True)


def test_c22_d10_donation_spares_what_shares_its_buffers(mesh):
    reference, teacher = tiny.params(mesh, C), tiny.params(mesh, C, batches.TEACHER)
    state = steps.make_state(SMOOTH, 10)(reference)  # The reference IS the initial weights.
    group = taught(mesh).replace(teacher_table_VD=teacher["embedding"])
    new, _ = update()(state, [group])
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))  # Donated indeed.
    as_on_host = jax.tree.map(jnp.asarray, tiny.host_params(C))
    tree.check_same(as_on_host, jax.tree.map(jnp.asarray, reference), "reference", values=True)
    as_on_host = jax.tree.map(jnp.asarray, tiny.host_params(C, batches.TEACHER))
    tree.check_same(as_on_host, teacher, "teacher", values=True)
    assert gap(jax.tree.map(np.asarray, new.params), tiny.host_params(C)) > 1e-3


def test_n38_the_schedule_counts_updates(mesh):
    state, step = fresh(mesh), update(micro_batches=4)
    for _ in range(2):
        state, _ = step(state, [taught(mesh)])
    assert int(state.step) == 2
    counts = [int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0]
    assert counts == [2, 2]  # Adam's and the schedule's.


def test_one_program_serves_all_updates(mesh):
    step = steps.make_update_step(C, SMOOTH, 10, batches.settings("reverse_kl"), 1)
    assert step is update()
    state, compiled = fresh(mesh), []
    for seed in (batches.TEACHER, ANOTHER, batches.TEACHER):
        state, _ = step(state, [taught(mesh, seed)])
        compiled.append(step._cache_size())
    assert compiled[0] == compiled[-1]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_n26_n27_master_weights_and_moments_are_fp32_whatever_the_activations(mesh, remat):
    config = C.replace(dtype="bfloat16", remat=remat)
    state = jax.eval_shape(steps.make_state(SMOOTH, 10), tiny.params(mesh, C))
    group = taught(mesh)
    hidden = jax.eval_shape(steps.make_hidden_step(config), tiny.params(mesh, C), group.rollout)
    assert hidden.dtype == jnp.bfloat16  # So the setting is in force.
    step = update("supervised", config=config)
    after, report = jax.eval_shape(step, state, [batches.put(mesh, bare())])
    for x in jax.tree.leaves((state.params, state.opt_state, after.params, after.opt_state)):
        assert x.dtype == (jnp.float32 if x.ndim else jnp.int32)
    assert {x.dtype for x in jax.tree.leaves(report)} == {jnp.dtype("float32"), jnp.dtype(bool)}


def test_remat_changes_no_gradient(mesh):
    config = C.replace(remat="full")
    out = summary(update(config=config)(fresh(mesh), [taught(mesh)]))
    check_equal(out, one_update())


def test_finite_is_in_the_order_of_the_parameters(mesh, monkeypatch):
    bad = "['layers']['down']"

    def stub(params, config, group, loss):
        scale = dict.fromkeys(tree.leaves_by_path(params), 1.0) | {bad: jnp.nan}
        leaves = tree.leaves_by_path(params)
        return sum(scale[path] * x.sum() for path, x in leaves.items()), {}

    monkeypatch.setattr(steps, "group_loss", stub)
    step = steps.make_update_step.__wrapped__(C, SMOOTH, 10, batches.settings("jsd"), 1)
    state, report = step(fresh(mesh), [batches.put(mesh, bare())])
    names = list(tree.leaves_by_path(state.params))
    assert [n for n, ok in zip(names, report["finite"], strict=True) if not ok] == [bad]


def test_a_nan_in_a_parameter_is_reported(mesh):
    state = fresh(mesh)
    params = state.params | {"final_norm": state.params["final_norm"].at[3].set(jnp.nan)}
    _, report = update()(state.replace(params=params), [taught(mesh)])
    assert not np.asarray(report["finite"]).all()
    assert np.asarray(update()(fresh(mesh), [taught(mesh)])[1]["finite"]).all()


# Policy gradients.


def on_policy(mesh, teacher):
    """The batch as the student itself would have sampled it, scored by a teacher."""
    score = steps.make_score_step(C, batches.TEMPERATURE, batches.TOP_K)
    group = batches.put(mesh, bare())
    own = score(tiny.params(mesh, C), group.rollout).logp_BR
    rollout = group.rollout.replace(logp_BR=own)
    return group.replace(rollout=rollout, teacher=score(tiny.params(mesh, C, teacher), rollout))


def test_d08_scored_by_itself_the_student_learns_nothing(mesh):
    _, report = update("sampled_token")(fresh(mesh), [on_policy(mesh, batches.STUDENT)])
    assert report["loss"].value() == pytest.approx(0, abs=1e-7)
    assert report["grad_norm"].value() < 1e-6
    # Control: a teacher that is not the student.
    _, report = update("sampled_token")(fresh(mesh), [on_policy(mesh, batches.TEACHER)])
    assert report["grad_norm"].value() > 1e-2


def test_n33_the_second_update_on_a_rollout_is_off_policy_and_gets_clipped(mesh):
    step, group = update("sampled_token"), on_policy(mesh, batches.TEACHER)
    state, first = step(fresh(mesh), [group])
    assert first["groups"][0]["ratio"].value() == pytest.approx(1, abs=1e-5)
    assert first["groups"][0]["clipped"].value() == 0
    params = jax.tree.map(jnp.copy, state.params)
    _, second = step(state, [group])
    assert abs(second["groups"][0]["ratio"].value() - 1) > 1e-3
    assert second["groups"][0]["clipped"].value() > 0.02
    # Control: behaviour log-probs refreshed between the updates, and nothing is ever clipped.
    own = steps.make_score_step(C, batches.TEMPERATURE, batches.TOP_K)(params, group.rollout)
    refreshed = group.replace(rollout=group.rollout.replace(logp_BR=own.logp_BR))
    state = fresh(mesh).replace(params=params)
    _, report = step(state, [refreshed])
    assert report["groups"][0]["ratio"].value() == pytest.approx(1, abs=1e-5)
    assert report["groups"][0]["clipped"].value() == 0


def test_fixed_negative_gives_the_same_advantage_to_the_least_likely_fifth(mesh):
    group = batches.put(mesh, bare())
    got = np.asarray(steps.fixed_negative_step(group).advantage_BR)
    real, logp = batches.mask(), bare().rollout.logp_BR
    count = int(np.floor(0.2 * (real.sum() - 1))) + 1  # Values up to the quantile, it included.
    least = np.sort(logp[real])[count - 1]
    np.testing.assert_array_equal(got, np.where(real & (logp <= least), -0.5, 0))
    assert (got < 0).sum() == count


# GRPO's signal.

REWARDS = np.array([[1, 0], [1, 1], [0, 0], [0, 1], [1, 0], [0, 0], [1, 1], [0, 1]], np.float32)


def grpo_group(mesh, mask_truncated=False, **settings):
    values = {"advantage_scale": "none"} | settings
    step = steps.make_grpo_step(GrpoSettings(**values), "token-mean", None, mask_truncated)
    rollout = sharding.put(mesh, batches.host().rollout)
    return step(rollout, sharding.put(mesh, REWARDS), None)


def test_grpo_rows_get_their_own_prompts_advantage(mesh):
    group, same_P = grpo_group(mesh)
    centred = REWARDS - REWARDS.mean(1, keepdims=True)
    np.testing.assert_allclose(
        group.advantage_BR, np.repeat(centred.reshape(-1)[:, None], 5, 1), atol=1e-7
    )
    np.testing.assert_array_equal(same_P, REWARDS[:, 0] == REWARDS[:, 1])
    np.testing.assert_allclose(group.weight_BR, batches.mask() / batches.mask().sum(), rtol=1e-6)


def test_n40_dropping_equal_rewards_changes_numerator_and_denominator(mesh):
    group, same_P = grpo_group(mesh, drop_zero_variance=True)
    kept = batches.mask() & ~np.repeat(np.asarray(same_P), 2)[:, None]
    assert 0 < kept.sum() < batches.mask().sum()
    np.testing.assert_allclose(group.weight_BR, kept / kept.sum(), rtol=1e-6)


@pytest.mark.parametrize("counted", [True, False])
def test_m08_truncated_rows_in_the_baseline_or_not(mesh, counted):
    group, _ = grpo_group(mesh, mask_truncated=True, truncated_in_baseline=counted)
    stopped_Pn = batches.host().rollout.stopped_B.reshape(8, 2)
    valid = np.ones_like(stopped_Pn) if counted else stopped_Pn
    mean = (REWARDS * valid).sum(1, keepdims=True) / np.maximum(valid.sum(1, keepdims=True), 1)
    want = np.where(valid, REWARDS - mean, 0).reshape(-1)
    np.testing.assert_allclose(group.advantage_BR[:, 0], want, atol=1e-7)
    # Either way they do not train.
    assert (np.asarray(group.weight_BR)[~stopped_Pn.reshape(-1)] == 0).all()


@pytest.mark.parametrize("mode", aggregate.AGGREGATIONS)
def test_sharded_weights_equal_those_of_one_device(mesh, mesh_2x2x2, mode):
    constant = 5.0 if mode == "constant-norm" else None
    with jax.set_mesh(mesh):
        want = weigh(sharding.put(mesh, bare().rollout), None, mode, constant, True).weight_BR
    step = steps.make_weigh_step(mode, constant, True)
    got = step(sharding.put(mesh_2x2x2, bare().rollout), None).weight_BR
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)


def test_score_compiles_once_and_equals_whole_log_softmaxes(mesh):
    rollout = sharding.put(mesh, bare().rollout)
    step, compiled = steps.make_score_step(C, batches.TEMPERATURE, batches.TOP_K), []
    for seed in (batches.STUDENT, batches.TEACHER, ANOTHER):
        got = step(tiny.params(mesh, C, seed), rollout)
        want = batches.chosen(batches.log_softmax(batches.plain_logits(seed)))
        real = batches.mask()
        np.testing.assert_allclose(np.asarray(got.logp_BR)[real], want[real], atol=2e-5)
        compiled.append(step._cache_size())
    assert compiled[0] == compiled[-1]
