"""From prompts to groups: signals, rows that are left out, and what is booked for it all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import algorithms, ledger, steps
from opd_jax.algorithms import Context, Teacher, loss_settings
from opd_jax.config import GrpoSettings, OpdSettings, SftSettings, Stage
from opd_jax.core import rng, sharding
from opd_jax.data.problem import Problem
from opd_jax.data.prompts import encode_prompts
from opd_jax.rollout import Sampling
from tests import batches, tiny

C = batches.CONFIG
N, R = 2, 4
RANGES = {"a": (0, 4), "b": (4, 8)}


class Digits:
    """Tokens 0 to 23 are digits of base 3, 24 to 31 end a completion: a random model gets some
    problems right, others wrong, and some completions are cut."""

    vocab_size, pad_id, bos_id, stop_ids = 32, 0, None, tuple(range(24, 32))

    def encode(self, text):
        return [int(c) for c in text]

    def encode_prompt(self, text):
        return self.encode(text)

    def decode(self, ids, *, continues=False):
        return "".join(str(i % 3) for i in ids)


def problems():
    """Eight; completion "0", "1" or "2" is right, or nothing that can be sampled."""
    return [
        Problem(
            domain="a" if i < 4 else "b", id=i, level=1, prompt="012012"[: 1 + i % 5],
            answer=("0", "1", "2", "777")[i % 4], solutions={"terse": "10"[: 1 + i % 2]},
            verifier="integer",
        )
        for i in range(8)
    ]  # fmt: skip


def context(mesh, algorithm="grpo", teachers=None, reference=None, **options):
    """A stage of two domains, four prompts of each."""
    stage = Stage(
        algorithm=algorithm,
        init="scratch",
        domains={"a": 0.5, "b": 0.5},
        teachers={domain: t.spec for domain, t in (teachers or {}).items()},
        prompts=8,
        sampling=Sampling(samples=N, max_new_tokens=R, temperature=0.9),
        **options,
    )
    return Context(
        stage=stage, seed=3, config=C, mesh=mesh, tokenizer=Digits(), ranges=RANGES,
        teachers=teachers or {}, reference=reference,
    )  # fmt: skip


def teacher(mesh, seed):
    if seed is None:
        return Teacher("self", C, None, {})
    return Teacher(f"seed {seed}", C, tiny.params(mesh, C, seed), {})


@functools.cache
def prompt():
    return encode_prompts(problems(), ["a", "b"], Digits(), buckets=(6,))


def prepare(ctx):
    """The algorithm's batch at step 5, and its ledger."""
    book, params = ledger.Ledger(), tiny.params(ctx.mesh, C)
    placed = sharding.put(ctx.mesh, prompt())
    run = algorithms.ALGORITHMS[ctx.stage.algorithm]
    return run(ctx, params, problems(), placed, 5, book), book


def rights(rollout):
    """Which rows are right, worked out from the tokens."""
    right = []
    for b, tokens in enumerate(np.asarray(rollout.tokens_BR).tolist()):
        length, stopped = int(rollout.length_B[b]), bool(rollout.stopped_B[b])
        text = "".join(str(t % 3) for t in tokens[: length - stopped])
        right.append(text == problems()[b // N].answer)
    return np.array(right)


def booked(book):
    """The phases in which something was booked."""
    return {phase: flops for phase, flops in book.flops.items() if flops}


def sampling_cost(prompt_P, length_B):
    return {
        "prefill": ledger.prefill(C, prompt_P),
        "decode": ledger.decode(C, np.repeat(prompt_P, N), length_B),
    }


def test_t03_the_update_gets_the_sampled_ids_not_their_text(mesh):
    """The text of a completion names other tokens than those sampled: it is for verifiers alone."""
    ctx = context(mesh)
    params, placed = tiny.params(mesh, C), sharding.put(mesh, prompt())
    sample = steps.make_rollout_step(C, ctx.stage.sampling)
    sampled, _ = sample(params, placed, rng.stream(ctx.seed, "rollout", 5))
    (group,) = prepare(ctx)[0].groups
    np.testing.assert_array_equal(group.rollout.tokens_BR, sampled.tokens_BR)
    assert group.rollout.tokens_BR.shape[1] <= R
    again = [Digits().encode(text) for text in algorithms.texts(Digits(), sampled)]
    assert again != [
        row[: len(a)] for row, a in zip(sampled.tokens_BR.tolist(), again, strict=True)
    ]


def test_t20_a_stop_text_ends_tokens_mask_and_text_alike(mesh):
    plain, book = prepare(context(mesh))
    cut, cut_book = prepare(dataclasses.replace(context(mesh), stop_strings=("11", "2")))
    before, after = plain.groups[0].rollout, cut.groups[0].rollout
    np.testing.assert_array_equal(before.tokens_BR, after.tokens_BR)
    shorter = np.asarray(after.length_B) < np.asarray(before.length_B)
    assert shorter.any()
    assert not shorter.all()
    np.testing.assert_array_equal(after.mask_BR.sum(-1), after.length_B)
    for b, text in enumerate(algorithms.texts(Digits(), before)):
        found = [at for stop in ("11", "2") if (at := text.find(stop)) >= 0]
        # "1" then "1" are two tokens: both are kept and trained, the text ends before the first.
        ends = [text.find(s) + len(s) for s in ("11", "2") if s in text]
        assert int(after.length_B[b]) == (min(ends) if found else int(before.length_B[b]))
        assert bool(after.stopped_B[b]) == (bool(found) or bool(before.stopped_B[b]))
    # What was sampled was paid for.
    assert cut_book.flops["decode"] == book.flops["decode"]


def test_grpo_rewards_facts_and_ledger(mesh):
    batch, book = prepare(context(mesh))
    (group,), rollout = batch.groups, batch.groups[0].rollout
    right, length = rights(rollout), np.asarray(rollout.length_B)
    stopped = np.asarray(rollout.stopped_B)
    assert 0 < right.sum() < 16  # Or nothing would be tested here.
    assert 0 < stopped.sum() < 16
    centred = right.reshape(8, 2) - right.reshape(8, 2).mean(1, keepdims=True)
    signs = np.sign(np.asarray(group.advantage_BR[:, 0]))
    np.testing.assert_array_equal(signs, np.sign(centred.reshape(-1)))
    for name, value in (("reward", right), ("length", length), ("truncated", ~stopped)):
        assert batch.facts[name] == pytest.approx(value.mean())
        assert batch.facts[f"{name}/a"] == pytest.approx(value[:8].mean())
        assert batch.facts[f"{name}/b"] == pytest.approx(value[8:].mean())
    equal = right.reshape(8, 2)[:, 0] == right.reshape(8, 2)[:, 1]
    assert batch.facts["zero_variance"] == equal.mean()
    np.testing.assert_array_equal(batch.prompt_P, prompt().length_P)
    np.testing.assert_array_equal(batch.length_B, length)
    assert batch.names == [""]
    assert booked(book) == sampling_cost(prompt().length_P, length)
    # Control: columns, not lengths, would be another cost.
    assert booked(book) != sampling_cost(np.full(8, 6), np.full(16, R))


def test_a_reference_is_scored_and_booked(mesh):
    settings = GrpoSettings(kl_coefficient=0.1)
    params = tiny.params(mesh, C)
    batch, book = prepare(context(mesh, reference=params, grpo=settings))
    rollout = batch.groups[0].rollout
    # The reference is what sampled: the same log-probs, at the sampler's temperature.
    mask = np.asarray(rollout.mask_BR)
    gap = np.asarray(batch.groups[0].reference_logp_BR - rollout.logp_BR)
    np.testing.assert_allclose(gap[mask], 0, atol=1e-5)
    want = ledger.score(C, prompt().length_P, batch.length_B)
    assert booked(book)["reference_score"] == want


def test_n40_dropped_groups_do_not_train_and_their_sampling_is_discarded(mesh):
    kept_batch, kept_book = prepare(context(mesh))
    batch, book = prepare(context(mesh, grpo=GrpoSettings(drop_zero_variance=True)))
    right = rights(batch.groups[0].rollout).reshape(8, 2)
    gone = right[:, 0] == right[:, 1]
    assert 0 < gone.sum() < 8
    trained = np.asarray(batch.groups[0].weight_BR).sum(1) > 0
    np.testing.assert_array_equal(trained, np.repeat(~gone, 2))
    # Control: without the option they do train (a KL would pull on them).
    assert (np.asarray(kept_batch.groups[0].weight_BR).sum(1) > 0).all()
    rows = np.repeat(gone, 2)
    lost = sampling_cost(prompt().length_P[gone], batch.length_B[rows])
    assert book.flops["discarded"] == pytest.approx(sum(lost.values()))
    for phase, flops in lost.items():
        assert book.flops[phase] == pytest.approx(kept_book.flops[phase] - flops)
    assert book.total == pytest.approx(kept_book.total)


@pytest.mark.parametrize("counted", [True, False])
def test_m08_the_config_says_whether_truncated_rows_count_in_the_baseline(mesh, counted):
    settings = GrpoSettings(advantage_scale="none", truncated_in_baseline=counted)
    batch, _ = prepare(context(mesh, grpo=settings, mask_truncated=True))
    (group,) = batch.groups
    reward = rights(group.rollout).reshape(8, 2).astype(np.float32)
    stopped = np.asarray(group.rollout.stopped_B).reshape(8, 2)
    valid = np.ones_like(stopped) if counted else stopped
    mean = (reward * valid).sum(1, keepdims=True) / np.maximum(valid.sum(1, keepdims=True), 1)
    want = np.where(valid, reward - mean, 0).reshape(-1)
    np.testing.assert_allclose(group.advantage_BR[:, 0], want, atol=1e-7)
    assert (np.asarray(group.weight_BR)[~stopped.reshape(-1)] == 0).all()
    # Control: here the two readings differ.
    differ = (reward * ~stopped).any() or ((reward.max(1) > 0) & ~stopped.all(1)).any()
    assert differ


def test_d23_each_domain_is_scored_by_its_teacher_and_d08_self_says_nothing(mesh):
    teachers = {"a": teacher(mesh, 7), "b": teacher(mesh, None)}
    batch, book = prepare(context(mesh, "opd", teachers, opd=OpdSettings(loss="sampled", top_k=4)))
    assert batch.names == ["a", "b"]
    a, b = batch.groups
    mask = np.asarray(b.rollout.mask_BR)
    gap = np.asarray(b.teacher.logp_BR - b.rollout.logp_BR)
    np.testing.assert_allclose(gap[mask], 0, atol=1e-5)
    score = steps.make_score_step(C, 0.9, 4)
    want = score(tiny.params(mesh, C, 7), a.rollout)
    np.testing.assert_array_equal(a.teacher.logp_BR, want.logp_BR)
    # Control: the student's opinion on the first domain is another.
    own = np.asarray(score(tiny.params(mesh, C), a.rollout).logp_BR)
    assert np.abs(own - want.logp_BR)[np.asarray(a.rollout.mask_BR)].max() > 0.1
    np.testing.assert_array_equal(
        np.concatenate([a.rollout.length_B, b.rollout.length_B]), batch.length_B
    )
    # Weights are of the whole batch, so the groups' losses add up.
    total = sum(float(g.weight_BR.sum()) for g in batch.groups)
    assert total == pytest.approx(1, abs=1e-6)
    scored = ledger.score(C, prompt().length_P, batch.length_B)
    cost = sampling_cost(prompt().length_P, batch.length_B) | {"teacher_score": scored}
    assert booked(book) == pytest.approx(cost)
    assert batch.facts["reward"] == rights_of(batch).mean()


def rights_of(batch):
    parts = [jax.tree.map(np.asarray, g.rollout) for g in batch.groups]
    return rights(jax.tree.map(lambda *xs: np.concatenate(xs), *parts))


def test_exact_losses_carry_hidden_states_and_a_table_that_survives_the_update(mesh):
    teachers = {"a": teacher(mesh, 7), "b": teacher(mesh, None)}
    ctx = context(mesh, "opd", teachers, opd=OpdSettings(loss="reverse_kl", top_k=4))
    params = tiny.params(mesh, C)
    batch = algorithms.opd(
        ctx, params, problems(), sharding.put(mesh, prompt()), 5, ledger.Ledger()
    )
    a, b = batch.groups
    jax.tree.map(lambda x: x.delete(), params)  # As the update does to the student's.
    np.testing.assert_array_equal(a.teacher_table_VD, tiny.host_params(C, 7)["embedding"])
    np.testing.assert_array_equal(b.teacher_table_VD, tiny.host_params(C)["embedding"])
    assert not np.array_equal(a.teacher_hidden_BRD, b.teacher_hidden_BRD)
    assert a.teacher is None


def test_fixed_negative_needs_no_teacher_and_books_none(mesh):
    control = Teacher("fixed_negative", C, None, {})
    ctx = context(mesh, "opd", {"a": control, "b": control}, opd=OpdSettings(loss="sampled"))
    batch, book = prepare(ctx)
    assert batch.names == [""]
    (group,) = batch.groups  # Its threshold is that of the whole batch.
    advantage, mask = np.asarray(group.advantage_BR), np.asarray(group.rollout.mask_BR)
    assert set(np.unique(advantage)) == {-0.5, 0}
    assert (advantage[~mask] == 0).all()
    assert group.teacher is None
    assert booked(book).keys() == {"prefill", "decode"}


def test_sft_on_solutions(mesh):
    batch, book = prepare(context(mesh, "sft"))
    rollout = batch.groups[0].rollout
    want = [[1, 24, 0, 0], [1, 0, 24, 0]] * 4
    np.testing.assert_array_equal(rollout.tokens_BR, want)
    np.testing.assert_array_equal(rollout.length_B, [2, 3] * 4)
    np.testing.assert_array_equal(rollout.mask_BR.sum(1), [2, 3] * 4)  # The stop token trains.
    weight = np.asarray(batch.groups[0].weight_BR)
    np.testing.assert_allclose(weight, np.asarray(rollout.mask_BR) / 20, rtol=1e-6)
    assert booked(book) == {}
    assert batch.facts["kept"] == 1


@pytest.mark.parametrize("reject", [False, True])
def test_sft_on_teachers_rollouts(mesh, reject):
    teachers = {"a": teacher(mesh, 7), "b": teacher(mesh, 0)}
    settings = SftSettings(source="teacher", reject_wrong=reject)
    batch, book = prepare(context(mesh, "sft", teachers, sft=settings))
    (group,) = batch.groups
    right = rights(group.rollout)
    assert 0 < right.sum() < 16
    kept = right if reject else np.ones(16, bool)
    mask = np.asarray(group.rollout.mask_BR) & kept[:, None]
    np.testing.assert_allclose(group.weight_BR, mask / mask.sum(), rtol=1e-6)
    assert batch.facts["kept"] == kept.mean()
    assert batch.facts["reward"] == right.mean()
    # Each domain's rows are its own teacher's, at the behaviour log-probs it gave them.
    for rows, seed in ((slice(0, 8), 7), (slice(8, 16), 0)):
        part = jax.tree.map(np.asarray, group.rollout)
        part = jax.tree.map(
            lambda x, r=rows: x[r] if len(x) == 16 else x[r.start // 2 : r.stop // 2], part
        )
        score = steps.make_score_step(C, 0.9, 4)
        own = np.asarray(score(tiny.params(mesh, C, seed), sharding.put(mesh, part)).logp_BR)
        np.testing.assert_allclose(own[part.mask_BR], part.logp_BR[part.mask_BR], atol=1e-5)
    made = sum(sampling_cost(prompt().length_P, batch.length_B).values())
    prompt_B = np.repeat(prompt().length_P, 2)
    lost = ledger.decode(C, prompt_B[~kept], batch.length_B[~kept])
    assert (lost > 0) == reject
    assert book.flops["discarded"] == pytest.approx(lost)
    assert book.flops["generation"] == pytest.approx(made - lost)
    assert book.total == pytest.approx(made)


def test_sampling_is_a_function_of_the_step(mesh):
    def tokens(step):
        ctx = context(mesh)
        params, placed = tiny.params(mesh, C), sharding.put(mesh, prompt())
        batch = algorithms.grpo(ctx, params, problems(), placed, step, ledger.Ledger())
        return np.asarray(batch.groups[0].rollout.tokens_BR)

    assert np.array_equal(tokens(5), tokens(5))
    assert not np.array_equal(tokens(5), tokens(6))
    sampler = steps.make_rollout_step(C, context(mesh).stage.sampling)
    before = sampler._cache_size()
    tokens(7)
    assert sampler._cache_size() == before


def test_a_check_between_phases_can_give_up(mesh):
    class GivenUp(Exception):
        pass

    def give_up(phase):
        raise GivenUp

    ctx = context(mesh)
    ctx = Context(**{**vars(ctx), "check": give_up})
    with pytest.raises(GivenUp):
        prepare(ctx)


@pytest.mark.parametrize(
    ("algorithm", "options", "kind", "temperature", "kl", "top_k"),
    [
        ("grpo", {"grpo": GrpoSettings(kl_coefficient=0.2)}, "policy_gradient", 0.9, 0.2, 0),
        ("opd", {"opd": OpdSettings(loss="sampled", top_k=4)}, "sampled_token", 0.9, 0, 4),
        ("opd", {"opd": OpdSettings(loss="jsd", top_k=3)}, "jsd", 0.9, 0, 3),
        ("sft", {}, "supervised", 1.0, 0, 0),
    ],
)
def test_loss_settings_follow_the_stage(mesh, algorithm, options, kind, temperature, kl, top_k):
    # Another algorithm's KL must not leak in.
    options = {"grpo": GrpoSettings(kl_coefficient=0.5)} | options
    got = loss_settings(context(mesh, algorithm, clip_low=0.1, **options).stage)
    assert (got.kind, got.temperature, got.kl_coefficient) == (kind, temperature, kl)
    assert (got.top_k, got.clip_low) == (top_k, 0.1)


def test_texts_leave_out_the_stop_token_only_where_there_is_one(mesh):
    rollout = batches.host().rollout
    tokens = np.tile(np.array([[1, 2, 24, 0, 0]], np.int32), (16, 1))
    length, stopped = np.tile([3, 2], 8), np.tile([True, False], 8)
    rollout = rollout.replace(tokens_BR=tokens, length_B=length, stopped_B=stopped)
    assert algorithms.texts(Digits(), jax.tree.map(jnp.asarray, rollout)) == ["12", "12"] * 8
    empty = rollout.replace(length_B=np.zeros(16, int), stopped_B=np.zeros(16, bool))
    assert algorithms.texts(Digits(), empty) == [""] * 16  # M18: the verifier sees "".
